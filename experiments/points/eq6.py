"""From which N_G / N_C on does asymmetric pipelining no longer beat GPU-only? The point of ``eq6`` (APEX, eq. 6).

A point searches the crossover twice at one x = T_a / T_l: on the ideal machine of ``experiments.ideal``, with many
layers so that filling the pipeline at the start of each step costs little, and on the machine of ``hardware`` with
everything counted (rows that cost, the head, copies, launches).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.build import costs_of
from experiments.ideal import ideal
from experiments.machines import open_sim
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown, simulated
from hybridattn.core.errors import InputError
from hybridattn.cost.costs import Costs, with_cpu_factor
from hybridattn.cost.crossover import eq6_threshold
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.asymmetric import Asymmetric
from hybridattn.policies.load import Load

WINS = 1.0005  # a gain below this is rounding: with a CPU too slow for a single row, the GPU runs alone
LINEAR_NS, CONTEXT = 1_000_000.0, 1000
NONE = "none: rows that join the GPU's batch hide behind its attention"


@dataclass
class Eq6Settings:
    """``settings`` of ``eq6``.

    x : attention over linear time of the GPU
    num_layers, gpu_rows : of the ideal machine
    real_rows : GPU rows of the machine of ``hardware``; their context is what gives x
    """

    x: float = 1.0
    num_layers: int = 128
    gpu_rows: int = 240
    real_rows: int = 48


@experiment(Eq6Settings)
def point(app: App, settings: Eq6Settings) -> dict[str, Any]:
    """One row: the formula at x, the crossover on the ideal machine, and on the real one."""
    s, costs = settings, costs_of(app)
    formula, found, real = (
        eq6_threshold(s.x), ideal_threshold(s.x, s.num_layers, s.gpu_rows), real_threshold(s.x, costs, s.real_rows)
    )  # fmt: skip
    return {
        **simulated(costs.pricing.fingerprint),
        "formula": formula,
        "ideal": found,
        "relative_error": found / formula - 1,
        "real": real,
    }


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The crossovers as a table, and the largest error of the ideal machine."""
    rows = [{**row, "shift": _shift(row)} for row in rows]
    columns = {
        "T_a / T_l": "{x:.2f}",
        "eq. 6": "{formula:.2f}",
        "simulated, ideal": "{ideal:.2f}",
        "error": "{relative_error:+.1%}",
        f"shift on {rows[0]['hardware']}, {rows[0]['model']}": "{shift}",
    }
    worst = max(abs(row["relative_error"]) for row in rows)
    return [*markdown(rows, columns), f"ideal model: largest error {worst:.1%} (goal: within 5 %)"]


def _shift(row: Mapping[str, Any]) -> str:
    if row["real"] is None:
        return "never pays"
    return NONE if row["real"] > 3 * row["formula"] else f"{row['real'] / row['formula'] - 1:+.0%}"


def ideal_threshold(x: float, num_layers: int = 128, gpu_rows: int = 240) -> float:
    """Crossover of N_G / N_C on the ideal machine."""
    key_ns = x * LINEAR_NS / (gpu_rows * CONTEXT)

    def gain(r: float) -> float:
        costs = ideal(LINEAR_NS, key_ns, key_ns * r, num_layers)
        return pipeline_gain(costs, Load(gpu_rows, cpu_rows(gpu_rows, x, r), CONTEXT))

    return crossing(gain, 2.0, 40.0)


def real_threshold(x: float, costs: Costs, gpu_rows: int = 48) -> float | None:
    """The same on a machine with everything counted; None where the pipeline never wins."""
    linear = costs.step_linear_ns(gpu_rows) / costs.num_layers
    per_key = (costs.attention_ns(gpu_rows, 10**6) - costs.attention_ns(gpu_rows, gpu_rows)) / (10**6 - gpu_rows)
    context = max(1, round(x * linear / per_key / gpu_rows))
    rate = costs.cpu_ns(64, 64 * context) / 64 / (costs.attention_ns(gpu_rows, gpu_rows * context) / gpu_rows)

    def gain(r: float) -> float:
        scaled = replace(costs, pricing=with_cpu_factor(costs.pricing, r / rate))
        return pipeline_gain(scaled, Load(gpu_rows, cpu_rows(gpu_rows, x, r), context))

    return crossing(gain, 0.5, 60.0) if gain(0.5) > WINS else None


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
