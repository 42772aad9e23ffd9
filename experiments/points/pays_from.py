"""From which ratio of CPU to GPU requests on does each policy pay? The point of ``pays_from``.

A point climbs a ladder of ratios in one cell and notes, per policy with its best numbers, the first one at which the
gain over GPU-only exceeds 1 %; exact model, no prompts. Beside it stands what asymmetric pipelining needs by its closed
form, T_l / (T_l + T_a), where eq. 6 holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cells import Cell, CellSettings
from experiments.points.capacity_bound import rates
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown, simulated
from hybridattn.cost.crossover import ap_min_request_ratio, eq6_threshold
from hybridattn.planning.predict import by_simulation
from hybridattn.policies.adaptive import Adaptive
from hybridattn.policies.layouts import fixed_layouts
from hybridattn.policies.load import Load

RATIOS = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0)
GAIN = 1.01
FIXED = ("asymmetric", "async_overlap", "sync_offload")
NAMES = (*FIXED, "adaptive")


@experiment(CellSettings)
def point(app: App, settings: CellSettings) -> dict[str, Any]:
    """One row: the first ratio that pays, for each policy; None where none of the ladder does."""
    cell = Cell.of(settings)
    first: dict[str, float | None] = dict.fromkeys(NAMES)
    tried = set()
    for ratio in RATIOS:
        rows = max(1, round(cell.load.gpu_rows * ratio))
        if rows in tried:
            continue
        tried.add(rows)
        for name, gain in gains(cell, rows).items():
            if gain > GAIN and first[name] is None:
                first[name] = rows / cell.load.gpu_rows
        if all(at is not None for at in first.values()):
            break
    x, r = rates(cell.costs, cell.load.gpu_rows, cell.load.context)
    found = {"x": x, "r": r, "holds": r < eq6_threshold(x), "needed": ap_min_request_ratio(x)}
    return {**simulated(cell.costs.pricing.fingerprint), **cell.columns(), **found, **first}


def gains(cell: Cell, cpu_rows: int) -> dict[str, float]:
    """The gain of each policy with its best numbers beside ``cpu_rows`` CPU rows."""
    costs, load = cell.costs, Load(cell.load.gpu_rows, cpu_rows, cell.load.context)
    predict = by_simulation()
    found: dict[str, float] = {}
    for layout in fixed_layouts(costs, load.gpu_rows, cpu_rows, load.context):
        rate = predict(load, layout, costs, True).tokens_per_s
        found[layout.kind] = max(found.get(layout.kind, 0.0), rate)
    base = found.pop("gpu_only")
    found["adaptive"] = Adaptive(costs, predict).choose(load, costs)[1].tokens_per_s
    return {name: rate / base for name, rate in found.items()}


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The first ratios as a table; adaptive against each other policy and against the closed form."""
    shown = [{**r, **{n: "-" if r[n] is None else f"{r[n]:.2f}" for n in NAMES}} for r in rows]
    columns = {
        "setting": "{cell}",
        "x": "{x:.2f}",
        "N_G / N_C": "{r:.1f}",
        "eq. 6 holds": "{holds}",
        "T_l / (T_l + T_a)": "{needed:.2f}",
        **{name: f"{{{name}}}" for name in NAMES},
    }
    late = [
        f"{r['cell']} ({n})"
        for r in rows
        for n in FIXED
        if r[n] is not None and (r["adaptive"] is None or r["adaptive"] > r[n])
    ]
    held = [r for r in rows if r["holds"]]
    below = [r for r in held if r["adaptive"] is not None and r["adaptive"] < r["needed"]]
    return [
        *markdown(shown, columns),
        f"adaptive pays later than another policy in: {', '.join(late) or 'no cell'}",
        f"below T_l / (T_l + T_a) in {len(below)} of {len(held)} cells where eq. 6 holds (goal: half)",
    ]
