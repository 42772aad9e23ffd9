"""The real stages on the deterministic asynchronous device: hypothesis decides when the CPU finishes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.config import EngineConfig
from hybridattn.core.op import CPU
from hybridattn.core.params import SamplingParams
from hybridattn.core.trace import violations
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.models.load import load
from hybridattn.models.torch_stages import TorchStages
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly, SyncOffload

JOBS = [([3, 1, 4, 1, 5], 9), ([9] * 40, 6), ([2, 6], 12), ([5, 3, 5, 8, 9, 7, 9] * 3, 10)]
CONFIG = EngineConfig(
    gpu_kv_blocks=8, cpu_kv_blocks=8, page_size=16, max_model_len=96, max_num_seqs=4, max_num_batched_tokens=24
)


@pytest.fixture(scope="module")
def tiny():
    return load("dummy:tiny")


def answers(model, policy, seed, cpu_scale):
    durations = random.Random(seed)
    price = lambda op: durations.randint(0, 30 * (cpu_scale if op.lane == CPU else 1))  # noqa: E731
    device = SimDevice(price, execute=True)
    engine = Engine(TorchStages(model, device, CONFIG, "fp32"), device, policy, CONFIG)
    requests = [engine.add(prompt, n, SamplingParams(max_tokens=n, seed=i)) for i, (prompt, n) in enumerate(JOBS)]
    engine.run()
    assert violations(engine.drain()) == []
    assert all(pool.num_free == 8 for pool in engine.kv.pools.values())
    return [r.token_ids[r.num_prompt :] for r in requests]


@pytest.fixture(scope="module")
def quiet(tiny):
    return answers(tiny, GpuOnly(), 0, 1)


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1, 10, 200]), which=st.integers(0, 3))
@settings(max_examples=8, deadline=None)
def test_token_ids_hold_for_every_schedule(tiny, quiet, seed, scale, which):
    policy = [SyncOffload(0.5), AsyncOverlap(1.0), AsyncOverlap(0.5, max_micro_batches=2), AsyncOverlap()][which]
    assert answers(tiny, policy, seed, scale) == quiet
