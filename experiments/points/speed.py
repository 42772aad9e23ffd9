"""How fast the simulator is: the point of ``speed``.

A layer-step is one batch through one layer: the GPU's rows, or a micro-batch of CPU rows. Time is that of the process
on its core, so that other processes beside it do not count; the median of several runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.build import costs_of
from experiments.machines import open_sim
from experiments.schema import App
from experiments.settings import at_least, experiment
from experiments.tables import markdown
from hybridattn.core.errors import InputError
from hybridattn.core.records import StepRecord
from hybridattn.cost.costs import Costs
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.layouts import Layout, policy_of
from hybridattn.policies.load import Load

LOAD = Load(24, 96, 1000)
LAYOUTS = {
    "gpu_only": Layout("gpu_only"),
    "async_overlap": Layout("async_overlap", 4),
    "sync_offload": Layout("sync_offload", max_rows=16),
    "asymmetric": Layout("asymmetric"),
    "rule_2": Layout("rule", 2, 0.5),
    "rule_8": Layout("rule", 8, 0.5),
}
FEW = 100_000  # layer-steps per second


@dataclass
class SpeedSettings:
    """``settings`` of ``speed``: a layout of ``LAYOUTS``, the steps of a run, and how many runs."""

    layout: str = "gpu_only"
    steps: int = 150
    runs: int = 5

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise InputError(f"settings.layout must be one of {', '.join(LAYOUTS)}, got '{self.layout}'")
        at_least(self, steps=1, runs=1)


@experiment(SpeedSettings)
def point(app: App, settings: SpeedSettings) -> dict[str, Any]:
    """One row: layer-steps per second of a layout, the median and the range of the runs."""
    costs, layout = costs_of(app), LAYOUTS[settings.layout]
    rates = [layer_steps_per_s(costs, layout, settings.steps) for _ in range(settings.runs)]
    return {
        "kind": "measured", "device": "sim", "profile": costs.pricing.fingerprint, "policy": str(layout),
        "layer_steps_per_s": statistics.median(rates), "slowest": min(rates), "fastest": max(rates),
    }  # fmt: skip


def layer_steps_per_s(costs: Costs, layout: Layout, steps: int) -> float:
    """Layer-steps per second of process time over ``steps`` steps, after a few that make what is kept."""
    run = SteadyRun(costs, costs.pricing, policy_of(layout, costs), LOAD, open_sim)
    run.measure(8, 8)
    done = 0

    def count(record: StepRecord) -> None:
        nonlocal done
        done += costs.num_layers + record.layers_advanced

    run.executor.on_step = count
    started = time.process_time()
    for _ in range(steps):
        run.step()
    return done / (time.process_time() - started)


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rates as a table, and which layouts are slow."""
    columns = {"policy": "{policy}", "layer-steps/s": "{layer_steps_per_s:.0f}", "slowest": "{slowest:.0f}"}
    slow = [r["policy"] for r in rows if r["layer_steps_per_s"] < FEW]
    return [*markdown(rows, columns), f"below {FEW:,} layer-steps/s: {', '.join(slow) or 'none'}"]
