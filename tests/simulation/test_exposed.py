"""Time that is exposed while CPU rows are in flight, and only then."""

from __future__ import annotations

from dataclasses import replace

from hybridattn.core.op import GPU
from hybridattn.cost.catalog import shape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.priced_stages import EXPOSED
from hybridattn.cost.pricing import Constant
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.planning.predict import by_simulation
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.adaptive import Adaptive
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly
from hybridattn.policies.load import Load

COST = ModelCost(shape("llama3.1-8b"), "fp16")
PRICING = machine("a10", "epyc-7r32-16c", "pcie4-x16")
LOAD = Load(24, 24, 1000)


def exposed(share):
    """The machine with a share of the layer of the GPU's rows exposed at each layer."""
    plain = Costs(COST, PRICING)
    layer_ns = plain.linear_ns(24) + plain.attention_ns(24, 24_000)
    models = {**PRICING.models, (GPU, EXPOSED): Constant(round(share * layer_ns))}
    return Costs(COST, replace(PRICING, models=models, fingerprint=f"{PRICING.fingerprint} {share}"))


def rate(policy, costs):
    run = SteadyRun(costs, costs.pricing, policy, LOAD, lambda p: SimDevice(p, record=False))
    return run.measure(40, 40).tokens_per_s


def test_gpu_only_pays_nothing_for_it_and_overlap_pays_at_every_layer():
    plain, costs = Costs(COST, PRICING), exposed(0.25)
    assert rate(GpuOnly(), costs) == rate(GpuOnly(), plain)
    assert 0.78 < rate(AsyncOverlap(), costs) / rate(AsyncOverlap(), plain) < 0.84  # 1 / 1.25, the head left out


def test_a_policy_that_plans_leaves_the_cpu_alone_where_that_costs_more_than_it_brings():
    alone = rate(GpuOnly(), exposed(2.0))
    assert rate(Adaptive(exposed(2.0), by_simulation()), exposed(2.0)) > 0.94 * alone  # one step for those who starve
    assert rate(Adaptive(exposed(0.0), by_simulation()), exposed(0.0)) > 1.05 * alone
