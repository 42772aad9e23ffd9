"""The ideal machine of the closed forms, as a ``Pricing`` that the real executor and policies run on.

Idealisations: linear time independent of the rows, no head, no embedding, no copies, no launches, attention exactly
proportional to the keys, that of prompts free, the CPU's return known exactly.
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


def ideal(linear_ns: float, gpu_key_ns: float, cpu_key_ns: float, num_layers: int = 32, tau_ns: int = 0) -> Costs:
    """The ideal machine with a model of which only the number of layers matters.

    Parameters
    ----------
    linear_ns : linear time of one layer
    gpu_key_ns, cpu_key_ns : attention time per K,V token and layer on each processor
    tau_ns : time of each way up
    """
    shape = ModelShape("ideal", num_layers, 1024, 4096, 8, 8, 128, 1024, 1 << 20)
    free = Constant(0)
    models: dict[tuple[str, str], PriceModel] = {
        (GPU, "linear"): PerWeight(linear_ns / shape.layer_params),
        (GPU, "head"): free,
        (GPU, "other"): free,
        (GPU, "decode_attention"): PerKey(gpu_key_ns),
        (GPU, "prefill_attention"): free,
        (CPU, "decode_attention"): PerKey(cpu_key_ns),
        (D2H, "copy"): free,
        (H2D, "copy"): Constant(tau_ns),
    }
    return Costs(ModelCost(shape, "fp16"), Pricing("ideal", "ideal", models))
