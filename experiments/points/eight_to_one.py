"""From which ratio of CPU to GPU requests on does one-layer overlap pay? The point of ``eight_to_one``.

No joins in the same step, a CPU that never saturates, and one micro-batch more than there are layers, so that every
layer has a join. The stretch d and the advance a are taken at ratio 4; the crossover that a search over the ratio finds
is held against their prediction, d L / a.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.ideal import ideal
from experiments.machines import Place, open_sim
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown, simulated
from hybridattn.core.errors import InputError
from hybridattn.core.op import GPU, Work
from hybridattn.cost.costs import Costs, with_cpu_factor
from hybridattn.cost.pricing import PriceModel
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.fixed import AsyncOverlap
from hybridattn.policies.load import Load

IDEAL, IDEAL_ROWS, IDEAL_CONTEXT = "ideal", 32, 1000
QUARTER = 0.25


@dataclass
class EightSettings:
    """``settings`` of ``eight_to_one``.

    place : hardware/model/context, or ``ideal``: 1 ms per layer and nothing else that costs
    exposed_us : time exposed at each layer with a join; null: what makes it a quarter of the layer
    gpu_rows : GPU rows of a real machine
    most_ratio : the search ends there
    """

    place: str = IDEAL
    exposed_us: float | None = None
    gpu_rows: int = 24
    most_ratio: float = 16.0


@experiment(EightSettings)
def point(app: App, settings: EightSettings) -> dict[str, Any]:
    """One row: d and a at ratio 4, the crossover that they predict, and the one that is seen."""
    s = settings
    if s.exposed_us is not None and s.exposed_us < 0:
        raise InputError(f"settings.exposed_us must not be negative, got {s.exposed_us}")
    if s.place == IDEAL:
        costs, rows, context = ideal(800_000.0, 200_000 / 32_000, 0.01), IDEAL_ROWS, IDEAL_CONTEXT
        name, origin = "ideal, 1 ms per layer", {"hardware": IDEAL}
    else:
        place = Place.parse(s.place)
        costs, rows, context, name = place.costs(), s.gpu_rows, place.context, str(place)
        origin = {"hardware": place.hardware, "model": place.model}
    more_ns = quarter(costs, rows, context) if s.exposed_us is None else round(s.exposed_us * 1000)
    found = measure(exposed(costs, more_ns, rows), rows, context, s.most_ratio)
    return {**simulated(costs.pricing.fingerprint), **origin, "setting": name, "exposed_us": more_ns / 1e3, **found}


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The crossovers as a table, and the largest error of the closed form."""
    rows = [{**row, "shown": _shown(row), "off": f"{row['relative_error']:+.1%}" if row["resolved"] else "-"}
            for row in rows]  # fmt: skip
    columns = {
        "setting": "{setting}",
        "layer [us]": "{layer_us:.0f}",
        "exposed per join [us]": "{exposed_us:.0f}",
        "d at ratio 4": "{d:.3f}",
        "a": "{a:.3f}",
        "d L / a": "{predicted:.2f}",
        "crossover seen": "{shown}",
        "error": "{off}",
    }
    errors = [abs(row["relative_error"]) for row in rows if row["resolved"]]
    worst = f"largest error {max(errors):.1%} (goal: 10 %)" if errors else "none was resolved"
    return [*markdown(rows, columns), f"crossover against d L / a, {len(errors)} settings: {worst}"]


def _shown(row: Mapping[str, Any]) -> str:
    if row["seen"] is None:
        return f"above {row['most_ratio']:g}"
    return f"{'' if row['resolved'] else 'below '}{row['seen']:.2f}"


@dataclass(frozen=True, slots=True)
class Exposed:
    """A price and a constant on top wherever CPU rows take part: the GPU stands still for a launch at such a layer."""

    model: PriceModel
    more_ns: int
    gpu_rows: int

    def price_ns(self, work: Work) -> int:
        return self.model.price_ns(work) + (self.more_ns if work.rows > self.gpu_rows else 0)


def exposed(costs: Costs, more_ns: int, gpu_rows: int) -> Costs:
    """The same machine with ``more_ns`` exposed at each join, no DRAM contention and a CPU that is never the limit."""
    pricing = with_cpu_factor(costs.pricing, 1 / 50)
    linear = Exposed(pricing.models[GPU, "linear"], more_ns, gpu_rows)
    models = {**pricing.models, (GPU, "linear"): linear}
    return replace(costs, pricing=replace(pricing, models=models, contention={}))


def quarter(costs: Costs, gpu_rows: int, context: int) -> int:
    """A quarter of the layer, less what the machine exposes by itself."""
    layer_ns = costs.step_ns(gpu_rows, gpu_rows * context) / costs.num_layers
    _, d, _ = overlap(exposed(costs, 0, gpu_rows), gpu_rows, 4 * gpu_rows, context)
    return round(max(0.0, QUARTER - d) * layer_ns)


def measure(costs: Costs, gpu_rows: int, context: int, most_ratio: float) -> dict[str, Any]:
    """``resolved``: the crossover lies inside the range that whole rows in each micro-batch can tell."""
    _, d, a = overlap(costs, gpu_rows, 4 * gpu_rows, context)
    predicted = d * costs.num_layers / a
    seen = crossover(costs, gpu_rows, context, most_ratio)
    resolved = seen is not None and seen > (costs.num_layers + 1) / gpu_rows
    return {
        "layer_us": costs.step_ns(gpu_rows, gpu_rows * context) / costs.num_layers / 1e3,
        "d": d,
        "a": a,
        "predicted": predicted,
        "seen": seen,
        "relative_error": seen / predicted - 1 if seen is not None and resolved else None,
        "resolved": resolved,
    }


def overlap(costs: Costs, gpu_rows: int, cpu_rows: int, context: int) -> tuple[float, float, float]:
    """Gain over the GPU rows alone, stretch d of the step, and layers that a row advances per step."""
    layers = costs.num_layers
    policy = AsyncOverlap(max_micro_batches=layers + 1, equal=True, same_step=False)
    run = SteadyRun(costs, costs.pricing, policy, Load(gpu_rows, cpu_rows, context), open_sim)
    steady = run.measure(3 * (layers + 1), 2 * (layers + 1))
    alone_ns = costs.step_ns(gpu_rows, gpu_rows * context)
    step_ns = steady.duration_ns / steady.steps
    advance = steady.cpu_tokens_per_s * step_ns / 1e9 * layers / cpu_rows
    return steady.tokens_per_s * alone_ns / 1e9 / gpu_rows, step_ns / alone_ns - 1, advance


def crossover(costs: Costs, gpu_rows: int, context: int, most: float = 16.0) -> float | None:
    """Ratio from which on there is a gain, with whole rows in each of the L + 1 micro-batches and a line between; None:
    none up to ``most``. One row in each micro-batch is the least that can be told."""
    micro_batches = costs.num_layers + 1
    gains: dict[int, float] = {}

    def gain(each: int) -> float:
        if each not in gains:
            gains[each] = overlap(costs, gpu_rows, each * micro_batches, context)[0]
        return gains[each]

    low, high = 1, int(most * gpu_rows / micro_batches)
    if gain(high) <= 1:
        return None
    if gain(low) > 1:
        return low * micro_batches / gpu_rows
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(middle) > 1 else (middle, high)
    return (low + (1 - gain(low)) / (gain(high) - gain(low))) * micro_batches / gpu_rows
