"""APEX's published ranges as sanity bounds: the point of ``apex``.

APEX (arXiv 2506.03296) chooses between two sub-batches and one-layer overlap; here that is the better of ``asymmetric``
and ``async_overlap`` with 1, 2, 4 or 8 micro-batches. It publishes ranges without settings: +84 to +96 % over vLLM on a
T4, +11 to +89 % on an A10, up to +72 % (T4) and +37 % (A10) over the best hybrid before it, which is ``asymmetric``
here. What is simulated is steady decode. No simulated gain may exceed the upper bound of any overlap
(docs/crossover.md, 2), and the ranges should meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cells import Cell, CellSettings
from experiments.machines import open_sim
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown, simulated
from hybridattn.planning.predict import by_simulation
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.layouts import Layout, policy_of
from hybridattn.policies.load import Limits
from hybridattn.policies.planning import choose

PUBLISHED = {"t4": ((1.84, 1.96), 1.72), "a10": ((1.11, 1.89), 1.37)}  # over GPU-only; over the best hybrid before
WARMUP, STEPS = 60, 100


@experiment(CellSettings)
def point(app: App, settings: CellSettings) -> dict[str, Any]:
    """One row: gains of a cell over GPU-only."""
    cell = Cell.of(settings)
    costs, load = cell.costs, cell.load

    def rate(layout: Layout) -> float:
        run = SteadyRun(costs, costs.pricing, policy_of(layout, costs), load, open_sim)
        return run.measure(WARMUP, STEPS).tokens_per_s

    alone, neo = rate(Layout("gpu_only")), rate(Layout("asymmetric"))
    overlap = max(rate(Layout("async_overlap", k)) for k in (1, 2, 4, 8))
    adaptive = choose(load, costs, by_simulation(), Limits())[1].tokens_per_s
    per_row_ns = (costs.cpu_ns(33, 33 * load.context) - costs.cpu_ns(1, load.context)) / 32
    return {
        **simulated(costs.pricing.fingerprint),
        **cell.columns(settings.ratio),
        "asymmetric_gain": neo / alone,
        "overlap_gain": overlap / alone,
        "apex_gain": max(neo, overlap) / alone,
        "over_asymmetric": max(neo, overlap) / neo,
        "adaptive_gain": adaptive / alone,
        "bound": 1 + 1e9 / (per_row_ns * costs.num_layers) / alone,
    }


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The gains as a table, and where the simulated ranges lie against the published ones."""
    columns = {
        "setting": "{cell}",
        "asymmetric": "{asymmetric_gain:.2f}",
        "async_overlap": "{overlap_gain:.2f}",
        "better of both": "{apex_gain:.2f}",
        "adaptive": "{adaptive_gain:.2f}",
        "upper bound": "{bound:.2f}",
    }
    lines = markdown(rows, columns)
    for name, ((low, high), most) in PUBLISHED.items():
        here = [r for r in rows if r["hardware"] == name]
        if not here:
            continue
        gains, over = [r["apex_gain"] for r in here], max(r["over_asymmetric"] for r in here)
        meet = max(min(gains), low) <= min(max(gains), high)
        lines.append(
            f"{name}: gain over GPU-only {min(gains):.2f} to {max(gains):.2f} (published {low} to {high}: "
            f"{'the ranges meet' if meet else 'the ranges do not meet'}); up to {over:.2f} times asymmetric "
            f"(published up to {most})"
        )
    above = [r["cell"] for r in rows if max(r["apex_gain"], r["adaptive_gain"]) > 1.01 * r["bound"]]
    return [*lines, f"above the upper bound of any overlap: {', '.join(above) or 'none'}"]
