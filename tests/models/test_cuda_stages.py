"""The stages of a CUDA card on a fake runtime, with plain torch in place of the Triton launchers.

The streams of the fake run late and in an order that a seed chooses, so a missing wait or an early reuse shows as a
wrong token, as an error, or as a trace that breaks its invariants.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch_kernels
from fake_cuda import FakeCuda
from hypothesis import given, settings
from hypothesis import strategies as st
from scaled_model import scaled

from cpu_kernels import KVPages, append_kv, gather_kv
from hybridattn import LLM
from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import HybridAttnError, InputError
from hybridattn.core.op import D2H, GPU, H2D
from hybridattn.core.page_table import PageTable
from hybridattn.core.params import SamplingParams
from hybridattn.core.trace import violations
from hybridattn.devices.cuda import CudaDevice
from hybridattn.devices.host import HostDevice
from hybridattn.engine.engine import Engine
from hybridattn.kv import cpu_blocks
from hybridattn.kv.cpu_blocks import Blocks, Run, runs_of
from hybridattn.kv.cuda_pages import CudaPages
from hybridattn.models import cuda_rows, cuda_tier, fused_decoder, layer_stages
from hybridattn.models.decoder import Decoder
from hybridattn.models.fused_decoder import FusedDecoder
from hybridattn.models.layer_stages import buckets_for
from hybridattn.models.load import load
from hybridattn.models.torch_stages import TorchStages
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly, SyncOffload
from hybridattn.policies.split import Split

LIMITS = {"page_size": 16, "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 24}
CONFIG = EngineConfig(gpu_kv_blocks=8, cpu_kv_blocks=8, **LIMITS)
# one prompt shorter than a page, one chunked with chunks that begin inside a page, one that crosses a page, one of two
JOBS = [([3, 1, 4, 1, 5], 9), ([9, 2, 7] * 17, 6), ([2, 6], 12), ([5, 3, 5, 8, 9, 7, 9] * 3, 10)]
POLICIES = {
    "gpu_only": GpuOnly,
    "sync_offload": lambda: SyncOffload(0.5),
    "all_on_cpu": lambda: SyncOffload(1.0),
    "async_overlap": lambda: AsyncOverlap(0.5, max_micro_batches=2),
    "async_all_on_cpu": lambda: AsyncOverlap(1.0),
    "split": lambda: Split(cold_share=0.6, even_if_it_fits=True),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    for module in (fused_decoder, layer_stages, cuda_rows, cuda_tier, cpu_blocks):
        monkeypatch.setattr(module, "gpu_kernels", torch_kernels)


@pytest.fixture(scope="module")
def model():
    return scaled()


def answers(device, model, policy, config=CONFIG, kv_dtype="fp32", jobs=JOBS, **params):
    """Token ids per job; trace, blocks and memory are checked on the way."""
    try:
        engine = Engine(TorchStages(model, device, config, kv_dtype), device, policy, config)
        requests = [
            engine.add(prompt, n, SamplingParams(max_tokens=n, seed=i, **params)) for i, (prompt, n) in enumerate(jobs)
        ]
        engine.run()
        assert violations(engine.drain()) == []
        assert all(pool.num_free == pool.num_blocks for pool in engine.kv.pools.values())
        return [r.token_ids[r.num_prompt :] for r in requests], engine
    finally:
        device.close()


@pytest.fixture(scope="module")
def quiet(model):
    tokens, _ = answers(HostDevice(), model, GpuOnly())
    assert len({t for row in tokens for t in row}) > 12  # a model that repeats itself would show nothing
    return tokens


# -- the central promise ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("record", [True, False], ids=["layers", "runs"])
def test_tokens_equal_the_hosts(model, quiet, policy, graphs, record):
    """Without a record, layers at which nothing is decided go in one op, and with graphs in one replay."""
    device = CudaDevice(runtime=FakeCuda(1), graphs=graphs, record=record)
    assert answers(device, model, POLICIES[policy]())[0] == quiet


@given(
    seed=st.integers(0, 10**6), graphs=st.booleans(), temperature=st.sampled_from([0.0, 0.8]),
    stops=st.lists(st.integers(0, 8), min_size=4, max_size=4), gone=st.tuples(st.integers(0, 3), st.integers(1, 12)),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_a_step_that_is_planned_before_the_tokens_are_known_changes_none(model, seed, graphs, temperature, stops, gone):
    """Requests that end by a token nobody foresaw, or are aborted, while the next step runs with a row of theirs: the
    row's token goes to nobody, and a request that comes later gets its pages."""
    params = [SamplingParams(max_tokens=n, seed=i, temperature=temperature) for i, (_, n) in enumerate(JOBS)]
    with pytest.MonkeyPatch.context() as patch:
        want = run_with_ends(HostDevice(), model, params, None, (0, 99))[0]
        for module in (fused_decoder, layer_stages, cuda_rows, cuda_tier, cpu_blocks):
            patch.setattr(module, "gpu_kernels", torch_kernels)
        params = [replace(p, stop_token_ids=(w[min(k, len(w) - 1)],)) for p, w, k in zip(params, want, stops)]  # noqa: B905
        device = CudaDevice(runtime=FakeCuda(seed), graphs=graphs, record=False)
        found, ahead = run_with_ends(device, model, params, JOBS[0], gone)
    assert ahead > 3 or min(stops) < 5 or gone[1] < 8
    for i, (tokens, (prompt, _)) in enumerate(zip([*want, want[0]], [*JOBS, JOBS[0]], strict=True)):
        stop = params[i % 4].stop_token_ids[0]
        until = tokens[: tokens.index(stop) + 1]
        assert found[i] == until if i != gone[0] else found[i] == until[: len(found[i])], prompt


def run_with_ends(device, model, params, late, gone):
    """Tokens of the jobs, and of one like ``late`` that comes when all but one have ended; request ``gone[0]`` is
    aborted in step ``gone[1]``. How many steps were planned before the tokens of the one before were known."""
    try:
        engine = Engine(TorchStages(model, device, CONFIG, "fp32"), device, GpuOnly(), CONFIG)
        requests = [engine.add(prompt, n, p) for (prompt, n), p in zip(JOBS, params, strict=True)]
        steps = ahead = 0
        while engine.unfinished:
            engine.step()
            steps, ahead = steps + 1, ahead + (engine.executor.under_way is not None)
            if steps == gone[1]:
                engine.abort(requests[gone[0]].request_id)
            if late is not None and engine.unfinished <= 1:
                requests.append(engine.add(late[0], late[1], params[0]))
                late = None
        assert all(pool.num_free == pool.num_blocks for pool in engine.kv.pools.values())
        return [r.token_ids[r.num_prompt :] for r in requests], ahead
    finally:
        device.close()


def test_rows_that_no_bucket_holds_go_stage_by_stage(model, quiet, monkeypatch):
    """GPU rows on fixed memory, and beside micro-batches too many for a graph."""
    monkeypatch.setattr(layer_stages.LayerStages, "joined", lambda *args: None)
    assert answers(CudaDevice(runtime=FakeCuda(1)), model, POLICIES["async_overlap"]())[0] == quiet
    monkeypatch.setattr(layer_stages.LayerStages, "bucket", lambda stages, rows: None)
    assert answers(CudaDevice(runtime=FakeCuda(1)), model, POLICIES["async_overlap"]())[0] == quiet


def test_no_logits_are_read_back(model, monkeypatch):
    """Sampled rows too: what goes down are an id and two numbers for each."""
    params = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.2, "min_tokens": 2}
    want, _ = answers(HostDevice(), model, GpuOnly(), **params)
    sizes, read_back = [], cuda_tier._read_back
    monkeypatch.setattr(cuda_tier, "_read_back", lambda t: sizes.append(tuple(t.shape)) or read_back(t))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: pytest.fail("a tensor went down on its own"))
    device = CudaDevice(runtime=FakeCuda(1))
    assert answers(device, model, AsyncOverlap(0.5, max_micro_batches=2), **params)[0] == want
    assert sizes and all(len(shape) == 1 and shape[0] <= CONFIG.max_num_seqs for shape in sizes)


@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(sorted(POLICIES)),
    handover=st.sampled_from(["bell", "stream", "poll"]),
    graphs=st.booleans(),
    record=st.booleans(),
)
@settings(max_examples=10, deadline=None)
def test_tokens_hold_for_every_order_of_the_streams(model, quiet, seed, policy, handover, graphs, record):
    with pytest.MonkeyPatch.context() as patch:
        for module in (fused_decoder, layer_stages, cuda_rows, cuda_tier, cpu_blocks):
            patch.setattr(module, "gpu_kernels", torch_kernels)
        device = CudaDevice(
            runtime=FakeCuda(seed, words=handover == "bell"), handover=handover, graphs=graphs, record=record
        )
        assert answers(device, model, POLICIES[policy]())[0] == quiet


@pytest.mark.parametrize("policy", ["sync_offload", "split"])
def test_a_wait_is_the_streams_where_it_can_be(model, quiet, monkeypatch, policy):
    """Blocking offload and cold parts on a card with words: the driver waits for no attention, and the tokens are the
    same."""
    for seed in range(4):
        device = CudaDevice(runtime=FakeCuda(seed, words=True))
        asked, waits_for = [], device.waits_for
        monkeypatch.setattr(device, "waits_for", lambda f, t, w=waits_for, a=asked: a.append(w(f, t)) or a[-1])
        assert answers(device, model, POLICIES[policy]())[0] == quiet
        assert len(asked) > 20 and all(asked)


@pytest.mark.parametrize("policy", ["sync_offload", "async_all_on_cpu"])
def test_without_waits_the_same_check_fires(model, quiet, policy):
    """The mutation: every seed below must end in a wrong token, an error, or a trace that breaks its invariants."""
    for seed in range(3):
        device = CudaDevice(runtime=FakeCuda(seed, forget=("waits",)), close_timeout_s=1.0)
        with pytest.raises((AssertionError, HybridAttnError)):
            assert answers(device, model, POLICIES[policy]())[0] == quiet


@pytest.mark.parametrize("lane", [GPU, D2H, H2D, "handover"])
def test_the_waits_of_every_stream_are_needed(model, quiet, lane):
    """With the waits of one stream alone taken out, some order of the streams must do damage."""
    for seed in range(12):
        device = CudaDevice(runtime=FakeCuda(seed), close_timeout_s=1.0)
        device.runtime.deaf = {device._cpu.stream if lane == "handover" else device.stream(lane)}
        try:
            if answers(device, model, POLICIES["async_all_on_cpu"]())[0] != quiet:
                return
        except (AssertionError, HybridAttnError):
            return
    pytest.fail(f"the waits of {lane} can be taken out without being seen")


def test_tokens_survive_forced_preemption(model):
    jobs = [([i + 2, 7, i] * 4 + [9], 10) for i in range(4)]  # each crosses into its second page while decoding
    want, _ = answers(HostDevice(), model, GpuOnly(), jobs=jobs)
    config = EngineConfig(gpu_kv_blocks=5, cpu_kv_blocks=3, **LIMITS)
    for policy in ("gpu_only", "all_on_cpu"):
        device = CudaDevice(runtime=FakeCuda(5))
        tokens, engine = answers(device, model, POLICIES[policy](), config, jobs=jobs)
        assert tokens == want
        assert sum(r.preemptions for r in engine.take_records().requests) > 0


@pytest.mark.parametrize("windows", [(None, 7, 19), (9, 7, 19)], ids=["some layers", "all layers"])
def test_a_sliding_window_reaches_both_tiers(windows, monkeypatch):
    """Where all layers have one, pages that the widest has left behind are given back; on the host none are, here."""
    model = scaled(replace(load("dummy:tiny").config, layer_windows=windows))
    given_back = []
    leave_behind = PageTable.leave_behind
    monkeypatch.setattr(PageTable, "leave_behind", lambda t, n: given_back.append(n) or leave_behind(t, n))
    with monkeypatch.context() as patch:
        patch.setattr(type(model.config), "widest_window", None)
        want, _ = answers(HostDevice(), model, GpuOnly())
    assert given_back == []
    for policy in ("gpu_only", "async_overlap", "split"):
        assert answers(CudaDevice(runtime=FakeCuda(7)), model, POLICIES[policy]())[0] == want
    assert bool(given_back) == all(windows)


def test_sampled_rows_get_the_hosts_draws(model):
    drawn = {"temperature": 1.3, "top_k": 40}
    want, _ = answers(HostDevice(), model, GpuOnly(), **drawn)
    assert answers(CudaDevice(runtime=FakeCuda(8)), model, POLICIES["async_overlap"](), **drawn)[0] == want


def test_int8_pages_go_down_and_up_with_their_scales(model):
    """A chunked prompt of the CPU tier passes its pages down, up again and down once more without a change."""
    for policy in ("gpu_only", "all_on_cpu"):
        tokens, _ = answers(CudaDevice(runtime=FakeCuda(9)), model, POLICIES[policy](), kv_dtype="int8")
        assert [len(t) for t in tokens] == [n for _, n in JOBS]
        if policy == "gpu_only":
            want = tokens
    same = sum(a == b for x, y in zip(tokens, want, strict=True) for a, b in zip(x, y, strict=True))
    assert same >= 0.8 * sum(n for _, n in JOBS)  # both quantise alike; a near tie may fall differently


# -- pages on their way ----------------------------------------------------------------------------------------------


def test_runs_join_consecutive_pages():
    assert runs_of(np.array([4, 5, 6, 2, 3, 9])) == (Run(0, 4, 3), Run(3, 2, 2), Run(5, 9, 1))
    assert runs_of(np.array([], np.int64)) == ()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_pages_that_go_down_are_what_the_cpu_would_have_written(dtype):
    """Rows handed down through card pages against the CPU's own append, over a page's edge and from its middle."""
    shape = {"num_kv_heads": 2, "head_dim": 32, "page_size": 16}
    mine, theirs = (KVPages(6, dtype=dtype, **shape) for _ in range(2))
    scratch = CudaPages(1, 3, 2, 16, 32, dtype, "cpu")
    blocks = Blocks(mine, scratch, 3, "cpu")
    rows = [torch.randn(40, 2, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    pages = np.array([3, 4, 1])
    for start, end in ((0, 21), (21, 40)):
        k, v = (x[start:end].to(scratch.cache()[0].dtype) for x in rows)
        at = np.arange(start, end)
        append_kv(theirs, 0, k, v, pages[at // 16] * 16 + at % 16)
        first, last = start // 16, -(-end // 16)
        if start % 16:
            blocks.up(0, (Run(0, int(pages[first]), 1),), 1)
        slots = torch.from_numpy(at - first * 16)
        torch_kernels.append_kv(k, v, *scratch.cache(), slots, check_ids=False, **scratch.scales())
        blocks.down(0, runs_of(pages[first:last]), last - first)
    for pool in (mine, theirs):
        got = [torch.empty(40, 2, 32) for _ in range(2)]
        gather_kv(pool, 0, pages, 40, *got)
        for x, want in zip(got, rows, strict=True):
            torch.testing.assert_close(x, want.to(scratch.cache()[0].dtype).float(), rtol=0, atol=0)


# -- linear stages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"qkv_bias": True, "o_bias": True}, {"qk_norm": True}], ids=str)
def test_fused_stages_equal_the_plain_ones(extra):
    model = scaled(replace(load("dummy:tiny").config, **extra), factor=3.0)
    plain, fused = (cls(model.config, model.weights, 64) for cls in (Decoder, FusedDecoder))
    x, positions = torch.randn(5, 96), torch.tensor([3, 0, 63, 17, 17])
    for a, b in zip(fused.pre_attention(1, x, positions), plain.pre_attention(1, x, positions), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    out = torch.randn(5, 6, 16)
    torch.testing.assert_close(fused.post_attention(0, out, x.clone()), plain.post_attention(0, out, x))
    torch.testing.assert_close(fused.head(x), plain.head(x), rtol=1e-4, atol=1e-4)


def test_a_failed_capture_falls_back_and_says_why(model, quiet):
    def refuse(stream, runs):
        raise RuntimeError("operation not permitted when stream is capturing")

    device = CudaDevice(runtime=FakeCuda(1))
    device.runtime.capture = refuse
    with pytest.warns(RuntimeWarning, match="decode rows run without CUDA graphs: operation not permitted"):
        tokens, engine = answers(device, model, POLICIES["async_overlap"]())
    assert tokens == quiet and "capturing failed" in engine.executor.stages.gpu_tier.why_eager


@pytest.mark.parametrize(("rows", "buckets"), [(1, (4,)), (4, (4,)), (5, (4, 8)), (64, (4, 8, 16, 32, 64))])
def test_buckets_reach_the_largest_batch(rows, buckets):
    assert buckets_for(rows) == buckets


# -- opening ---------------------------------------------------------------------------------------------------------


def test_what_the_card_cannot_hold_or_compute_is_refused(model):
    small = CudaDevice(runtime=FakeCuda(), gpu_memory_bytes=model.weights.num_bytes() + 1000)
    with pytest.raises(InputError, match="a KV pool of 8 blocks of 16 tokens needs 98304 bytes of the gpu tier"):
        TorchStages(model, small, CONFIG, "fp32")
    small.close()
    device = CudaDevice(runtime=FakeCuda())
    with pytest.raises(InputError, match="kv_dtype bf16 beside weights of torch.float32"):
        TorchStages(model, device, CONFIG, "bf16")
    device.torch_device = "cuda:0"
    with pytest.raises(InputError, match="weights are on cpu, but device 'cuda' needs them on cuda:0"):
        TorchStages(model, device, CONFIG, "fp32")
    device.close()


def test_pageable_memory_works_and_warns_once(model, quiet):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokens, _ = answers(CudaDevice(runtime=FakeCuda(4, pins=False)), model, POLICIES["async_overlap"]())
    assert tokens == quiet
    assert [str(w.message)[:27] for w in caught] == ["the CPU tier's KV pool (983"]


def test_the_front_door_opens_a_card_and_its_trace_says_so(monkeypatch):
    monkeypatch.setattr("hybridattn.devices.registry.why_no_cuda", lambda: None)
    options = {"gpu_kv_blocks": 8, "cpu_kv_blocks": 8, "page_size": 16, "max_model_len": 64, "cpu_fraction": 0.5}
    with LLM("dummy:tiny", "cuda", device_options={"runtime": FakeCuda(1)}, **options) as llm:
        outputs = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=5))
        trace = llm.trace()
    with LLM("dummy:tiny", "host", **options) as llm:
        assert [o.token_ids for o in llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=5))] == [
            o.token_ids for o in outputs
        ]
    assert {o.tier for o in outputs} == {"gpu", "cpu"}
    assert (trace.device, trace.kind) == ("cuda", "emulated") and trace.clock_spread_ns > 0
    assert violations(trace.spans) == []


def test_every_pinned_byte_is_given_back(model):
    runtime = FakeCuda(4)
    answers(CudaDevice(runtime=runtime), model, POLICIES["sync_offload"]())
    assert runtime.pinned == {}
