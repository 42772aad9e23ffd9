"""A long run needs no more memory than a short one: the point of ``flat``.

Small requests, a fixed number at a time, on simulated tiers that hold only part of them; records go to nobody. Memory
is that of the process after a tenth of the requests and at the end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from experiments.build import costs_of, policy_of
from experiments.machines import TIMEOUT_NS, engine_on
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown
from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import InputError
from hybridattn.core.request import DeclaredTokens
from hybridattn.engine.engine import Engine

CONFIG = EngineConfig(
    gpu_kv_blocks=96, cpu_kv_blocks=256, page_size=16, max_model_len=256, max_num_seqs=64, max_num_batched_tokens=512,
    op_timeout_ns=TIMEOUT_NS,
)  # fmt: skip


@dataclass
class FlatSettings:
    """``settings`` of ``flat``: how many requests in all and at a time, and their tokens in and out."""

    requests: int = 1_000_000
    at_a_time: int = 64
    prompt: int = 40
    output: int = 4

    def __post_init__(self) -> None:
        if self.requests < 10:
            raise InputError(f"settings.requests must be at least 10, for a tenth of them is one, got {self.requests}")


@experiment(FlatSettings)
def point(app: App, settings: FlatSettings) -> dict[str, Any]:
    """One row: memory early and late, and requests per second of process time."""
    costs = costs_of(app)
    found = serve(engine_on(costs, policy_of(app, costs), CONFIG), settings)
    return {"kind": "measured", "device": "sim", "profile": costs.pricing.fingerprint, **found}


def serve(engine: Engine, s: FlatSettings) -> dict[str, Any]:
    """Serve the requests; what the process needed meanwhile."""
    ended, added, early = 0, 0, 0
    memory = psutil.Process().memory_info

    def one_ended(record: object) -> None:
        nonlocal ended
        ended += 1

    engine.send_records(one_ended)
    started = time.process_time()
    while ended < s.requests:
        while added < s.requests and engine.unfinished < s.at_a_time:
            engine.add(DeclaredTokens(s.prompt), s.output)
            added += 1
        engine.step()
        if not early and ended * 10 >= s.requests:
            early = memory().rss
    return {
        "ended": ended,
        "early_mib": early / 2**20,
        "late_mib": memory().rss / 2**20,
        "requests_per_s": ended / (time.process_time() - started),
    }


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Memory as a table, and the largest growth."""
    columns = {
        "policy": "{policy}",
        "requests": "{ended}",
        "memory after a tenth [MiB]": "{early_mib:.1f}",
        "at the end [MiB]": "{late_mib:.1f}",
        "requests per second of process time": "{requests_per_s:.0f}",
    }
    most = max(r["late_mib"] - r["early_mib"] for r in rows)
    return [*markdown(rows, columns), f"largest growth over the last nine tenths: {most:.1f} MiB"]
