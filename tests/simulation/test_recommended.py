"""What is recommended, beside the fixed policy whose layout it takes, with all that a driver costs."""

from __future__ import annotations

import pytest
from made_profile import made_profile

from hybridattn.core.config import EngineConfig
from hybridattn.core.request import DeclaredTokens
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.machine import driver_of
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.planning.messages import Setup
from hybridattn.policies.adaptive import Adaptive, Auto
from hybridattn.policies.fixed import GpuOnly, SyncOffload

SHAPE = ModelShape("toy", 4, 64, 128, 4, 2, 16, 256, 512)
PROFILE = made_profile("here", "toy", cpu_factor=0.5)  # CPU rows ride along for nothing: blocking offload pays
COSTS = Setup(PROFILE, SHAPE, "fp32").costs()
pytestmark = pytest.mark.filterwarnings("ignore::hybridattn.cost.table.ExtrapolationWarning")


class Nobody:
    """Closed forms have to do."""

    def __init__(self):
        self.cpu_ns, self.known = 0, {}

    def ask(self, question): ...

    def take(self):
        return None


def served(policy, requests=8, gpu_blocks=12, prompt=30, output=40):
    """Records of equal requests that come together, and how long they took."""
    device = SimDevice(COSTS.pricing, record=False, **driver_of(PROFILE))
    engine = Engine(PricedStages(SHAPE, "fp32"), device, policy, EngineConfig(gpu_blocks, 64, 16, 256, 64, 256))
    for _ in range(requests):
        engine.add(DeclaredTokens(prompt), output)
    engine.run()
    return engine.take_records().requests, device.now_ns()


def test_it_takes_no_longer_than_the_layout_that_it_takes():
    """From the first step on: requests are placed, prompts read and ops waited for as under blocking offload itself.
    The GPU tier holds two requests for good."""
    _, fixed_ns = served(SyncOffload(), requests=6, gpu_blocks=6, prompt=20, output=20)
    for cls in (Adaptive, Auto):
        policy = cls(COSTS, Nobody())
        _, took_ns = served(policy, requests=6, gpu_blocks=6, prompt=20, output=20)
        assert {layout.kind for layout in policy.used} == {"sync_offload"}
        assert took_ns <= 1.005 * fixed_ns


def test_a_full_gpu_tier_moves_requests_down_where_the_cpu_takes_part_instead_of_computing_them_anew():
    fixed, fixed_ns = served(SyncOffload())
    assert sum(r.preemptions for r in fixed) > 0
    records, took_ns = served(Adaptive(COSTS, Nobody()))
    assert sum(r.preemptions for r in records) == 0 and {r.tier for r in records} == {"gpu", "cpu"}
    assert took_ns <= 1.005 * fixed_ns  # though reading prompts again costs nothing in this profile
    alone, _ = served(GpuOnly())
    assert all(r.tier == "gpu" for r in alone)
