"""On a real card: the host device's tokens, the hand-over, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch
from scaled_model import scaled

from gpu_kernels.environment import interpreted
from hybridattn.core.config import EngineConfig
from hybridattn.core.params import SamplingParams
from hybridattn.core.trace import violations
from hybridattn.devices.cuda import CudaDevice
from hybridattn.devices.host import HostDevice
from hybridattn.engine.engine import Engine
from hybridattn.models.torch_stages import TorchStages
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly, SyncOffload

pytestmark = pytest.mark.gpu

CONFIG = EngineConfig(
    gpu_kv_blocks=16, cpu_kv_blocks=16, page_size=16, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=24
)
JOBS = [([3, 1, 4, 1, 5], 30), ([9, 2, 7] * 17, 20), ([2, 6], 40), ([5, 3, 5, 8, 9, 7, 9] * 3, 30)]


def answers(device, model, policy, dtype="fp32"):
    try:
        engine = Engine(TorchStages(model, device, CONFIG, dtype), device, policy, CONFIG)
        requests = [engine.add(p, n, SamplingParams(max_tokens=n, seed=i)) for i, (p, n) in enumerate(JOBS)]
        engine.run()
        assert violations(engine.drain()) == []
        return [r.token_ids[r.num_prompt :] for r in requests]
    finally:
        device.close()


@pytest.fixture(scope="module", autouse=True)
def card():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if interpreted():
        pytest.skip("needs compiled kernels: run with TRITON_INTERPRET=0")


@pytest.fixture(scope="module")
def quiet():
    return answers(HostDevice(), scaled(), GpuOnly())


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("handover", ["stream", "poll"])
@pytest.mark.parametrize("fraction", [None, 0.5, 1.0])
def test_tokens_equal_the_hosts(quiet, fraction, handover, graphs):
    model = scaled(device="cuda:0")
    for policy in (
        [GpuOnly()] if fraction is None else [SyncOffload(fraction), AsyncOverlap(fraction, max_micro_batches=2)]
    ):
        assert answers(CudaDevice(handover=handover, graphs=graphs), model, policy) == quiet


def test_many_runs_give_the_same_tokens(quiet):
    """A race would show in some of them."""
    model = scaled(device="cuda:0")
    for _ in range(20):
        assert answers(CudaDevice(), model, AsyncOverlap(0.5, max_micro_batches=2)) == quiet


def test_bf16_runs_under_every_policy():
    model = scaled(dtype="bf16", device="cuda:0")
    for policy in (GpuOnly(), SyncOffload(0.5), AsyncOverlap(1.0)):
        tokens = answers(CudaDevice(), model, policy, "bf16")
        assert [len(t) for t in tokens] == [n for _, n in JOBS]
