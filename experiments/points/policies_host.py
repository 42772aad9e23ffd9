"""What is recommended against the alternatives, on real lanes: all policies on the same requests, one after the other.

    repeat 0   gpu_only sync_offload async_overlap ... auto | the next case: gpu_only ...
    repeat 1   the same again: a slow moment of the machine meets all policies alike

Interleaved, because a machine drifts; medians over the repeats, with the range, because it is noisy.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments.points.measured import shared_model
from experiments.schema import App
from experiments.settings import experiment
from hybridattn import LLM, SamplingParams
from hybridattn.core.errors import InputError
from hybridattn.core.stages import CPU_TIER
from hybridattn.metrics.report import run_metrics

PAGE = 32
SOON_NS = 2_000_000_000  # "from the first second on": what comes within two of them is a figure of its own
PLANNED = ("adaptive", "auto")
TEXTS = (
    "The capital of France is", "1, 2, 3,", "Once upon a time", "Water boils at", "The sun rises in the",
    "My favourite season is", "A triangle has", "The largest ocean is", "To bake bread you need", "The year has",
    "In the morning I", "Two plus two is",
)  # fmt: skip


class Case(NamedTuple):
    """Requests, tokens of each prompt (0: a real text) and answer, and requests that the GPU tier has pages for."""

    requests: int
    prompt: int
    output: int
    on_gpu: int


CASES = {
    "text": Case(12, 0, 40, 5),
    "text-long-answers": Case(8, 0, 100, 3),
    "text-few": Case(4, 0, 40, 2),
    "steady-64": Case(8, 64, 24, 4),
    "steady-64-most-on-cpu": Case(12, 64, 24, 2),
    "steady-400": Case(6, 400, 24, 2),
    "steady-400-most-on-gpu": Case(6, 400, 24, 4),
    "steady-1000": Case(4, 1000, 24, 2),
    "steady-1000-most-on-cpu": Case(4, 1000, 24, 1),
    "steady-2000": Case(3, 2000, 24, 1),
    "steady-2000-long-answers": Case(2, 2000, 80, 1),
    "all-fit": Case(4, 64, 40, 4),
}


@dataclass
class PoliciesHostSettings:
    """``settings`` of ``policies_host``.

    case : one of ``CASES``
    profile : what ``adaptive`` and ``auto`` plan by; empty: where ``hybridattn calibrate`` writes
    """

    case: str = "text"
    profile: str = ""

    def __post_init__(self) -> None:
        if self.case not in CASES:
            raise InputError(f"settings.case '{self.case}' is none of {', '.join(CASES)}")


@experiment(PoliciesHostSettings)
def point(app: App, settings: PoliciesHostSettings) -> dict[str, Any]:
    """One row: tokens per second of a policy, whole and within the first two seconds, and what a planner chose."""
    case, name = CASES[settings.case], app.policy.label
    model = shared_model(app)
    prompts = _prompts(case, model)
    pages = -(-(max(map(len, prompts)) + case.output) // PAGE)
    planned: dict[str, Any] = {"profile": settings.profile or None} if name in PLANNED else {}
    with LLM(
        model=model, device=app.device.name, policy=name, dtype=app.model.dtype, page_size=PAGE,
        gpu_kv_blocks=case.on_gpu * pages, cpu_kv_blocks=max(1, case.requests * pages), max_model_len=4096 // 2,
        op_timeout_s=300.0, **planned,
    ) as llm:  # fmt: skip
        llm.generate(prompts[:2], SamplingParams(max_tokens=2, ignore_eos=True))
        llm.trace(), llm.take_records()
        outputs = llm.generate(prompts, SamplingParams(max_tokens=case.output, ignore_eos=True))
        trace, records, chosen = llm.trace(), llm.take_records(), repr(llm.policy)
    found = run_metrics(records, trace)
    start_ns = min(o.record.arrival_ns for o in outputs)
    soon = sum(t - start_ns <= SOON_NS for o in outputs for t in o.record.token_ns)
    return {
        "kind": found.kind, "device": found.device, "profile": found.profile, "case": settings.case,
        "requests": case.requests, "gpu_room": case.on_gpu, "cpu_rows": sum(o.tier == CPU_TIER for o in outputs),
        "tokens_per_s": found["output_tokens_per_s"], "first_2s_tokens_per_s": soon / (SOON_NS / 1e9),
        "tpot_gpu_tier_mean_ns": found["tpot_gpu_tier_mean_ns"],
        "tpot_cpu_tier_mean_ns": found["tpot_cpu_tier_mean_ns"],
        "completed": found["completed"], "failed": found["failed"], "chosen": chosen if name in PLANNED else "",
    }  # fmt: skip


def _prompts(case: Case, model: Any) -> list[list[int]]:
    if not case.prompt:
        return [model.tokenizer.encode(TEXTS[i % len(TEXTS)]) for i in range(case.requests)]
    vocabulary = model.config.shape.vocab_size
    return [[(7 + 13 * i + 3 * j) % vocabulary for j in range(case.prompt)] for i in range(case.requests)]


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Medians for each case, the share of the best fixed policy that the planned ones reach, and what they chose."""
    cases: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for r in rows:
        cases.setdefault(r["case"], {}).setdefault(r["policy"], []).append(r)
    lines, shares, beside = [], [], []
    for case, policies in cases.items():
        middle = {p: statistics.median(r["tokens_per_s"] for r in runs) for p, runs in policies.items()}
        fixed = {p: v for p, v in middle.items() if p not in PLANNED}
        if not fixed:
            continue
        best = max(fixed, key=lambda p: fixed[p])
        lines.append(f"{case}: best fixed {best} {fixed[best]:.1f} tokens/s")
        for policy, runs in policies.items():
            values = [r["tokens_per_s"] for r in runs]
            soon = statistics.median(r["first_2s_tokens_per_s"] for r in runs)
            lines.append(
                f"  {policy:<14} {middle[policy]:7.1f} ({min(values):.1f} to {max(values):.1f}, {len(values)} runs)  "
                f"{middle[policy] / fixed[best]:5.2f} of the best fixed  first 2 s {soon:6.1f}"
                + (f"  {runs[-1]['chosen']}" if runs[-1]["chosen"] else "")
            )
        if "adaptive" in middle:
            shares.append((middle["adaptive"] / fixed[best], case))
        if "auto" in middle and "gpu_only" in fixed:
            beside.append((middle["auto"] / fixed["gpu_only"], case))
    if shares:
        low, where = min(shares)
        ahead = sum(s >= 1.03 for s, _ in shares)
        lines.append(
            f"adaptive: at least {low:.2f} of the best fixed policy (goal: 0.97), lowest in {where}; "
            f"1.03 or more in {ahead} of {len(shares)} cases"
        )
    if beside:
        low, where = min(beside)
        lines.append(f"auto: at least {low:.2f} of gpu_only (goal: 0.98), lowest in {where}")
    return lines
