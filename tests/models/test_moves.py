"""K,V of whole requests between the tiers: there and back is bit-equal, and nothing else is touched."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_kernels
from fake_cuda import FakeCuda
from scaled_model import scaled

from cpu_kernels import KVPages, append_kv, gather_kv
from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import HybridAttnError
from hybridattn.core.op import D2H, H2D
from hybridattn.core.params import SamplingParams
from hybridattn.core.stages import CPU_TIER, GPU_TIER
from hybridattn.core.trace import violations
from hybridattn.devices.cuda import CudaDevice
from hybridattn.devices.host import HostDevice
from hybridattn.engine.engine import Engine
from hybridattn.kv import cpu_blocks
from hybridattn.models import cuda_rows, cuda_tier, fused_decoder, layer_stages
from hybridattn.models.torch_stages import TorchStages
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly

TOKENS = (1, 17, 31, 32, 33, 97)
BLOCKS, PAGE = 12, 32
HOST = [("fp32", "fp32"), ("fp32", "bf16"), ("fp32", "fp16"), ("fp32", "int8"), ("fp32", "fp8"), ("bf16", "bf16")]
CUDA = [("fp32", "fp32"), ("fp32", "int8"), ("fp32", "fp8"), ("bf16", "bf16"), ("fp16", "fp16")]
POISON = 0xFF  # every float of these bytes is a NaN
# scattered, some neighbours among them, and of different order on the two tiers
GPU_BLOCKS, ELSEWHERE, CPU_BLOCKS = [7, 2, 3, 11], [5, 9, 0, 8], [1, 10, 4, 6]


class HostPools:
    """The pages of both tiers as bytes ``[layers, pages, ...]``."""

    device = HostDevice

    def __init__(self, stages):
        tier = stages.gpu_tier
        self.gpu, self.cpu = [tier._pages.buffer], [tier.cpu_pages.buffer]


class CudaPools:
    pins = True

    @classmethod
    def device(cls):
        return CudaDevice(runtime=FakeCuda(3, pins=cls.pins))

    def __init__(self, stages):
        pages = stages.gpu_tier._pages
        self.gpu = [t.view(torch.uint8).numpy() for t in (pages._k, pages._v, *pages._scales)]
        self.cpu = [stages.gpu_tier.cpu_pages.buffer]


class PageablePools(CudaPools):
    """Pages of the CPU tier that a kernel of the card cannot reach."""

    pins = False


@pytest.fixture
def kernels(monkeypatch):
    for module in (fused_decoder, layer_stages, cuda_rows, cuda_tier, cpu_blocks):
        monkeypatch.setattr(module, "gpu_kernels", torch_kernels)


def fill(arrays, blocks):
    """Poison everywhere, and bytes to recognise in ``blocks``."""
    draw = np.random.default_rng(5)
    for a in arrays:
        a[:] = POISON
        for b in blocks:
            a[:, b] = draw.integers(0, 256, a[:, b].shape, np.uint8)


def copies(arrays, blocks):
    return [a[:, blocks].copy() for a in arrays]


def check_moves(pools_of, dtypes, tokens):
    device = pools_of.device()
    try:
        config = EngineConfig(
            BLOCKS, BLOCKS, PAGE, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=48
        )  # a chunk has room for 3 pages on the card: the longest move comes in parts
        stages = TorchStages(scaled(dtype=dtypes[0]), device, config, dtypes[1])
        pools = pools_of(stages)
        pages = -(-tokens // PAGE)
        fill(pools.gpu, GPU_BLOCKS[:pages])
        fill(pools.cpu, [])
        want = copies(pools.gpu, GPU_BLOCKS[:pages])
        request = SimpleNamespace(request_id="r7", pages=SimpleNamespace(arriving=CPU_BLOCKS))
        down = stages.move(request, GPU_TIER, GPU_BLOCKS, tokens)
        request.pages.arriving = ELSEWHERE
        up = stages.move(request, CPU_TIER, CPU_BLOCKS, tokens)
        assert (down.lane, up.lane) == (D2H, H2D) and down.requests == ("r7",)
        assert down.work.num_bytes == up.work.num_bytes > 0 and down.work.kind == "copy"
        device.submit(up, (device.submit(down),)).wait(60 * 10**9)
        for got, expected in zip(copies(pools.gpu, ELSEWHERE[:pages]), want, strict=True):
            np.testing.assert_array_equal(got, expected)
        for got, expected in zip(copies(pools.gpu, GPU_BLOCKS[:pages]), want, strict=True):
            np.testing.assert_array_equal(got, expected)  # a move only reads its source
        for arrays, used in ((pools.gpu, GPU_BLOCKS[:pages] + ELSEWHERE[:pages]), (pools.cpu, CPU_BLOCKS[:pages])):
            others = sorted(set(range(BLOCKS)) - set(used))
            assert all((a[:, others] == POISON).all() for a in arrays)
    finally:
        device.close()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtypes", HOST, ids="-".join)
def test_on_the_host_there_and_back_is_bit_equal(dtypes, tokens):
    check_moves(HostPools, dtypes, tokens)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtypes", CUDA, ids="-".join)
def test_on_a_card_there_and_back_is_bit_equal(kernels, dtypes, tokens):
    check_moves(CudaPools, dtypes, tokens)


@pytest.mark.parametrize("tokens", [33, 97])
@pytest.mark.parametrize("dtypes", CUDA[:2], ids="-".join)
@pytest.mark.filterwarnings("ignore:.*could not be pinned")
def test_without_pinned_pages_copies_do_the_same(kernels, dtypes, tokens):
    check_moves(PageablePools, dtypes, tokens)


def test_a_move_is_one_launch_however_many_pages_and_layers(kernels, monkeypatch):
    """Else the driver pays for each page of each layer, and the step waits for it."""
    calls = []
    for name in ("copy_down", "copy_up"):
        monkeypatch.setattr(torch_kernels, name, lambda *a, name=name, **k: calls.append((name, a[2].tolist())))
    device = CudaPools.device()
    try:
        config = EngineConfig(BLOCKS, BLOCKS, PAGE, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=48)
        tier = TorchStages(scaled(), device, config, "fp32").gpu_tier
        calls.clear()  # those of the warm-up
        monkeypatch.setattr(torch.Tensor, "copy_", lambda *a, **k: pytest.fail("a page was copied on its own"))
        for source in (GPU_TIER, CPU_TIER):
            tier.move(source, np.array(GPU_BLOCKS), np.array(CPU_BLOCKS))()
        assert calls == [("copy_down", GPU_BLOCKS), ("copy_up", GPU_BLOCKS)]
    finally:
        device.close()


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "fp8"])
def test_what_a_card_sends_down_is_what_the_cpus_kernels_read(kernels, kv_dtype):
    """The same rows written on the card and moved, against the CPU's own append: equal for whoever gathers them."""
    device = CudaDevice(runtime=FakeCuda(4))
    try:
        model = scaled()
        shape = model.config.shape
        config = EngineConfig(BLOCKS, BLOCKS, PAGE, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=48)
        stages = TorchStages(model, device, config, kv_dtype)
        tier = stages.gpu_tier
        theirs = KVPages(BLOCKS, shape.num_kv_heads, shape.head_dim, PAGE, kv_dtype, num_layers=shape.num_layers)
        k, v = (torch.randn(33, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        at = np.arange(33)
        on_gpu, on_cpu = (np.array(b)[at // PAGE] * PAGE + at % PAGE for b in (GPU_BLOCKS, CPU_BLOCKS))
        for layer in range(shape.num_layers):
            torch_kernels.append_kv(
                k + layer, v, *tier._pages.cache(layer), torch.from_numpy(on_gpu), check_ids=False,
                **tier._pages.scales(layer),
            )  # fmt: skip
            append_kv(theirs, layer, k + layer, v, on_cpu)
        request = SimpleNamespace(request_id="r0", pages=SimpleNamespace(arriving=CPU_BLOCKS))
        device.submit(stages.move(request, GPU_TIER, GPU_BLOCKS, 33)).wait(60 * 10**9)
        for layer in range(shape.num_layers):
            found = []
            for pages in (tier.cpu_pages, theirs):
                out = [torch.empty(33, shape.num_kv_heads, shape.head_dim) for _ in range(2)]
                gather_kv(pages, layer, CPU_BLOCKS, 33, *out)
                found.append(out)
            for mine, own in zip(*found, strict=True):
                torch.testing.assert_close(mine, own, rtol=0, atol=2e-2 if kv_dtype == "int8" else 0)
    finally:
        device.close()


# -- through an engine on a card -------------------------------------------------------------------------------------

JOBS = [([3, 1, 4, 1, 5], 9), ([9, 2, 7] * 17, 8), ([2, 6], 12), ([5, 3, 5, 8, 9, 7, 9] * 3, 10)]


def answers(device, model, seed=None, kv_dtype="fp32"):
    """Token ids per job, and how many moves began; with a ``seed``, requests are moved at random between steps."""
    config = EngineConfig(14, 14, 16, max_model_len=96, max_num_seqs=4, max_num_batched_tokens=24)
    draw = random.Random(seed)
    moved = 0
    try:
        policy = GpuOnly() if seed is None else AsyncOverlap()
        engine = Engine(TorchStages(model, device, config, kv_dtype), device, policy, config)
        requests = [engine.add(p, n, SamplingParams(max_tokens=n, seed=i)) for i, (p, n) in enumerate(JOBS)]
        while engine.unfinished:
            engine.step()
            for r in requests if seed is not None else ():
                if draw.random() < 0.4:
                    moved += engine.move(r.request_id, "cpu" if r.tier == "gpu" else "gpu")
        assert violations(engine.drain()) == []
        assert all(pool.num_free == pool.num_blocks for pool in engine.kv.pools.values())
        return [r.token_ids[r.num_prompt :] for r in requests], moved
    finally:
        device.close()


@pytest.fixture(scope="module")
def model():
    return scaled()


@pytest.fixture(scope="module")
def quiet(model):
    return answers(HostDevice(), model)[0]


@pytest.mark.parametrize("seed", range(6))
def test_on_a_card_tokens_hold_for_every_order_of_the_streams(kernels, model, quiet, seed):
    tokens, moved = answers(CudaDevice(runtime=FakeCuda(seed)), model, seed)
    assert tokens == quiet and moved >= 4


def test_on_a_card_a_missing_wait_is_noticed(kernels, model, quiet):
    """The mutation: with the waits of the copy streams taken out, some order of the streams must do damage."""
    for seed in range(12):
        device = CudaDevice(runtime=FakeCuda(seed), close_timeout_s=1.0)
        device.runtime.deaf = {device.stream(D2H), device.stream(H2D)}
        try:
            if answers(device, model, seed)[0] != quiet:
                return
        except (AssertionError, HybridAttnError):
            return
    pytest.fail("the waits of the copy streams can be taken out without being seen")
