"""Requests over both tiers, simulated: the point of ``split`` and ``long_context``.

GPU memory holds ``room`` of the K,V of ``requests`` requests; what it does not hold is cold, every row's share alike.
Beside each point stands the closed form (``hybridattn.cost.split``), whose machine has no head, no growth and one rate
for each processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.machines import Place, open_sim
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown, simulated
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, GPU
from hybridattn.cost.costs import Costs
from hybridattn.cost.split import split_case, split_layer
from hybridattn.devices.sim import SimDevice
from hybridattn.planning.steady import Steady, SteadyRun
from hybridattn.policies.fixed import GpuOnly, SyncOffload
from hybridattn.policies.load import Load


@dataclass
class SplitSettings:
    """``settings`` of ``split`` and ``long_context``.

    place : hardware/model/context
    cold : cold tokens, in multiples of what hides behind the GPU's attention (case 1)
    room : share of one request's K,V that the GPU tier holds (case 3); null: all of its memory, and as many requests
    """

    place: str = "a10/llama3.1-8b/4000"
    cold: float = 1.0
    room: float | None = None

    def __post_init__(self) -> None:
        if self.cold < 0 or (self.room is not None and not 0 < self.room < 1):
            raise InputError(f"settings: cold {self.cold} must be at least 0, and room {self.room} lie between 0 and 1")


@experiment(SplitSettings)
def point(app: App, settings: SplitSettings) -> dict[str, Any]:
    """One row: throughput and gain, simulated and by the closed form, and how long the lanes idle."""
    place = Place.parse(settings.place)
    costs, context = place.costs(), place.context
    found = long_request(costs, context, settings.room) if settings.room else batch(costs, place, settings.cold)
    machine = {"machine": f"{place.hardware} {place.model}", "context": context}
    return {**simulated(costs.pricing.fingerprint), **machine, **found}


def batch(costs: Costs, place: Place, cold: float) -> dict[str, Any]:
    """GPU memory limits the batch: more rows with cold parts, over as many as fit whole."""
    context, alone = place.context, place.gpu_rows(1.0, 512)
    hot = alone * context
    layer = split_layer(costs, alone, hot)
    rows = max(alone, round((hot + cold * layer.hidden(hot)) / context))
    part = context - hot // rows
    run, lanes = steady(costs, rows, context, part)
    base, _ = steady(costs, alone, context, 0)
    closed = rows / alone * layer.layer_ns(hot, 0) / layer.layer_ns(rows * (context - part), rows * part)
    return {
        "case": split_case(rows, context, hot), "rows": rows, "gpu_only_rows": alone, "cold_tokens": rows * part,
        "hidden_tokens": round(layer.hidden(hot)), "cold_over_hidden": rows * part / (layer.hidden(hot) or 1.0),
        "tokens_per_s": run.tokens_per_s, "tpot_ns": run.gpu_tpot_ns,
        "tpot_over_gpu_only": (run.gpu_tpot_ns or 0.0) / (base.gpu_tpot_ns or 1.0),
        "gain": run.tokens_per_s / base.tokens_per_s, "closed_gain": closed, "best_gain": layer.gain(hot),
        "more_pays": layer.more_pays(hot), **lanes,
    }  # fmt: skip


def long_request(costs: Costs, context: int, room: float) -> dict[str, Any]:
    """A request that the GPU tier cannot hold, over all of it on the CPU tier."""
    part = context - round(room * context)
    layer = split_layer(costs, 1, context)
    run, lanes = steady(costs, 1, context, part)
    base = SteadyRun(costs, costs.pricing, SyncOffload(), Load(0, 1, context), open_sim)
    cpu_tier = base.measure(costs.num_layers + 1, 2 * costs.num_layers + 2).tokens_per_s
    closed = layer.layer_ns(0, context) / layer.layer_ns(context - part, part)
    return {
        "case": split_case(1, context, context - part), "room": room, "cold_tokens": part,
        "tokens_per_s": run.tokens_per_s, "cpu_tier_tokens_per_s": cpu_tier, "tpot_ns": run.gpu_tpot_ns,
        "gain": run.tokens_per_s / cpu_tier, "closed_gain": closed, **lanes,
    }  # fmt: skip


def steady(costs: Costs, rows: int, context: int, part: int) -> tuple[Steady, dict[str, float]]:
    """A few steps of rows with ``part`` cold tokens each, and the shares of the time in which the lanes do nothing."""
    run = SteadyRun(costs, costs.pricing, GpuOnly(), Load(rows, 0, context), SimDevice, cold=part)
    found = run.measure(0, 2)
    busy = dict.fromkeys((GPU, CPU), 0)
    for span in run.device.drain(10**12):
        if span.lane in busy:
            busy[span.lane] += span.duration_ns
    return found, {f"{n}_idle": 1 - busy[lane] / found.duration_ns for n, lane in (("gpu", GPU), ("cpu", CPU))}


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The points as a table; how far the closed form is off with all costs counted."""
    columns = {
        "machine": "{machine}", "context": "{context}", "case": "{case}", "cold tokens": "{cold_tokens}",
        "tokens/s": "{tokens_per_s:.1f}", "gain": "{gain:.2f}", "closed form": "{closed_gain:.2f}",
        "GPU idle": "{gpu_idle:.0%}", "CPU idle": "{cpu_idle:.0%}",
    }  # fmt: skip
    off = [abs(r["closed_gain"] / r["gain"] - 1) for r in rows]
    lines = [*markdown(rows, columns), f"closed form against the simulation with all costs: {max(off):.1%} off at most"]
    best = {
        m: max((r for r in rows if r["machine"] == m), key=lambda r: r["gain"]) for m in {r["machine"] for r in rows}
    }
    for machine in sorted(best):
        r = best[machine]
        where = f"room for {r['room']:.0%} of it" if "room" in r else f"{r['cold_over_hidden']:.2f} of what hides"
        lines.append(f"{machine}: most gained {r['gain']:.2f} at {r['cold_tokens']} cold tokens ({where})")
    return lines
