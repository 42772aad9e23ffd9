"""Ample memory: can CPU attention help when all K,V fits on the GPU? The point of ``capacity_bound``.

Blocking offload of a growing share of the requests, at the best share, against (1 + x) / (1 + x r / (1 + r))
(docs/crossover.md, 1): on the ideal machine (no copies, no launches) and on real ones with everything counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.ideal import ideal
from experiments.machines import Place, open_sim
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown, simulated
from hybridattn.core.errors import InputError
from hybridattn.cost.costs import Costs
from hybridattn.cost.crossover import capacity_gain_bound
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.fixed import SyncOffload
from hybridattn.policies.load import Load

SHARES = (0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3)
IDEAL, IDEAL_ROWS, IDEAL_CONTEXT = "ideal", 200, 1000


@dataclass
class CapacitySettings:
    """``place`` is hardware/model/context/requests, or ideal/x/r: T_a / T_l and N_G / N_C of the ideal machine."""

    place: str = "ideal/1/10"


@experiment(CapacitySettings)
def point(app: App, settings: CapacitySettings) -> dict[str, Any]:
    """One row: the bound at x and r, the largest gain, and how many requests the CPU then has."""
    if settings.place.startswith(f"{IDEAL}/"):
        x, r = _numbers(settings.place)
        key_ns = x * 1e6 / (IDEAL_ROWS * IDEAL_CONTEXT)
        costs, rows, context = ideal(1e6, key_ns, key_ns * r), IDEAL_ROWS, IDEAL_CONTEXT
        origin = {"hardware": IDEAL, "model": IDEAL, "machine": IDEAL}
    else:
        place = Place.parse(settings.place)
        costs, rows, context = place.costs(), int(place.more or 1), place.context
        x, r = rates(costs, rows, context)
        name = f"{place.hardware} {place.model}"
        origin = {"hardware": place.hardware, "model": place.model, "machine": name}
    gain, moved = best_gain(costs, rows, context)
    found = {"x": x, "r": r, "bound": capacity_gain_bound(x, r), "gain": gain, "moved": moved}
    return {**simulated(costs.pricing.fingerprint), **origin, **found}


def _numbers(place: str) -> tuple[float, float]:
    try:
        _, x, r = place.split("/")
        return float(x), float(r)
    except ValueError as error:
        raise InputError(f"settings.place of the ideal machine must read ideal/x/r, got '{place}'") from error


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


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The gains as a table; whether any exceeds the bound, and where a real machine gains at all."""
    columns = {
        "machine": "{machine}",
        "x": "{x:.2f}",
        "r": "{r:.1f}",
        "bound": "{bound:.3f}",
        "best gain": "{gain:.3f}",
        "rows on the CPU": "{moved}",
    }
    above = [r["machine"] for r in rows if r["gain"] > r["bound"] * 1.001]
    real = [f"{r['machine']} {r['gain']:.3f}" for r in rows if r["machine"] != IDEAL and r["gain"] > 1]
    return [
        *markdown(rows, columns),
        f"above the bound: {', '.join(above) or 'none'}",
        f"real machines with copies and launches where any offload exceeds 1: {', '.join(real) or 'none'}",
    ]
