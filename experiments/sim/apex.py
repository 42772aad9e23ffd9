"""APEX's published ranges as sanity bounds: ``python -m experiments.sim.apex``.

APEX (arXiv 2506.03296) chooses between two sub-batches and one-layer overlap; here that is the better of ``asymmetric``
and ``async_overlap`` with 1, 2, 4 or 8 micro-batches. It publishes ranges without settings: +84 to +96 % over vLLM on a
T4, +11 to +89 % on an A10, up to +72 % (T4) and +37 % (A10) over the best hybrid before it, which is ``asymmetric``
here. What is simulated is steady decode at two loads, one and eight CPU requests for each GPU request. No simulated
gain may exceed the upper bound of any overlap (docs/crossover.md, 2), and the ranges should meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from experiments.sim.gridspec import Cell
from experiments.sim.ideal import open_sim
from experiments.sim.output import parser, publish
from hybridattn.planning.predict import by_simulation
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.layouts import Layout, policy_of
from hybridattn.policies.load import Limits
from hybridattn.policies.planning import choose

PUBLISHED = {"t4": ((1.84, 1.96), 1.72), "a10": ((1.11, 1.89), 1.37)}  # over GPU-only; over the best hybrid before
SETTINGS = [
    Cell(machine, model, context, output, cpu_gb_s, ratio)
    for machine, model, contexts, cpus in (
        ("t4", "llama2-7b", (400, 800), (25.0, 50.0)),
        ("a10", "llama3.1-8b", (1000, 4000), (30.0, 60.0)),
    )
    for context in contexts
    for output in (200, None)
    for cpu_gb_s in cpus
    for ratio in (1.0, 8.0)
]
WARMUP, PASSES = 60, 100


def judge(cell: Cell) -> dict[str, Any]:
    """Gains of one setting over GPU-only."""
    costs, load = cell.setting.costs, cell.load

    def rate(layout: Layout) -> float:
        run = SteadyRun(costs, costs.pricing, policy_of(layout, costs), load, open_sim)
        return run.measure(WARMUP, PASSES).tokens_per_s

    alone, neo = rate(Layout("gpu_only")), rate(Layout("asymmetric"))
    overlap = max(rate(Layout("async_overlap", k)) for k in (1, 2, 4, 8))
    adaptive = choose(load, costs, by_simulation(), Limits())[1].tokens_per_s
    per_row_ns = (costs.cpu_ns(33, 33 * cell.context) - costs.cpu_ns(1, cell.context)) / 32
    return {
        "machine": cell.machine,
        "cell": cell.name,
        "asymmetric_gain": neo / alone,
        "overlap_gain": overlap / alone,
        "apex_gain": max(neo, overlap) / alone,
        "over_asymmetric": max(neo, overlap) / neo,
        "adaptive_gain": adaptive / alone,
        "bound": 1 + 1e9 / (per_row_ns * costs.num_layers) / alone,
    }


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where the simulated ranges lie against the published ones."""
    lines = []
    for name, ((low, high), most) in PUBLISHED.items():
        gains = [r["apex_gain"] for r in rows if r["machine"] == name]
        over = max(r["over_asymmetric"] for r in rows if r["machine"] == name)
        meet = max(min(gains), low) <= min(max(gains), high)
        lines.append(
            f"{name}: gain over GPU-only {min(gains):.2f} to {max(gains):.2f} (published {low} to {high}: "
            f"{'the ranges meet' if meet else 'the ranges do not meet'}); up to {over:.2f} times asymmetric "
            f"(published up to {most})"
        )
    above = [r["cell"] for r in rows if max(r["apex_gain"], r["adaptive_gain"]) > 1.01 * r["bound"]]
    return [*lines, f"above the upper bound of any overlap: {', '.join(above) or 'none'}"]


def main(argv: Sequence[str] | None = None) -> None:
    p = parser("apex", __doc__ or "")
    p.add_argument("--jobs", type=int, default=2)
    args = p.parse_args(argv)
    with ProcessPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(judge, SETTINGS))
    columns = {
        "setting": "{cell}",
        "asymmetric": "{asymmetric_gain:.2f}",
        "async_overlap": "{overlap_gain:.2f}",
        "better of both": "{apex_gain:.2f}",
        "adaptive": "{adaptive_gain:.2f}",
        "upper bound": "{bound:.2f}",
    }
    publish("apex", rows, columns, verdicts(rows), args.results)


if __name__ == "__main__":
    main()
