"""Requests that begin with the same tokens, with and without sharing their pages: the point of ``prefix``.

    each for itself   |system prompt + question a|system prompt + question b| ...     read and held as often as asked
    shared            |system prompt + question a|question b|question c| ...          read and held once

All requests arrive at once. The GPU tier holds what the machine has room for, so that shared pages also let more of
them run at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.build import costs_of, policy_of, sim_device
from experiments.points.serve import ServeSettings, engine_for, metrics_of
from experiments.schema import App
from experiments.settings import at_least, experiment
from experiments.tables import markdown
from hybridattn.core.request import DeclaredTokens

NAMES = {False: "each for itself", True: "shared"}


@dataclass
class PrefixSettings(ServeSettings):
    """``settings`` of ``prefix``: tokens that all requests begin with, and of each its own, in and out; of those of
    every served workload ``page_size`` and ``max_num_batched_tokens``."""

    prefix: int = 2048
    requests: int = 16
    share: bool = True
    own: int = 64
    output: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, prefix=1, requests=1, own=1, output=1)


@experiment(PrefixSettings)
def point(app: App, settings: PrefixSettings) -> dict[str, Any]:
    """One row: time to the first token, throughput, and the tokens that were read."""
    s, costs = settings, costs_of(app)
    fitting = replace(s, max_model_len=s.prefix + s.own + s.output, max_num_seqs=s.requests)
    device = sim_device(app, costs.pricing)
    engine = engine_for(app, fitting, policy_of(app, costs), device, share_prefixes=s.share)
    for _ in range(s.requests):
        engine.add(DeclaredTokens(s.prefix + s.own, s.prefix), s.output)
    engine.run()
    records = engine.take_records()
    found = metrics_of(engine, records)
    names = ("ttft_mean_ns", "ttft_p99_ns", "tpot_mean_ns", "output_tokens_per_s", "reused_tokens", "completed")
    return {
        **found.as_row(names), "prefix": s.prefix,
        "requests": s.requests, "sharing": NAMES[s.share], "read_tokens": sum(r.prefill_tokens for r in records.steps),
    }  # fmt: skip


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What sharing gains, for each number of requests and length of the prefix."""
    by = {(r["hardware"], r["policy"], r["requests"], r["prefix"], r["sharing"]): r for r in rows}
    pairs = []
    for r in rows:
        alone = by.get((r["hardware"], r["policy"], r["requests"], r["prefix"], NAMES[False]))
        if r["sharing"] == NAMES[True] and alone is not None:
            sooner = alone["ttft_mean_ns"] / r["ttft_mean_ns"]
            more = r["output_tokens_per_s"] / alone["output_tokens_per_s"]
            pairs.append({**r, "sooner": sooner, "more": more, "read": r["read_tokens"] / alone["read_tokens"]})
    if not pairs:
        return []
    columns = {
        "hardware": "{hardware}",
        "requests": "{requests}",
        "common tokens": "{prefix}",
        "prompt tokens read": "{read:.2f}",
        "first token, times as soon": "{sooner:.2f}",
        "output tokens/s, times": "{more:.2f}",
    }
    best = max(pairs, key=lambda r: r["more"])
    return [
        *markdown(pairs, columns),
        f"most throughput is gained with {best['requests']} requests and {best['prefix']} common tokens on "
        f"{best['hardware']}: {best['more']:.2f} times",
    ]
