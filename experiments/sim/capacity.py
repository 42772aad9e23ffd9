"""Ample memory: can CPU attention help when all K,V fits on the GPU? ``python -m experiments.sim.capacity``.

Blocking offload of a growing share of the requests, at the best share, on the ideal machine (no copies, no launches)
against the bound of DESIGN section 6.1, (1 + x) / (1 + x r / (1 + r)), and on real machines with everything counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.sim.ideal import costs_of, ideal, ideal_shape, open_sim
from experiments.sim.machines import Setting
from experiments.sim.output import parser, publish
from hybridattn.cost.costs import Costs
from hybridattn.cost.crossover import capacity_gain_bound
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.fixed import SyncOffload
from hybridattn.policies.load import Load

SHARES = (0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3)
REAL = (
    ("t4", "xeon-8259cl-8c", "pcie3-x16", "llama2-7b", 4, 400),
    ("a10", "epyc-7r32-16c", "pcie4-x16", "llama3.1-8b", 40, 1000),
    ("a100-80g", "epyc-7r32-32c", "pcie4-x16", "llama3.1-8b", 64, 2000),
    ("h200", "epyc-7r32-32c", "pcie5-x16", "llama3.1-8b", 64, 8000),
    ("gh200", "grace-72c", "nvlink-c2c", "llama3.1-8b", 64, 8000),
)


def best_gain(costs: Costs, rows: int, context: int) -> tuple[float, int]:
    """Largest gain over keeping all ``rows`` on the GPU, and how many rows the CPU then has."""
    alone = rows / costs.step_ns(rows, rows * context) * 1e9
    found = (0.0, 0)
    for moved in sorted({max(1, round(rows * share)) for share in SHARES}):
        run = SteadyRun(costs, costs.pricing, SyncOffload(), Load(rows - moved, moved, context), open_sim)
        found = max(found, (run.measure(2, 4).tokens_per_s / alone, moved))
    return found


def rates(costs: Costs, rows: int, context: int) -> tuple[float, float]:
    """x and r of a machine with ``rows`` requests on its GPU."""
    attention = costs.attention_ns(rows, rows * context)
    x = costs.num_layers * attention / costs.step_linear_ns(rows)
    return x, (costs.cpu_ns(64, 64 * context) / 64) / (attention / rows)


def table() -> list[dict[str, Any]]:
    """Ideal machines at several x and r, then real ones."""
    rows = []
    shape, count, context = ideal_shape(), 200, 1000
    for x, r in ((0.5, 3), (0.5, 10), (0.5, 20), (1.0, 3), (1.0, 10), (1.0, 20), (2.0, 10)):
        key_ns = x * 1e6 / (count * context)
        costs = costs_of(shape, ideal(shape, 1e6, key_ns, key_ns * r))
        rows.append(_row("ideal", x, r, *best_gain(costs, count, context)))
    for gpu, cpu, link, model, count, context in REAL:
        costs = Setting.of(gpu, cpu, link, model).costs
        rows.append(_row(f"{gpu} {model}", *rates(costs, count, context), *best_gain(costs, count, context)))
    return rows


def _row(name: str, x: float, r: float, gain: float, moved: int) -> dict[str, Any]:
    return {"machine": name, "x": x, "r": r, "bound": capacity_gain_bound(x, r), "gain": gain, "moved": moved}


def main(argv: Sequence[str] | None = None) -> None:
    args = parser("capacity", __doc__ or "").parse_args(argv)
    rows = table()
    columns = {
        "machine": "{machine}",
        "x": "{x:.2f}",
        "r": "{r:.1f}",
        "bound": "{bound:.3f}",
        "best gain": "{gain:.3f}",
        "rows on the CPU": "{moved}",
    }
    above = [r["machine"] for r in rows if r["gain"] > r["bound"] * 1.001]
    real = [f"{r['machine']} {r['gain']:.3f}" for r in rows if r["machine"] != "ideal" and r["gain"] > 1]
    verdict = [
        f"above the bound: {', '.join(above) or 'none'}",
        f"real machines with copies and launches where any offload exceeds 1: {', '.join(real) or 'none'}",
    ]
    publish("capacity", rows, columns, verdict, args.results)


if __name__ == "__main__":
    main()
