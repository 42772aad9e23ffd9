"""How fast the simulator is: ``python -m experiments.sim.speed``.

A layer-step is one batch through one layer: the GPU's rows, or a micro-batch of CPU rows. Time is that of the process
on its core, so that other processes beside it do not count; the median of several runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from experiments.sim.ideal import open_sim
from experiments.sim.machines import Setting
from experiments.sim.output import parser, publish
from hybridattn.core.records import StepRecord
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.layouts import Layout, policy_of
from hybridattn.policies.load import Load

LOAD = Load(24, 96, 1000)
LAYOUTS = (
    Layout("gpu_only"),
    Layout("async_overlap", 4),
    Layout("sync_offload", max_rows=16),
    Layout("asymmetric"),
    Layout("rule", 2, 0.5),
    Layout("rule", 8, 0.5),
)


def layer_steps_per_s(setting: Setting, layout: Layout, steps: int) -> float:
    """Layer-steps per second of process time over ``steps`` steps, after a few that make what is kept."""
    costs = setting.costs
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


def main(argv: Sequence[str] | None = None) -> None:
    p = parser("speed", __doc__ or "")
    p.add_argument("--steps", type=int, default=150)
    p.add_argument("--runs", type=int, default=5)
    args = p.parse_args(argv)
    setting = Setting.of("a10", "epyc-7r32-16c", "pcie4-x16", "llama3.1-8b")
    rows = []
    for layout in LAYOUTS:
        rates = [layer_steps_per_s(setting, layout, args.steps) for _ in range(args.runs)]
        rows.append(
            {
                "policy": str(layout), "layer_steps_per_s": statistics.median(rates),
                "slowest": min(rates), "fastest": max(rates), "runs": args.runs,
            }
        )  # fmt: skip
    columns = {"policy": "{policy}", "layer-steps/s": "{layer_steps_per_s:.0f}", "slowest": "{slowest:.0f}"}
    slow = [r["policy"] for r in rows if r["layer_steps_per_s"] < 100_000]
    verdict = f"below 100,000 layer-steps/s: {', '.join(slow) or 'none'}"
    publish("speed", rows, columns, [verdict], args.results)


if __name__ == "__main__":
    main()
