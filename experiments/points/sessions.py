"""Agent sessions that pause for a tool, with their K,V kept, moved or dropped meanwhile: the point of ``sessions``.

    keep       |turn 0|== K,V stay on the GPU tier ==|turn 1, new tokens only|        fewer others fit meanwhile
    move       |turn 0|> down =.. CPU tier ..= up >|turn 1, new tokens only|          copies on lanes of their own
    recompute  |turn 0|   nothing is kept          |turn 1, history and new tokens|   prefill grows with the history

Kept K,V give way to requests that run (the engine's contexts are a cache); how much was found again is in the row.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from experiments.build import costs_of, policy_of, sim_device
from experiments.points.serve import ServeSettings, engine_for, row, workload_for
from experiments.schema import App
from experiments.settings import experiment
from hybridattn.core.errors import InputError
from hybridattn.core.records import RequestRecord
from hybridattn.core.stages import CPU_TIER, GPU_TIER
from hybridattn.engine.replay import Replay
from hybridattn.metrics.latency import ttft_ns
from hybridattn.workload.item import Workload

NAMES = {
    "keep": "kept on the GPU tier",
    "move": "moved to the CPU tier and back",
    "recompute": "dropped, computed again",
}
RESTS_ON = {"keep": GPU_TIER, "move": CPU_TIER, "recompute": CPU_TIER}


@dataclass
class SessionSettings(ServeSettings):
    """``settings`` of ``sessions``, beside those of every served workload; ``context`` is keep, move or recompute.

    gpu_tokens, cpu_tokens : K,V that the tiers hold on a real device (simulations take it from ``hardware``)
    """

    context: str = "move"
    gpu_tokens: int = 1024
    cpu_tokens: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context not in NAMES:
            raise InputError(f"settings.context must be one of {', '.join(NAMES)}, got '{self.context}'")


@experiment(SessionSettings)
def point(app: App, settings: SessionSettings) -> dict[str, Any]:
    """One row: time to the first token of later turns, and throughput."""
    if app.device.name == "sim":
        return simulate(app, settings)
    serve = importlib.import_module("experiments.points.sessions_here").serve  # needs torch, which simulations do not
    return serve(app, settings)


def simulate(app: App, s: SessionSettings) -> dict[str, Any]:
    workload, costs = workload_for(app, s), costs_of(app)
    device = sim_device(app, costs.pricing)
    engine = engine_for(app, s, policy_of(app, costs), device, pause_tier=RESTS_ON[s.context])
    served = Replay(engine, workload, keep_contexts=s.context != "recompute").run()
    found = row(app, s, workload, engine, served, served.requests)
    return {**found, **turns(app, s, workload, served.requests, engine.kv.contexts)}


def turns(
    app: App, s: SessionSettings, workload: Workload, records: Sequence[RequestRecord], contexts: Any
) -> dict[str, Any]:
    """What tells the turns apart, and what became of the contexts between them."""
    later = [i for i in workload.items if i.after is not None]
    if not later:
        raise InputError(f"workload {workload.name} has no session of several turns")
    first: list[int] = []
    rest: list[int] = []
    for record in records:
        time_ns = ttft_ns(record)
        if time_ns is not None:
            (first if workload.items[int(record.request_id)].after is None else rest).append(time_ns)
    history = sum(i.history_tokens for i in later)
    return {
        "pause_s": app.workload.options.get("mean_pause_ns", 0) / 1e9 * s.time_scale,
        "context_is": NAMES[s.context], "sessions": len(workload) - len(later),
        "later_turns": len(later), "drawn_pause_mean_s": fmean(i.delay_ns for i in later) / 1e9,
        "ttft_first_turn_mean_ns": fmean(first) if first else None,
        "ttft_next_turn_mean_ns": fmean(rest) if rest else None,
        "history_tokens": history, "reused_tokens": contexts.reused_tokens, "evicted_contexts": contexts.evicted,
        "reused_fraction": contexts.reused_tokens / history,
    }  # fmt: skip


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """At each pause: how much sooner the next turn begins than with its history computed again."""
    lines = []
    for place, pause in dict.fromkeys((r["hardware"], r["pause_s"]) for r in rows):
        here = [r for r in rows if (r["hardware"], r["pause_s"]) == (place, pause)]
        means = {c: _mean(here, c, "ttft_next_turn_mean_ns") for c in NAMES if any(r["context"] == c for r in here)}
        base = means.get("recompute")
        if base is None or len(means) < 2:
            continue
        parts = [
            f"{NAMES[c]} {ns / 1e6:.0f} ms ({base / ns:.2f} times as soon, {_mean(here, c, 'reused_fraction'):.0%} of "
            "the history found again)"
            for c, ns in means.items()
            if c != "recompute"
        ]
        lines.append(
            f"{place}, pauses of {pause:g} s: the next turn's first token comes after {base / 1e6:.0f} ms where "
            f"K,V are dropped; {'; '.join(parts)}"
        )
    return lines


def _mean(rows: Sequence[Mapping[str, Any]], context: str, name: str) -> float:
    return fmean(r[name] for r in rows if r["context"] == context)
