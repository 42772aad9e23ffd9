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

from experiments.points.measured import open_llm, shared_model, warm_up, whole_pages
from experiments.schema import App
from experiments.settings import experiment
from hybridattn import SamplingParams
from hybridattn.core.errors import InputError
from hybridattn.core.request import Request
from hybridattn.core.stages import CPU_TIER
from hybridattn.kv.manager import KVManager
from hybridattn.metrics.report import run_metrics

SOON_NS = 2_000_000_000  # "from the first second on": what comes within two of them is a figure of its own
PLANNED = ("adaptive", "auto")
BEST, BESIDE = 0.97, 0.98  # goals: adaptive over the best fixed policy, auto over gpu_only
MOST_SHOWN = 16  # decisions, where a goal is missed
TEXTS = (
    "The capital of France is", "1, 2, 3,", "Once upon a time", "Water boils at", "The sun rises in the",
    "My favourite season is", "A triangle has", "The largest ocean is", "To bake bread you need", "The year has",
    "In the morning I", "Two plus two is",
)  # fmt: skip


class Case(NamedTuple):
    """Requests, tokens of each prompt (0: a real text) and answer at most, and requests that the GPU tier has room for.

    Real texts are answered to the end. Else the prompts count as read and the rows decode for two seconds: whatever is
    chosen late is lost.
    """

    requests: int
    prompt: int
    output: int
    on_gpu: int


CASES = {
    "text": Case(12, 0, 40, 5),
    "text-few": Case(4, 0, 40, 2),
    "steady-64": Case(8, 65, 31, 4),
    "steady-64-most-on-cpu": Case(12, 65, 31, 2),
    "steady-64-one-each": Case(2, 65, 31, 1),
    "steady-400": Case(6, 400, 64, 2),
    "steady-400-most-on-gpu": Case(6, 400, 64, 4),
    "steady-1000": Case(4, 1000, 64, 2),
    "steady-1000-most-on-cpu": Case(8, 1000, 64, 1),
    "steady-2000": Case(3, 1980, 64, 1),
    "steady-2000-many": Case(12, 1980, 64, 4),
    "all-fit": Case(4, 65, 31, 4),
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


class AsIfRead(KVManager):
    """New requests have the K,V of their prompts but for the last token: the pages hold zeros, which take as long to
    attend to as anything else."""

    __slots__ = ()

    def admit(self, request: Request, tier: str, cold: int = 0) -> None:
        super().admit(request, tier, cold)
        if not request.num_output:
            request.num_computed = request.num_tokens - 1


@experiment(PoliciesHostSettings)
def point(app: App, settings: PoliciesHostSettings) -> dict[str, Any]:
    """One row: tokens per second of a policy, whole and within the first two seconds, and what a planner chose."""
    case, name = CASES[settings.case], app.policy.label
    prompts = _prompts(case, shared_model(app))
    each = whole_pages(max(map(len, prompts)) + case.output)
    room = {"gpu_tokens": case.on_gpu * each, "cpu_tokens": case.requests * each}
    planned: dict[str, Any] = {"profile": settings.profile or None} if name in PLANNED else {}
    with open_llm(app, **room, policy=name, max_model_len=2048, **planned) as llm:
        warm_up(llm, [p[:8] for p in prompts[:2]])
        if case.prompt:
            llm.engine.kv.__class__ = AsIfRead
        start_ns = llm.device.now_ns()
        with llm.start(prompts, SamplingParams(max_tokens=case.output, ignore_eos=True)) as call:
            while not call.ended and not (case.prompt and llm.device.now_ns() - start_ns >= SOON_NS):
                next(call, None)
            took_ns = llm.device.now_ns() - start_ns
        outputs = call.outputs()
        trace, records, chosen = llm.trace(), llm.take_records(), repr(llm.policy)
    found = run_metrics(records, trace)
    times_ns = [t - start_ns for o in outputs for t in o.record.token_ns]
    return {
        **found.as_row(("tpot_gpu_tier_mean_ns", "tpot_cpu_tier_mean_ns")), "case": settings.case,
        "requests": case.requests, "gpu_room": case.on_gpu, "cpu_rows": sum(o.tier == CPU_TIER for o in outputs),
        "prompt_tokens_read": sum(s.prefill_tokens for s in records.steps),
        "tokens_per_s": len(times_ns) / took_ns * 1e9,
        "first_2s_tokens_per_s": sum(t <= SOON_NS for t in times_ns) / min(took_ns, SOON_NS) * 1e9,
        "failed": sum(o.error is not None for o in outputs), "chosen": chosen if name in PLANNED else "",
        "decisions": " | ".join(f"{(c.at_ns - start_ns) / 1e9:.2f} s: {c}" for c in records.layouts),
    }  # fmt: skip


def _prompts(case: Case, model: Any) -> list[list[int]]:
    if not case.prompt:
        return [model.tokenizer.encode(TEXTS[i % len(TEXTS)]) for i in range(case.requests)]
    vocabulary = model.config.shape.vocab_size
    return [[(7 + 13 * i + 3 * j) % vocabulary for j in range(case.prompt)] for i in range(case.requests)]


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Per case the medians with their ranges, and what the planned policies reach of the alternatives.

    Shares are medians over the repeats, each of runs that followed one another: a machine drifts. Where a goal is
    missed, the decisions say why.
    """
    cases: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for r in rows:
        cases.setdefault(r["case"], {}).setdefault(r["policy"], []).append(r)
    lines: list[str] = []
    goals: dict[str, list[tuple[float, str]]] = {"adaptive": [], "auto": []}
    for case, policies in cases.items():
        fixed = {p: _middle(runs, "tokens_per_s") for p, runs in policies.items() if p not in PLANNED}
        if not fixed:
            continue
        best = max(fixed, key=lambda p: fixed[p])
        lines.append(f"{case}: best fixed {best} {fixed[best]:.1f} tokens/s, {len(policies[best])} runs each")
        for policy, runs in policies.items():
            low, middle, high = _range([r["tokens_per_s"] for r in runs])
            line = f"  {policy:<14} {middle:7.1f} ({low:.1f} to {high:.1f})"
            for name, title in (("tokens_per_s", "of the best fixed"), ("first_2s_tokens_per_s", "in the first 2 s")):
                shares = _shares(runs, policies[best], name)
                line += "  {1:5.2f} ({0:.2f} to {2:.2f}) ".format(*_range(shares)) + title if shares else ""
            lines.append(line + (f"  {runs[-1]['chosen']}" if runs[-1]["chosen"] else ""))
        for policy, against, goal in (("adaptive", best, BEST), ("auto", "gpu_only", BESIDE)):
            if policy not in policies or against not in policies:
                continue
            share = statistics.median(_shares(policies[policy], policies[against], "tokens_per_s") or [0.0])
            goals[policy].append((share, case))
            if share < goal:
                lines.append(f"  {policy} misses {goal:g} of {against}; its decisions in the last run:")
                lines += [f"    {d}" for d in policies[policy][-1]["decisions"].split(" | ")[:MOST_SHOWN]]
    if goals["adaptive"]:
        (low, where), ahead = min(goals["adaptive"]), sum(s >= 1.03 for s, _ in goals["adaptive"])
        lines.append(
            f"adaptive: at least {low:.2f} of the best fixed policy (goal: {BEST:g}), lowest in {where}; "
            f"1.03 or more in {ahead} of {len(goals['adaptive'])} cases"
        )
    if goals["auto"]:
        low, where = min(goals["auto"])
        lines.append(f"auto: at least {low:.2f} of gpu_only (goal: {BESIDE:g}), lowest in {where}")
    return lines


def _middle(runs: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(r[name] for r in runs)


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    """Lowest, median, highest."""
    return min(values), statistics.median(values), max(values)


def _shares(runs: Sequence[dict[str, Any]], against: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Of each run over the other policy's of the same repeat; where that has none, it is left out."""
    theirs = {r["repeat"]: r[name] for r in against}
    return [r[name] / theirs[r["repeat"]] for r in runs if theirs.get(r["repeat"])]
