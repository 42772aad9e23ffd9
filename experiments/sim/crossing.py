"""From which ratio of CPU to GPU requests on does each policy pay? ``python -m experiments.sim.crossing``.

Smallest ratio of a ladder at which the gain over GPU-only exceeds 1 %, per policy, with the exact model and no prefill;
beside it what asymmetric pipelining needs by its closed form, T_l / (T_l + T_a), where eq. 6 holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from experiments.sim.capacity import rates
from experiments.sim.gridspec import MACHINES, Cell
from experiments.sim.output import parser, publish
from hybridattn.cost.crossover import ap_min_request_ratio, eq6_threshold
from hybridattn.planning.predict import by_simulation
from hybridattn.policies.adaptive import Adaptive
from hybridattn.policies.layouts import fixed_layouts
from hybridattn.policies.load import Load

RATIOS = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0)
GAIN = 1.01
FIXED = ("asymmetric", "async_overlap", "sync_offload")


def cells() -> list[Cell]:
    """Each machine with two contexts and two CPUs."""
    contexts = {"t4": (400, 800), "a10": (1000, 4000), "a100": (1000, 8000), "h200": (2000, 16000)}
    found = []
    for name in MACHINES:
        model = "llama2-7b" if name == "t4" else "llama3.1-8b"
        found += [Cell(name, model, c, None, bw, 1.0) for c in contexts[name] for bw in (60.0, 150.0)]
    return found


def gains(cell: Cell, ratio: float) -> tuple[int, dict[str, float]]:
    """CPU rows, and the gain of each policy with its best numbers."""
    costs, load = cell.setting.costs, cell.load
    rows = max(1, round(load.gpu_rows * ratio))
    load = Load(load.gpu_rows, rows, load.context)
    predict = by_simulation()
    found: dict[str, float] = {}
    for layout in fixed_layouts(costs, load.gpu_rows, rows, load.context):
        rate = predict(load, layout, costs, True).tokens_per_s
        found[layout.kind] = max(found.get(layout.kind, 0.0), rate)
    base = found.pop("gpu_only")
    found["adaptive"] = Adaptive(costs, predict).choose(load, costs)[1].tokens_per_s
    return rows, {name: rate / base for name, rate in found.items()}


def ladder(cell: Cell) -> dict[str, Any]:
    """The first ratio that pays, for each policy; None where none of the ladder does."""
    load = cell.load
    first: dict[str, float | None] = dict.fromkeys((*FIXED, "adaptive"))
    tried = set()
    for ratio in RATIOS:
        rows, found = gains(cell, ratio)
        if rows in tried:
            continue
        tried.add(rows)
        for name, value in found.items():
            if value > GAIN and first[name] is None:
                first[name] = rows / load.gpu_rows
        if all(value is not None for value in first.values()):
            break
    x, r = rates(cell.setting.costs, load.gpu_rows, load.context)
    holds = r < eq6_threshold(x)
    shown = {f"{name}_shown": "-" if at is None else f"{at:.2f}" for name, at in first.items()}
    name = replace(cell).name.rsplit(" ", 1)[0]
    return {"cell": name, "x": x, "r": r, "holds": holds, "needed": ap_min_request_ratio(x), **first, **shown}


def verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Adaptive against each other policy and against the closed form."""
    late = [
        f"{r['cell']} ({n})"
        for r in rows
        for n in FIXED
        if r[n] is not None and (r["adaptive"] is None or r["adaptive"] > r[n])
    ]
    held = [r for r in rows if r["holds"]]
    below = [r for r in held if r["adaptive"] is not None and r["adaptive"] < r["needed"]]
    return [
        f"adaptive pays later than another policy in: {', '.join(late) or 'no cell'}",
        f"below T_l / (T_l + T_a) in {len(below)} of {len(held)} cells where eq. 6 holds (asked: half)",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    p = parser("crossing", __doc__ or "")
    p.add_argument("--jobs", type=int, default=2)
    args = p.parse_args(argv)
    with ProcessPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(ladder, cells()))
    columns = {
        "setting": "{cell}",
        "x": "{x:.2f}",
        "N_G / N_C": "{r:.1f}",
        "eq. 6 holds": "{holds}",
        "T_l / (T_l + T_a)": "{needed:.2f}",
        **{name: f"{{{name}_shown}}" for name in (*FIXED, "adaptive")},
    }
    publish("crossing", rows, columns, verdicts(rows), args.results)


if __name__ == "__main__":
    main()
