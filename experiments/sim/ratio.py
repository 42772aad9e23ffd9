"""One-layer overlap: from which ratio of CPU to GPU requests on does it pay? ``python -m experiments.sim.ratio``.

No same-step joins, CPU not saturated, 33 micro-batches that spread over the 32 layers, so that every layer has a
join. The stretch d and the advance a are measured at ratio 4; the crossover found by simulation is held against d L /
a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.sim.ideal import costs_of, ideal, ideal_shape, open_sim
from experiments.sim.machines import Setting
from experiments.sim.output import parser, publish
from hybridattn.core.op import CPU, GPU, Work
from hybridattn.cost.costs import Costs
from hybridattn.cost.pricing import PriceModel
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.fixed import AsyncOverlap
from hybridattn.policies.load import Load

GPU_ROWS = 24
MOST_RATIO = 16.0
SETTINGS = (  # GPU, CPU, link, model, context, exposed time per layer with a join [us]; None: a quarter of the layer
    ("t4", "xeon-8259cl-8c", "pcie3-x16", "llama2-7b", 400, (0, 50, 200, None)),
    ("a10", "epyc-7r32-32c", "pcie4-x16", "llama3.1-8b", 1000, (0, 50, 200, None)),
    ("a100-80g", "epyc-7r32-32c", "pcie4-x16", "llama3.1-8b", 1000, (0, 50, None)),
    ("h200", "epyc-7r32-32c", "pcie5-x16", "llama3.1-8b", 1000, (0, 25, None)),
)


@dataclass(frozen=True, slots=True)
class Exposed:
    """A price and a constant on top wherever CPU rows take part: the GPU stands still for a launch at such a layer."""

    model: PriceModel
    more_ns: int
    gpu_rows: int

    def price_ns(self, work: Work) -> int:
        return self.model.price_ns(work) + (self.more_ns if work.rows > self.gpu_rows else 0)


@dataclass(frozen=True, slots=True)
class Faster:
    """A price divided: a CPU so fast that it never saturates."""

    model: PriceModel
    by: int

    def price_ns(self, work: Work) -> int:
        return self.model.price_ns(work) // self.by


def exposed(costs: Costs, more_ns: int, gpu_rows: int) -> Costs:
    """The same machine with ``more_ns`` exposed at each join, no DRAM contention and a CPU that is never the limit."""
    models = dict(costs.pricing.models)
    models[GPU, "linear"] = Exposed(models[GPU, "linear"], more_ns, gpu_rows)
    models[CPU, "decode_attention"] = Faster(models[CPU, "decode_attention"], 50)
    return replace(costs, pricing=replace(costs.pricing, models=models, contention={}))


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


def crossover(costs: Costs, gpu_rows: int, context: int, most: float = MOST_RATIO) -> float | None:
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


def measure(name: str, costs: Costs, gpu_rows: int, context: int, more_ns: int) -> dict[str, Any]:
    """A row: d and a at ratio 4, the crossover they predict, and the one seen."""
    _, d, a = overlap(costs, gpu_rows, 4 * gpu_rows, context)
    predicted = d * costs.num_layers / a
    seen = crossover(costs, gpu_rows, context)
    layer_ns = costs.step_ns(gpu_rows, gpu_rows * context) / costs.num_layers
    resolved = seen is not None and seen > (costs.num_layers + 1) / gpu_rows
    return {
        "setting": name,
        "layer_us": layer_ns / 1e3,
        "exposed_us": more_ns / 1e3,
        "d": d,
        "a": a,
        "predicted": predicted,
        "seen": seen,
        "shown": f"above {MOST_RATIO:g}" if seen is None else f"{'' if resolved else 'below '}{seen:.2f}",
        "error": f"{seen / predicted - 1:+.1%}" if seen is not None and resolved else "-",
        "resolved": resolved,
    }


def table() -> list[dict[str, Any]]:
    """The ideal machine with a quarter of the layer exposed, then real ones by what is exposed."""
    shape = ideal_shape()
    costs = costs_of(shape, ideal(shape, 800_000.0, 200_000 / 32_000, 0.01))
    rows = [measure("ideal, 1 ms per layer", exposed(costs, 250_000, 32), 32, 1000, 250_000)]
    for gpu, cpu, link, model, context, steps in SETTINGS:
        costs = Setting.of(gpu, cpu, link, model).costs
        gpu_rows = GPU_ROWS
        for us in steps:
            more_ns = us * 1000 if us is not None else _quarter(costs, gpu_rows, context)
            rows.append(measure(f"{gpu} {model}", exposed(costs, more_ns, gpu_rows), gpu_rows, context, more_ns))
    return rows


def _quarter(costs: Costs, gpu_rows: int, context: int) -> int:
    """A quarter of the layer, less what the machine exposes by itself."""
    layer_ns = costs.step_ns(gpu_rows, gpu_rows * context) / costs.num_layers
    _, d, _ = overlap(exposed(costs, 0, gpu_rows), gpu_rows, 4 * gpu_rows, context)
    return round(max(0.0, 0.25 - d) * layer_ns)


def main(argv: Sequence[str] | None = None) -> None:
    args = parser("ratio", __doc__ or "").parse_args(argv)
    rows = table()
    columns = {
        "setting": "{setting}",
        "layer [us]": "{layer_us:.0f}",
        "exposed per join [us]": "{exposed_us:.0f}",
        "d at ratio 4": "{d:.3f}",
        "a": "{a:.3f}",
        "d L / a": "{predicted:.2f}",
        "crossover seen": "{shown}",
        "error": "{error}",
    }
    errors = [abs(r["seen"] / r["predicted"] - 1) for r in rows if r["resolved"]]
    verdict = [f"crossover against d L / a, {len(errors)} settings: largest error {max(errors):.1%} (asked: 10 %)"]
    publish("ratio", rows, columns, verdict, args.results)


if __name__ == "__main__":
    main()
