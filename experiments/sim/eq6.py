"""APEX eq. 6 by simulation: ``python -m experiments.sim.eq6``.

The ideal machine (see ``experiments.sim.ideal``) with 128 layers, so that filling the pipeline at the start of each
pass costs little: from which N_G / N_C on does the asymmetric pipeline no longer beat GPU-only? Beside it the same on
an A10 with an 8B model and everything counted: rows that cost, the head, copies, launches.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.sim.ideal import costs_of, ideal, ideal_shape, open_sim
from experiments.sim.machines import Setting
from experiments.sim.output import parser, publish
from hybridattn.core.errors import InputError
from hybridattn.cost.costs import Costs, with_cpu_factor
from hybridattn.cost.crossover import eq6_threshold
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.asymmetric import Asymmetric
from hybridattn.policies.load import Load

WINS = 1.0005  # a gain below this is rounding: with a CPU too slow for a single row, the GPU runs alone
XS = (0.1, 0.25, 0.5, 1.0, 2**0.5, 1.5, 2.0, 3.0)
LINEAR_NS, CONTEXT = 1_000_000.0, 1000


def crossing(gain: Callable[[float], float], low: float, high: float, steps: int = 12) -> float:
    """Where the decreasing ``gain`` passes 1 (``WINS``)."""
    if not gain(low) > WINS:
        raise InputError(f"the gain is {gain(low):.3f} at {low:g} already: no crossing in [{low:g}, {high:g}]")
    for _ in range(steps):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if gain(middle) > WINS else (low, middle)
    return (low * high) ** 0.5


def pipeline_gain(costs: Costs, load: Load) -> float:
    """Asymmetric pipelining over the GPU rows alone."""
    run = SteadyRun(costs, costs.pricing, Asymmetric(costs, choice="always"), load, open_sim)
    alone_ns = costs.step_ns(load.gpu_rows, load.gpu_rows * load.context)
    return run.measure(8, 3).tokens_per_s * alone_ns / 1e9 / load.gpu_rows


def cpu_rows(gpu_rows: int, x: float, r: float) -> int:
    """CPU rows that fill both windows, and a third more."""
    return int(gpu_rows * (2 / x + 1) / r * 1.3) + 4


def ideal_threshold(x: float, num_layers: int = 128, gpu_rows: int = 240) -> float:
    """Crossover of N_G / N_C on the ideal machine."""
    shape = ideal_shape(num_layers)
    key_ns = x * LINEAR_NS / (gpu_rows * CONTEXT)

    def gain(r: float) -> float:
        costs = costs_of(shape, ideal(shape, LINEAR_NS, key_ns, key_ns * r))
        return pipeline_gain(costs, Load(gpu_rows, cpu_rows(gpu_rows, x, r), CONTEXT))

    return crossing(gain, 2.0, 40.0)


def real_threshold(x: float, gpu_rows: int = 48) -> float | None:
    """The same on an A10 with an 8B model; None where the pipeline never wins."""
    setting = Setting.of("a10", "epyc-7r32-16c", "pcie4-x16", "llama3.1-8b")
    costs = setting.costs
    linear = costs.step_linear_ns(gpu_rows) / costs.num_layers
    per_key = (costs.attention_ns(gpu_rows, 10**6) - costs.attention_ns(gpu_rows, gpu_rows)) / (10**6 - gpu_rows)
    context = max(1, round(x * linear / per_key / gpu_rows))
    rate = costs.cpu_ns(64, 64 * context) / 64 / (costs.attention_ns(gpu_rows, gpu_rows * context) / gpu_rows)

    def gain(r: float) -> float:
        scaled = replace(costs, pricing=with_cpu_factor(costs.pricing, r / rate))
        return pipeline_gain(scaled, Load(gpu_rows, cpu_rows(gpu_rows, x, r), context))

    return crossing(gain, 0.5, 60.0) if gain(0.5) > WINS else None


def thresholds(xs: Sequence[float]) -> list[dict[str, Any]]:
    """One row per x."""
    rows = []
    for x in xs:
        formula, found, real = eq6_threshold(x), ideal_threshold(x), real_threshold(x)
        shift = "never pays" if real is None else f"{real / formula - 1:+.0%}"
        if real is not None and real > 3 * formula:
            shift = "none: riders alone hide behind the GPU's attention"
        rows.append(
            {"x": x, "formula": formula, "ideal": found, "error": found / formula - 1, "a10": real, "shift": shift}
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    p = parser("eq6", __doc__ or "")
    p.add_argument("--data", type=Path, default=Path("../shared/data/eq6_thresholds.csv"))
    args = p.parse_args(argv)
    xs = [float(r["t_att_over_t_lin"]) for r in csv.DictReader(args.data.open())] if args.data.exists() else XS
    rows = thresholds(xs)
    worst = max(abs(r["error"]) for r in rows)
    columns = {
        "T_a / T_l": "{x:.2f}",
        "eq. 6": "{formula:.2f}",
        "simulated, ideal": "{ideal:.2f}",
        "error": "{error:+.1%}",
        "shift on an A10, 8B": "{shift}",
    }
    verdict = [f"ideal model: largest error {worst:.1%} (asked: within 5 %)"]
    publish("eq6", rows, columns, verdict, args.results)


if __name__ == "__main__":
    main()
