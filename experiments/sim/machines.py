"""A simulated machine with an engine on it, by names of shipped profiles."""

from __future__ import annotations

from dataclasses import dataclass

from hybridattn.core.config import EngineConfig
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.catalog import shape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.planning import CPU_FRACTION, GPU_FRACTION
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.cost.pricing import Pricing
from hybridattn.cost.profile import load_profile
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.policies.base import Policy

TIMEOUT_NS = 10**13  # virtual time is free: nothing simulated here is a stall


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on a machine. ``pricing`` may be set apart from what the profiles say (a fitted or misjudged part)."""

    model: ModelShape
    dtype: str
    pricing: Pricing

    @staticmethod
    def of(gpu: str, cpu: str, link: str, model: str, dtype: str = "fp16") -> Setting:
        return Setting(shape(model), dtype, machine(gpu, cpu, link))

    @property
    def costs(self) -> Costs:
        return Costs(ModelCost(self.model, self.dtype), self.pricing)

    def engine(self, policy: Policy, config: EngineConfig, *, submit_ns: int = 0, poll_ns: int = 0) -> Engine:
        """An engine on a simulated device that keeps no spans."""
        device = SimDevice(self.pricing, record=False, submit_ns=submit_ns, poll_ns=poll_ns)
        return Engine(PricedStages(self.model, self.dtype), device, policy, config)


def kv_tokens(gpu: str, cpu: str, model: str, dtype: str = "fp16") -> tuple[int, int]:
    """Tokens of K,V that fit beside the weights on the GPU, and on the host, with the fractions that plans use."""
    cost = ModelCost(shape(model), dtype)
    per_token = cost.kv_token_layer_bytes * cost.shape.num_layers
    on_gpu = int(GPU_FRACTION * load_profile(gpu).value("memory")) - cost.weight_bytes
    on_cpu = int(CPU_FRACTION * load_profile(cpu).value("memory"))
    return max(0, on_gpu // per_token), on_cpu // per_token
