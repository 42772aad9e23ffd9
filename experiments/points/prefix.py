"""Requests that begin with the same tokens, with and without sharing their pages: the point of ``prefix``.

    each for itself   |system prompt + question a|system prompt + question b| ...     read and held as often as asked
    shared            |system prompt + question a|question b|question c| ...          read and held once

All requests arrive at once. The GPU tier holds what the machine has room for, so that shared pages also let more of
them run at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.build import cost_of, kv_room, policy_of, pricing_of, sim_device
from experiments.machines import TIMEOUT_NS
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown
from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import InputError
from hybridattn.core.request import DeclaredTokens
from hybridattn.core.trace import Trace
from hybridattn.cost.costs import Costs
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.engine.engine import Engine
from hybridattn.metrics.report import run_metrics

NAMES = {False: "each for itself", True: "shared"}


@dataclass
class PrefixSettings:
    """``settings`` of ``prefix``: tokens that all requests begin with, and of each its own, in and out."""

    prefix: int = 2048
    requests: int = 16
    share: bool = True
    own: int = 64
    output: int = 64
    page_size: int = 16
    max_num_batched_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("prefix", "requests", "own", "output"):
            if getattr(self, name) < 1:
                raise InputError(f"settings.{name} must be at least 1, got {getattr(self, name)}")


@experiment(PrefixSettings)
def point(app: App, settings: PrefixSettings) -> dict[str, Any]:
    """One row: time to the first token, throughput, and the tokens that were read."""
    s, cost, pricing, room = settings, cost_of(app), pricing_of(app), kv_room(app)
    longest = s.prefix + s.own + s.output
    config = EngineConfig(
        gpu_kv_blocks=room.gpu_tokens // s.page_size, cpu_kv_blocks=room.cpu_tokens // s.page_size,
        page_size=s.page_size,
        max_model_len=longest, max_num_seqs=s.requests, max_num_batched_tokens=s.max_num_batched_tokens,
        op_timeout_ns=TIMEOUT_NS, share_prefixes=s.share,
    )  # fmt: skip
    device = sim_device(app, pricing)
    engine = Engine(PricedStages(cost.shape, cost.dtype), device, policy_of(app, Costs(cost, pricing)), config)
    for _ in range(s.requests):
        engine.add(DeclaredTokens(s.prefix + s.own, s.prefix), s.output)
    engine.run()
    records = engine.take_records()
    found = run_metrics(records, Trace(device.name, device.kind, device.profile, ""))
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
