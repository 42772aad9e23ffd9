"""Requests over both tiers, measured: the point of ``split_host`` and ``long_context_host``.

    gpu_only   as many of the requests as the GPU lane's pages hold        rows, step, T: its attention of a layer
    CPU tier   all of them, waited for at every layer                      c: its attention of a token, tau
    split      all of them, with the same pages on the GPU lane            gain over either of the others

The closed form beside the gain is made of what the first two took in the same run: rest is a layer without attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.points.measured import checked_trace, open_llm, shared_model, whole_pages
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown
from hybridattn import SamplingParams
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, GPU
from hybridattn.policies.base import Policy
from hybridattn.policies.fixed import GpuOnly, SyncOffload
from hybridattn.policies.split import Split


@dataclass
class SplitHereSettings:
    """``settings`` of ``split_host`` and ``long_context_host``.

    requests, context : how many, and tokens of each prompt
    room : requests that the GPU lane's pages hold; below 1: not even one
    output_tokens : of each
    """

    requests: int = 4
    context: int = 2000
    room: float = 2.0
    output_tokens: int = 24

    def __post_init__(self) -> None:
        if self.requests < 1 or not 0 < self.room < self.requests or self.output_tokens < 4:
            raise InputError(f"settings: room {self.room} for {self.requests} requests of {self.output_tokens} tokens")


@dataclass(frozen=True, slots=True)
class Measured:
    """Decode of ``rows`` rows: tokens per second, and the median attention of a layer on each processor [ns]."""

    rows: int
    tokens_per_s: float
    gpu_ns: float
    cpu_ns: float
    kind: tuple[str, str, str]

    def layer_ns(self, num_layers: int) -> float:
        return self.rows / self.tokens_per_s * 1e9 / num_layers


@experiment(SplitHereSettings)
def point(app: App, settings: SplitHereSettings) -> dict[str, Any]:
    """One row: the three ways after one another, the gain of the split, and what the closed form says of it."""
    s, layers = settings, shared_model(app).config.shape.num_layers
    fit = int(s.room)
    cpu = decode(app, SyncOffload(1.0), s.requests, s)
    split = decode(app, Split(), s.requests, s)
    gpu = decode(app, GpuOnly(), fit, s) if fit else None
    part = 1 - s.room / s.requests
    rest_ns = (gpu.layer_ns(layers) - gpu.gpu_ns) if gpu else cpu.layer_ns(layers) - cpu.cpu_ns
    tau_ns = max(0.0, cpu.layer_ns(layers) - cpu.cpu_ns - rest_ns)
    hot_ns = gpu.gpu_ns * s.room / fit if gpu else split.gpu_ns
    closed_ns = rest_ns + max(hot_ns, tau_ns + part * cpu.cpu_ns)
    base = gpu or cpu
    return {
        **dict(zip(("kind", "device", "profile"), split.kind, strict=True)), "model": app.model.label,
        "requests": s.requests, "completed": s.requests, "context": s.context, "room": s.room,
        "baseline": "gpu_only" if gpu else "the CPU tier alone",
        "tokens_per_s": split.tokens_per_s, "baseline_tokens_per_s": base.tokens_per_s,
        "cpu_tier_tokens_per_s": cpu.tokens_per_s, "gain": split.tokens_per_s / base.tokens_per_s,
        "closed_gain": s.requests / base.rows * base.layer_ns(layers) / closed_ns,
        "rest_us": rest_ns / 1e3, "hot_us": hot_ns / 1e3, "cold_us": split.cpu_ns / 1e3, "tau_us": tau_ns / 1e3,
        "tpot_over_baseline": split.layer_ns(layers) / base.layer_ns(layers),
    }  # fmt: skip


def decode(app: App, policy: Policy, requests: int, s: SplitHereSettings) -> Measured:
    """``requests`` of the requests under a policy, from when all decode until the first has ended."""
    longest = s.context + s.output_tokens
    each = whole_pages(longest)
    room = {"gpu_tokens": int(s.room * each), "cpu_tokens": s.requests * each}
    with open_llm(app, **room, policy=policy, max_model_len=longest) as llm:
        vocabulary = llm.model.config.shape.vocab_size
        prompts = [[(7 + 13 * i + 3 * j) % vocabulary for j in range(s.context)] for i in range(requests)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=s.output_tokens, ignore_eos=True))
        trace = checked_trace(llm)
    times = [o.record.token_ns for o in outputs]
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    if start >= end:
        raise InputError(f"settings.output_tokens {s.output_tokens}: a request ended before all {requests} decoded")
    made = sum(start < t <= end for own in times for t in own)
    spans = [x for x in trace.spans if start <= x.start_ns and x.end_ns <= end and "attention" in x.name]
    gpu_ns, cpu_ns = (statistics.median([x.duration_ns for x in spans if x.lane == lane] or [0]) for lane in (GPU, CPU))
    kind = trace.kind, trace.device, trace.profile
    return Measured(requests, made / (end - start) * 1e9, gpu_ns, cpu_ns, kind)


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Medians over the repeats, with the range of the gain."""
    alike: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for r in rows:
        alike.setdefault((r["model"], r["requests"]), []).append(r)
    found = []
    for runs in alike.values():
        middle = {k: statistics.median(r[k] for r in runs) for k in ("gain", "closed_gain", "tpot_over_baseline")}
        low, high = min(r["gain"] for r in runs), max(r["gain"] for r in runs)
        found.append({**runs[0], **middle, "range": f"{low:.2f} to {high:.2f}", "runs": len(runs)})
    columns = {
        "model": "{model}", "requests": "{requests} of {context}", "room for": "{room:g}", "over": "{baseline}",
        "gain": "{gain:.2f}", "of runs": "{range}", "closed form": "{closed_gain:.2f}",
        "time per token": "{tpot_over_baseline:.2f}", "runs": "{runs}",
    }  # fmt: skip
    return markdown(found, columns)
