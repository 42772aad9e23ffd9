"""The emulated device: priced GPU lanes, real CPU attention, labelled as what it is."""

from __future__ import annotations

import pytest

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D, Op, Work
from hybridattn.core.request import DeclaredTokens
from hybridattn.core.shapes import ModelShape
from hybridattn.core.trace import violations
from hybridattn.cost.machine import machine
from hybridattn.devices.emulated import EmulatedDevice, EmulatedStages
from hybridattn.engine.engine import Engine
from hybridattn.policies.fixed import AsyncOverlap, SyncOffload

SHAPE = ModelShape("tiny", 3, 256, 512, 8, 2, 64, 1000, 1024)
PRICING = machine("t4", "xeon-8259cl-8c", "pcie3-x16")
CONFIG = EngineConfig(20, 60, 16, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=128)


@pytest.fixture
def device():
    made = EmulatedDevice(PRICING)
    yield made
    made.close()


@pytest.mark.parametrize("policy", [SyncOffload(cpu_fraction=0.5), AsyncOverlap(cpu_fraction=0.5)])
def test_requests_are_served_with_real_attention_and_priced_gpu_ops(device, policy):
    engine = Engine(EmulatedStages(SHAPE, "fp32", CONFIG), device, policy, CONFIG)
    for i in range(4):
        engine.add(DeclaredTokens(20 + i), 5)
    engine.run()
    spans = engine.drain()
    assert violations(spans) == []
    assert sorted(r.output_tokens for r in engine.take_records().requests) == [5] * 4
    gpu = [s for s in spans if s.lane == GPU and s.name == "linear"]
    assert all(s.duration_ns >= 5000 for s in gpu)  # the launch alone takes that long
    cpu = [s for s in spans if s.lane == CPU]
    assert len(cpu) >= 2 * 4 * SHAPE.num_layers // 2 and all(s.num_bytes > 0 for s in cpu)


@pytest.mark.parametrize("lane", [GPU, D2H, H2D])
def test_priced_lanes_take_at_least_the_price(device, lane):
    kind = "linear" if lane == GPU else "copy"
    op = Op("one", lane, Work(kind, 0.0, 10**7, 4))
    future = device.submit(op)
    future.wait(10**9)
    assert future.end_ns - future.start_ns >= PRICING.price_ns(op) > 0


def test_nothing_that_the_profile_does_not_price_runs(device):
    with pytest.raises(InputError, match="has no price for 'unheard-of'"):
        device.submit(Op("odd", GPU, Work("unheard-of", 0.0, 1, 1)))
    with pytest.raises(InputError, match="cpu.attention is real on the emulated device"):
        device.submit(Op("empty", CPU, Work("decode_attention", 0.0, 1, 1)))


def test_it_says_what_it_is(device):
    assert device.kind == device.name == "emulated"
    assert PRICING.fingerprint in device.profile and " beside " in device.profile
