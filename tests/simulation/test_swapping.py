"""Requests that leave the GPU tier when it runs full and come back: all of them end, nothing is computed twice."""

from __future__ import annotations

import pytest

from hybridattn.core.config import EngineConfig
from hybridattn.core.request import DeclaredTokens
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.policies.asymmetric import Asymmetric
from hybridattn.policies.fixed import GpuOnly

SHAPE = ModelShape("toy", 2, 64, 128, 4, 2, 16, 256, 512)
PRICING = machine("t4", "xeon-8259cl-8c", "pcie3-x16")
COSTS = Costs(ModelCost(SHAPE, "fp16"), PRICING)


def served(policy, requests, gpu_blocks, cpu_blocks, prompt=60, output=40):
    """Records of equal requests; fails when they do not end."""
    config = EngineConfig(gpu_blocks, cpu_blocks, 16, max_model_len=256, max_num_seqs=64, max_num_batched_tokens=256)
    engine = Engine(PricedStages(SHAPE, "fp16"), SimDevice(PRICING, record=False), policy, config)
    for _ in range(requests):
        engine.add(DeclaredTokens(prompt), output)
    for _ in range(20_000):
        if not engine.unfinished:
            break
        engine.step()
    assert not engine.unfinished, "requests take each other's pages in turns"
    assert all(pool.num_free == pool.num_blocks for pool in engine.kv.pools.values())
    return engine.take_records().requests


@pytest.mark.parametrize("gpu_blocks", [25, 26, 27, 29, 31])
@pytest.mark.parametrize("policy", [lambda: GpuOnly(swap=True), lambda: Asymmetric(COSTS), lambda: Asymmetric()])
def test_equal_requests_that_want_a_page_at_the_same_time_all_end(policy, gpu_blocks):
    records = served(policy(), 8, gpu_blocks, 64)
    assert all(len(r.token_ns) == 40 for r in records)


def test_a_full_gpu_tier_parks_requests_instead_of_computing_them_anew():
    assert sum(r.preemptions for r in served(GpuOnly(), 8, 27, 64)) > 0
    parked = served(GpuOnly(swap=True), 8, 27, 64)
    assert sum(r.preemptions for r in parked) == 0


def test_without_room_to_park_it_computes_anew():
    assert sum(r.preemptions for r in served(GpuOnly(swap=True), 8, 27, 4)) > 0


def test_a_request_that_only_the_cpu_tier_holds_is_served():
    records = served(Asymmetric(COSTS), 2, 2, 8)
    assert len(records) == 2
