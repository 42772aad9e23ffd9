"""Parts of a sequence, flags and windows per sequence, caches of other libraries: both packages against one oracle."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu_kernels
import gpu_kernels
from cpu_kernels.reference import decode_reference, merge_reference, prefill_reference

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 32, 16


def sequence(length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V ``[length, KV_HEADS, DIM]`` and one query."""
    draw = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(length, KV_HEADS, DIM, generator=draw) for _ in range(2))
    return k, v, torch.randn(1, HEADS, DIM, generator=draw)


def by_cpu(k: Any, v: Any, q: Any, backend: str = "native", **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    layout = cpu_kernels.backends.layout_of(backend)
    count = max(1, -(-len(k) // PAGE))
    pages = cpu_kernels.KVPages(count, KV_HEADS, DIM, PAGE, "fp32", huge_pages=False, layout=layout)
    cpu_kernels.append_kv(pages, 0, k, v, np.arange(len(k)))
    return cpu_kernels.paged_decode_attention(q, pages, [range(count)], [len(k)], backend=backend, **options)


def by_numba(k: Any, v: Any, q: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pytest.importorskip("numba", reason="numba is not installed")
    return by_cpu(k, v, q, "numba", **options)


def by_torch(k: Any, v: Any, q: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return by_cpu(k, v, q, "torch", **options)


def by_triton(k: Any, v: Any, q: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    count = max(1, -(-len(k) // PAGE))
    caches = [torch.zeros(count, KV_HEADS, PAGE, DIM) for _ in range(2)]
    gpu_kernels.append_kv(k, v, *caches, range(len(k)))
    return gpu_kernels.paged_decode_attention(q, *caches, [range(count)], [len(k)], **options)


PACKAGES = {"native": by_cpu, "numba": by_numba, "torch": by_torch, "triton": by_triton}


@pytest.mark.parametrize("package", PACKAGES)
def test_any_split_of_a_sequence_merges_to_the_whole(package: str) -> None:
    run = PACKAGES[package]
    merge = gpu_kernels.merge_states if package == "triton" else cpu_kernels.merge_states

    @settings(deadline=None, max_examples=10 if package == "triton" else 40)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        """Cold parts first, the newest last; the sink counts in the last, which has the query's own key."""
        length = data.draw(st.integers(1, 120))
        k, v, q = sequence(length, data.draw(st.integers(0, 9)))
        options: dict[str, Any] = {
            "window_left": data.draw(st.sampled_from([-1, -1, 0, 5, 40])),
            "logits_soft_cap": data.draw(st.sampled_from([0.0, 1.5])),
        }
        if data.draw(st.booleans()):
            options["alibi_slopes"] = np.linspace(0.0, 0.3, HEADS, dtype=np.float32)
        if data.draw(st.booleans()):
            options["sinks"] = np.linspace(-1, 2, HEADS, dtype=np.float32)
        edges = [0, *sorted(data.draw(st.lists(st.integers(0, length - 1), max_size=3))), length]
        outs, lses = [], []
        for a, b in zip(edges, edges[1:], strict=False):
            part = {"key_start": [a], "query_pos": [length - 1], "with_sinks": b == length}
            out, lse = run(k[a:b], v[a:b], q, **part, **options)
            if options["window_left"] >= 0 and b <= length - 1 - options["window_left"]:
                assert (out == 0).all() and torch.isneginf(lse).all()  # a part that the window has left behind
            outs.append(out)
            lses.append(lse)
        got, logs = merge(outs, lses)
        pages = [x.numpy()[None].swapaxes(1, 2) for x in (k, v)]  # one page that holds all
        want, sums = decode_reference(q.numpy(), *pages, np.zeros((1, 1), int), [length], **options)
        assert np.abs(got.numpy() - want).max() < 3e-6 and np.abs(logs.numpy() - sums).max() < 1e-5
        by_oracle = [
            decode_reference(
                q.numpy(), *[x[:, :, a:b] if b > a else x[:, :, :1] for x in pages], np.zeros((1, 1), int), [b - a],
                key_start=[a], query_pos=[length - 1], with_sinks=b == length, **options,
            )
            for a, b in zip(edges, edges[1:], strict=False)
        ]  # fmt: skip
        merged, _ = merge_reference([o for o, _ in by_oracle], [s for _, s in by_oracle])
        assert np.abs(merged - want).max() < 1e-12

    check()


PREFILLS: dict[str, dict[str, Any]] = {
    "rows before the first key": {"counts": [7, 30], "lens": [4, 20]},
    "no keys at all": {"counts": [2, 3], "lens": [0, 20]},
    "not causal": {"causal": False},
    "a flag each": {"causal": [False, True], "window_left": [6, -1]},
    "a right window": {"causal": [False, True], "window_right": [3, 0], "window_left": 9},
    "slopes and sinks each": {
        "alibi_slopes": np.linspace(0, 0.2, 2 * HEADS, dtype=np.float32).reshape(2, HEADS),
        "sinks": np.linspace(-1, 1, 2 * HEADS, dtype=np.float32).reshape(2, HEADS),
        "with_sinks": [True, False],
    },
    "a cold part": {"key_start": [0, 16], "query_pos": [30, 60], "window_left": 40},
    "a part behind the window": {"key_start": [0, 0], "query_pos": [100, 15], "window_left": 20},
}


@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize("package", ["native", "torch", "triton"])
def test_prefill_of_parts_flags_and_windows(package: str, name: str) -> None:
    options = dict(PREFILLS[name])
    counts, lens = options.pop("counts", [5, 12]), options.pop("lens", [25, 12])
    draw = torch.Generator().manual_seed(1)
    k, v = (torch.randn(6, KV_HEADS, PAGE, DIM, generator=draw) for _ in range(2))
    q, table = torch.randn(sum(counts), HEADS, DIM, generator=draw), [[4, 0], [3, 5]]
    starts = np.cumsum([0, *counts])
    if package == "triton":
        out, lse = gpu_kernels.prefill_attention(q, k, v, table, starts, lens, **options)
        again, _ = gpu_kernels.prefill_attention(q, k, v, table, None, lens, query_lens=counts, **options)
        assert torch.equal(out, again)
    else:
        pages = cpu_kernels.KVPages(6, KV_HEADS, DIM, PAGE, "fp32", huge_pages=False)
        cpu_kernels.pack(pages, 0, range(6), k, v)
        out, lse = cpu_kernels.prefill_attention(q, pages, table, starts, lens, backend=package, **options)
    for i in range(2):
        mine = {
            n: x[i] if np.ndim(x) == (2 if n in ("alibi_slopes", "sinks") else 1) else x for n, x in options.items()
        }
        rows = [x[table[i]].transpose(1, 2).flatten(0, 1)[: lens[i]].numpy() for x in (k, v)]
        want, sums = prefill_reference(q[starts[i] : starts[i + 1]].numpy(), *rows, **mine)
        np.testing.assert_allclose(out[starts[i] : starts[i + 1]].numpy(), want, atol=3e-6)
        np.testing.assert_allclose(lse[starts[i] : starts[i + 1]].numpy(), sums, atol=1e-5)


@pytest.mark.parametrize("block", [16, 48, 96, 256])
@pytest.mark.parametrize("nhd", [False, True])
def test_caches_of_other_libraries_by_their_strides(block: int, nhd: bool) -> None:
    """Blocks that are several pages long, and positions before heads, appended to and attended to."""
    length = 300
    k, v, q = sequence(length)
    blocks = -(-length // block)
    table = np.random.default_rng(0).permutation(blocks + 1)[None, :blocks]
    shape = (blocks + 1, block, KV_HEADS, DIM) if nhd else (blocks + 1, KV_HEADS, block, DIM)
    caches = [torch.full(shape, torch.nan) for _ in range(2)]
    views = [c.transpose(1, 2) if nhd else c for c in caches]
    at = np.arange(length)
    gpu_kernels.append_kv(k, v, *views, table[0, at // block] * block + at % block)
    out, lse = gpu_kernels.paged_decode_attention(q, *views, table, [length], window_left=250, split_tokens=64)
    many, _ = gpu_kernels.prefill_attention(q, *views, table, [0, 1], [length], window_left=250)
    pages = [x.numpy()[None].swapaxes(1, 2) for x in (k, v)]
    want, sums = decode_reference(q.numpy(), *pages, np.zeros((1, 1), int), [length], window_left=250)
    assert np.abs(out.numpy() - want).max() < 3e-6 and np.abs(lse.numpy() - sums).max() < 1e-5
    assert np.abs(many.numpy() - want).max() < 3e-6
    if nhd:
        return
    ratio = block // PAGE
    pool = cpu_kernels.KVPages((blocks + 1) * ratio, KV_HEADS, DIM, PAGE, "fp32", huge_pages=False)
    cpu_kernels.append_kv(pool, 0, k, v, table[0, at // block] * block + at % block)
    out, lse = cpu_kernels.paged_decode_attention(q, pool, table, [length], window_left=250, block_size=block)
    assert np.abs(out.numpy() - want).max() < 3e-6 and np.abs(lse.numpy() - sums).max() < 1e-5
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] is .* -3, but the pool has"):
        cpu_kernels.plan_decode(pool, np.full_like(table, -3), [length], HEADS, block_size=block)


def test_scales_of_long_blocks_and_what_is_refused() -> None:
    k, v, q = sequence(100)
    caches = [torch.zeros(3, KV_HEADS, 48, DIM, dtype=torch.int8) for _ in range(2)]
    scales = {name: torch.zeros(3, KV_HEADS, 48) for name in ("k_scale", "v_scale")}
    gpu_kernels.append_kv(k, v, *caches, np.arange(100), **scales)
    out, _ = gpu_kernels.paged_decode_attention(q, *caches, [[0, 1, 2]], [100], **scales)
    pages = [x.numpy()[None].swapaxes(1, 2) for x in (k, v)]
    assert np.abs(out.numpy() - decode_reference(q.numpy(), *pages, np.zeros((1, 1), int), [100])[0]).max() < 3e-2
    with pytest.raises(ValueError, match="K and V of different head dims"):
        gpu_kernels.paged_decode_attention(q, torch.zeros(1, 2, 16, 32), torch.zeros(1, 2, 16, 64), [[0]], [1])
    nhd = torch.zeros(3, 48, KV_HEADS, DIM, dtype=torch.int8).transpose(1, 2)
    with pytest.raises(ValueError, match="a cache with scales and blocks of 48 positions must be contiguous"):
        gpu_kernels.cache_shape(nhd, nhd)
    plain = torch.zeros(3, 16, KV_HEADS, DIM).transpose(1, 2)
    with pytest.raises(ValueError, match="have no CPU layout"):
        gpu_kernels.pack_for_cpu(plain, plain, [0])
    pool = cpu_kernels.KVPages(6, KV_HEADS, DIM, PAGE, "fp32", huge_pages=False)
    with pytest.raises(ValueError, match="block_size is 40, expected a multiple of the page size 16"):
        cpu_kernels.plan_decode(pool, [[0]], [3], HEADS, block_size=40)


def test_compiled_code_passes_over_the_operators() -> None:
    """``fullgraph`` fails at the first call that is no operator."""
    cpu_ops = importlib.import_module("cpu_kernels.torch_ops")
    gpu_ops = importlib.import_module("gpu_kernels.torch_ops")
    k, v, q = sequence(30)
    pool = cpu_kernels.KVPages(2, KV_HEADS, DIM, PAGE, "fp32", huge_pages=False)
    cpu_kernels.append_kv(pool, 0, k[:29], v[:29], np.arange(29))
    caches = [torch.zeros(2, KV_HEADS, PAGE, DIM) for _ in range(2)]
    table, lens, number = torch.tensor([[0, 1]]), torch.tensor([30]), cpu_ops.pool_number(pool)
    assert cpu_ops.pool_number(pool) == number

    def step(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        doubled = q * 2
        gpu_ops.append_kv(k, v, *caches, torch.arange(30))
        here = gpu_ops.paged_decode_attention(doubled, *caches, table, lens, window_left=9)
        there = cpu_ops.paged_decode_attention(doubled, number, 0, table, lens, k[29:], v[29:], window_left=9)
        a = gpu_ops.merge_state(*here, *there)
        b = cpu_ops.merge_state(*here, *there)
        return a[0] + 1, b[0] + 1

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    got, also = compiled(q)
    pages = [x.numpy()[None].swapaxes(1, 2) for x in (k, v)]
    want, _ = decode_reference(2 * q.numpy(), *pages, np.zeros((1, 1), int), [30], window_left=9)
    np.testing.assert_allclose(got.numpy() - 1, want, atol=3e-6)  # two equal parts merge to either
    np.testing.assert_allclose(also.numpy() - 1, want, atol=3e-6)
    with pytest.raises(ValueError, match="pages is 12345, a number that no living pool has"):
        cpu_ops.paged_decode_attention(q, 12345, 0, table, lens)
