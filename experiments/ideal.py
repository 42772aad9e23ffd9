"""The ideal machine of the closed forms, as a ``Pricing`` that the real executor and policies run on.

Idealisations: linear time independent of the rows, no head, no embedding, no copies, no launches, attention exactly
proportional to the keys, the CPU's return known exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridattn.core.op import CPU, D2H, GPU, H2D, Work
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.costs import Costs
from hybridattn.cost.pricing import Constant, PriceModel, Pricing
from hybridattn.cost.stages_cost import ModelCost


@dataclass(frozen=True, slots=True)
class PerWeight:
    """A price proportional to the weights that a stage reads, whatever the number of rows."""

    ns_per_weight: float

    def price_ns(self, work: Work) -> int:
        return round(self.ns_per_weight * work.flops / (2 * work.rows)) if work.rows else 0


@dataclass(frozen=True, slots=True)
class PerKey:
    """A price proportional to the keys attended to."""

    ns_per_key: float

    def price_ns(self, work: Work) -> int:
        return round(self.ns_per_key * work.kv_tokens)


def ideal_shape(num_layers: int = 32) -> ModelShape:
    """A model shape whose sizes do not matter: only its number of layers does."""
    return ModelShape("ideal", num_layers, 1024, 4096, 8, 8, 128, 1024, 1 << 20)


def ideal(shape: ModelShape, linear_ns: float, gpu_key_ns: float, cpu_key_ns: float, exposed_ns: int = 0) -> Pricing:
    """Prices of the ideal machine.

    Parameters
    ----------
    linear_ns : linear time of one layer
    gpu_key_ns, cpu_key_ns : attention time per key and layer on each processor
    exposed_ns : extra time of every copy up, which the GPU waits for: work exposed at a layer with a join
    """
    models: dict[tuple[str, str], PriceModel] = {
        (GPU, "linear"): PerWeight(linear_ns / shape.layer_params),
        (GPU, "head"): Constant(0),
        (GPU, "other"): Constant(0),
        (GPU, "decode_attention"): PerKey(gpu_key_ns),
        (CPU, "decode_attention"): PerKey(cpu_key_ns),
        (D2H, "copy"): Constant(0),
        (H2D, "copy"): Constant(exposed_ns),
    }
    return Pricing("ideal", "ideal", models)


def costs_of(shape: ModelShape, pricing: Pricing, dtype: str = "fp16") -> Costs:
    return Costs(ModelCost(shape, dtype), pricing)
