"""Cases from bug reports about kernels of this kind, one test per case; the number is the case's."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_kernels import append_kv, merge_state, merge_states, paged_decode_attention, plan_decode, prefill_attention
from gpu_kernels.environment import interpreted


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pages(tokens: torch.Tensor, page_size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, heads, dim] -> a cache of pages 0, 1, ... and the block table of the one sequence."""
    count, heads, dim = tokens.shape
    num = -(-count // page_size)
    cache = torch.full((num, heads, page_size, dim), torch.nan, dtype=tokens.dtype, device=tokens.device)
    for i in range(count):
        cache[i // page_size, :, i % page_size] = tokens[i]
    return cache, torch.arange(num, dtype=torch.int32)[None]


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One query [heads, dim] over plain rows of K and V."""
    k_cache, table = pages(k)
    return tuple(x[0] for x in paged_decode_attention(q[None], k_cache, pages(v)[0], table, ints(len(k)), **options))  # type: ignore[return-value]


def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The last len(q) positions of one sequence."""
    k_cache, table = pages(k)
    return prefill_attention(q, k_cache, pages(v)[0], table, ints(0, len(q)), ints(len(k)), **options)


@pytest.mark.parametrize("lens", [[5, 0, 3], [0], [0, 0, 0]])
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, 2.0])])
def test_K01_zero_length_sequence(
    make_batch: Callable[..., Any], device: torch.device, lens: list[int], sinks: torch.Tensor | None
) -> None:
    batch = make_batch(lens, 2, 64)
    q = torch.randn(len(lens), 2, 64, device=device)
    out = torch.full_like(q, torch.nan)
    lse = torch.full((len(lens), 2), torch.nan, device=device)
    paged_decode_attention(q, *batch.tensors(), out=out, lse=lse, sinks=sinks)
    for row, length in enumerate(lens):
        if length == 0:
            assert torch.all(out[row] == 0) and torch.all(lse[row] == -torch.inf)
        else:
            tensors = (batch.k_cache, batch.v_cache, batch.block_table[row : row + 1], batch.seq_lens[row : row + 1])
            alone = paged_decode_attention(q[row : row + 1], *tensors, sinks=sinks)
            assert torch.equal(alone[0][0], out[row]) and torch.equal(alone[1][0], lse[row])


def test_K02_merging_empty_parts(device: torch.device) -> None:
    none = (torch.zeros(1, 2, 16, device=device), torch.full((1, 2), -torch.inf, device=device))
    some = (torch.randn(1, 2, 16, device=device), torch.randn(1, 2, device=device))
    out, lse = merge_state(*none, *none)
    assert torch.all(out == 0) and torch.all(lse == -torch.inf)
    for order in ((none, some), (some, none)):
        out, lse = merge_state(*order[0], *order[1])
        assert torch.equal(out, some[0]) and torch.equal(lse, some[1])
    for place in range(3):
        three = [none, none]
        three.insert(place, some)
        out, lse = merge_states([part[0] for part in three], [part[1] for part in three])
        assert torch.equal(out, some[0]) and torch.equal(lse, some[1])


@pytest.mark.parametrize("attend", [decode, prefill])
@pytest.mark.parametrize("length", [1, 16, 17])
def test_K03_scores_below_any_finite_sentinel(device: torch.device, attend: Any, length: int) -> None:
    k, v = (torch.full((length, 1, 64), value, device=device) for value in (-100.0, 1.0))
    q = torch.full((1, 64), 100.0, device=device)
    for scale, score in ((0.125, -80_000.0), (1e30 / 640_000, -1e30)):
        out, lse = attend(q if attend is decode else q[None], k, v, sm_scale=scale)
        assert torch.all(out == 1.0)
        assert torch.allclose(lse, torch.tensor(score + np.log(length), dtype=torch.float32, device=device), rtol=2e-7)


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("split_tokens", [64, 192, 640])
def test_K05_window_pushes_whole_tiles_out(
    make_batch: Callable[..., Any], device: torch.device, split_tokens: int, dim: int
) -> None:
    for length in (1, 10, 11, 12, 63, 64, 65, 74, 75, 128, 201, 600):
        batch = make_batch([length], 1, dim, 32)
        q = torch.randn(1, 2, dim, device=device)
        out, lse = paged_decode_attention(q, *batch.tensors(), window_left=10, split_tokens=split_tokens)
        truth, lse_truth = batch.decode_truth(q, window_left=10)
        assert np.allclose(out.cpu().numpy(), truth, atol=3e-6) and np.allclose(lse.cpu().numpy(), lse_truth, atol=1e-5)


@pytest.mark.slow
def test_K05_window_at_every_length(make_batch: Callable[..., Any], device: torch.device) -> None:
    batch = make_batch([600], 1, 16)
    q = torch.randn(1, 1, 16, device=device)
    for length in range(1, 601):
        batch.seq_lens[0] = length
        out, _ = paged_decode_attention(q, *batch.tensors(), window_left=10, split_tokens=128)
        assert np.allclose(out.cpu().numpy(), batch.decode_truth(q, window_left=10)[0], atol=3e-6)


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("window", [1, 2, 3, 6, 7])
def test_K06_window_is_exact_to_the_token(device: torch.device, length: int, window: int) -> None:
    """A window of W keys is ``window_left = W - 1``: uniform attention shows which positions carry weight."""
    k, v = torch.zeros(length, 1, 16, device=device), torch.zeros(length, 1, 16, device=device)
    v[:, 0, :length] = torch.eye(length, device=device)
    want = torch.zeros(length, 16, device=device)
    for position in range(length):
        allowed = range(max(0, position - window + 1), position + 1)
        want[position, list(allowed)] = 1 / len(allowed)
    out, _ = decode(torch.zeros(1, 16, device=device), k, v, window_left=window - 1)
    assert torch.allclose(out[0], want[-1], atol=1e-6)
    out, _ = prefill(torch.zeros(length, 1, 16, device=device), k, v, window_left=window - 1)
    assert torch.allclose(out[:, 0], want, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 4), (24, 4), (40, 8), (12, 2), (64, 4), (9, 3), (15, 1), (71, 1)])
def test_K08_odd_groups(
    make_batch: Callable[..., Any], device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int
) -> None:
    batch = make_batch([257], kv_heads, 128, 64, dtype)
    compute = torch.float32 if dtype is torch.int8 else dtype
    q = torch.randn(1, heads, 128, device=device).to(compute)
    out, _ = paged_decode_attention(q, *batch.tensors(), **batch.scales)
    bound = 1e-5 if compute is torch.float32 else 2e-2
    assert np.abs(out.double().cpu().numpy() - batch.decode_truth(q)[0]).max() < bound


@pytest.mark.gpu
def test_K10_group_7_in_bf16(make_batch: Callable[..., Any], device: torch.device) -> None:
    batch = make_batch([256], 4, 128, 16, torch.bfloat16)
    q = torch.randn(1, 28, 128, device=device).to(torch.bfloat16)
    tensors = (batch.k_cache, batch.v_cache, batch.block_table)
    for out in (
        paged_decode_attention(q, *batch.tensors())[0],
        prefill_attention(q, *tensors, ints(0, 1), batch.seq_lens)[0],
    ):
        got, truth = out.double().cpu().numpy().ravel(), batch.decode_truth(q)[0].ravel()
        assert np.abs(got - truth).max() < 1e-2
        assert got @ truth / np.linalg.norm(got) / np.linalg.norm(truth) > 0.9999


@pytest.mark.parametrize("dim", [8, 40, 72, 100, 272, 512])
def test_K11_other_head_dims_are_refused_at_plan_time(device: torch.device, dim: int) -> None:
    cache = torch.zeros(1, 1, 16, dim, device=device)
    with pytest.raises(ValueError, match=f"head_dim: {dim} is not supported; use a multiple of 16 from 16 to 256"):
        plan_decode(cache, cache, ints(0)[None], ints(1), 1)


@pytest.mark.parametrize("attend", [decode, prefill])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 160, 192, 256])
def test_K11_every_dim_counts(device: torch.device, attend: Any, dim: int) -> None:
    """All of the signal is in the last dims: truncated keys or values would show."""
    k, v = torch.zeros(20, 1, dim, device=device), torch.zeros(20, 1, dim, device=device)
    k[7, 0, dim - 1], v[7, 0, dim - 2 :] = 1.0, 5.0
    q = torch.zeros(1, dim, device=device)
    q[0, dim - 1] = 100.0
    out, _ = attend(q if attend is decode else q[None], k, v, sm_scale=1.0)
    assert torch.allclose(out.flatten()[-2:], torch.full((2,), 5.0, device=device))
    assert torch.all(out.flatten()[:-2] == 0)


def test_K11_value_dim_must_equal_key_dim(device: torch.device) -> None:
    with pytest.raises(ValueError, match="v_cache: head_dim 32 is not k_cache's 64"):
        k, v = torch.zeros(1, 1, 16, 64, device=device), torch.zeros(1, 1, 16, 32, device=device)
        plan_decode(k, v, ints(0)[None], ints(1), 1)


def test_K14_block_table_too_short(device: torch.device) -> None:
    cache = torch.zeros(4, 1, 16, 32, device=device)
    message = "block_table: sequence 0 has length 33 and needs 3 pages of 16, the table's 2 columns hold 32"
    with pytest.raises(ValueError, match=message):
        plan_decode(cache, cache, ints(0, 1)[None], ints(33), 1)
    row = torch.zeros(1, 1, 32, device=device)
    with pytest.raises(ValueError, match="slot_mapping: row 0 names slot 32; slots go from 0 to 31"):
        append_kv(row, row, cache[:2], cache[:2].clone(), torch.tensor([32], device=device))


@pytest.mark.parametrize("padding", [-1, 2**31 - 1])
def test_K15_padding_is_never_read_and_bad_ids_are_refused(device: torch.device, padding: int) -> None:
    cache = torch.ones(4, 1, 16, 32, device=device)
    q = torch.ones(1, 1, 32, device=device)
    out, _ = paged_decode_attention(q, cache, cache, ints(3, padding, padding)[None], ints(16))
    assert torch.all(out == 1)
    for bad in (4, -1):
        with pytest.raises(ValueError, match=f"block_table: sequence 0, column 0 names page {bad}, there are 4 pages"):
            paged_decode_attention(q, cache, cache, ints(bad, padding)[None], ints(16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_K16_offsets_above_two_to_the_31(device: torch.device, dtype: torch.dtype) -> None:
    """Page 131,072 of 16,384 elements begins at element 2**31. Only three pages are touched, so memory stays small."""
    heads, size, dim, far = 8, 16, 128, 131_072
    shape = (far + 2, heads, size, dim)
    caches = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
    scales = {}
    if dtype is torch.int8:
        scales = {name: torch.empty(shape[:3], device=device) for name in ("k_scale", "v_scale")}
    k, v = (torch.randn(3 * size, heads, dim, device=device).half() for _ in range(2))
    places = torch.tensor([0, far - 1, far + 1], device=device)
    for page in places.tolist():  # the same tokens at each place
        slots = page * size + torch.arange(size, device=device)
        append_kv(k[:size], v[:size], *caches, slots, **scales)
    q = torch.randn(1, heads, dim, device=device).half()
    table, lens = places.int().cpu()[:, None], ints(16, 16, 16)
    out, _ = paged_decode_attention(q.expand(3, -1, -1), *caches, table, lens, **scales)
    assert torch.equal(out[1], out[0]) and torch.equal(out[2], out[0]) and torch.all(out[0].abs().sum(-1) > 0)
    starts, three = ints(0, 1, 2, 3), q.expand(3, -1, -1)
    out, _ = prefill_attention(three, *caches, table, starts, lens, **scales)
    assert torch.equal(out[1], out[0]) and torch.equal(out[2], out[0]) and torch.all(out[0].abs().sum(-1) > 0)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 300])
def test_K18_the_split_size_hardly_matters(make_batch: Callable[..., Any], device: torch.device, length: int) -> None:
    batch = make_batch([length], 1, 32)
    q = torch.randn(1, 2, 32, device=device)
    whole, whole_lse = paged_decode_attention(q, *batch.tensors(), split_tokens=512)
    for split in (64, 128, 320):
        out, lse = paged_decode_attention(q, *batch.tensors(), split_tokens=split)
        again, lse_again = paged_decode_attention(q, *batch.tensors(), split_tokens=split)
        assert torch.allclose(out, whole, atol=2e-6) and torch.allclose(lse, whole_lse, atol=1e-5)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


def test_K20_batch_invariance(make_batch: Callable[..., Any], device: torch.device) -> None:
    lens = [i + 1 for i in range(31)] + [200]
    batch = make_batch(lens, 1, 16)
    q = torch.randn(32, 2, 16, device=device)
    first, _ = paged_decode_attention(q, *batch.tensors(), split_tokens=64)
    again, _ = paged_decode_attention(q, *batch.tensors(), split_tokens=64)
    assert torch.equal(first, again)
    caches = (batch.k_cache, batch.v_cache)
    alone, _ = paged_decode_attention(q[:1], *caches, batch.block_table[:1], batch.seq_lens[:1], split_tokens=64)
    assert torch.equal(alone[0], first[0])  # one sequence without splits is also equal to one beside split ones
    turned, _ = paged_decode_attention(
        q.flip(0), *caches, batch.block_table.flip(0), batch.seq_lens.flip(0), split_tokens=64
    )
    assert torch.equal(turned.flip(0), first)


@pytest.mark.parametrize("attend", [decode, prefill])
@pytest.mark.parametrize("size", [60.0, 300.0])
def test_K22_fp16_products_do_not_overflow(device: torch.device, attend: Any, size: float) -> None:
    k, v = (torch.full((20, 1, 128), value, dtype=torch.float16, device=device) for value in (size, 1.0))
    q = torch.full((1, 128), size, dtype=torch.float16, device=device)
    out, lse = attend(q if attend is decode else q[None], k, v)
    assert torch.all(out == 1.0) and torch.isfinite(lse).all()


@pytest.mark.gpu
def test_K23_bf16_conversion_rounds_to_nearest_even(device: torch.device) -> None:
    """append_kv is where float32 becomes bf16."""
    values = torch.tensor([3.14, 0.26914088, 1.00390625, 1.01171875], device=device)
    rows = values.repeat(4).view(1, 1, 16)
    caches = [torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16, device=device) for _ in range(2)]
    append_kv(rows, rows, *caches, torch.tensor([0], device=device))
    assert caches[0][0, 0, 0, :4].tolist() == [3.140625, 0.26953125, 1.0, 1.015625]
    assert torch.equal(caches[0][0, 0, 0], rows[0, 0].to(torch.bfloat16))


@pytest.mark.parametrize("attend", [decode, prefill])
def test_K24_a_masked_key_weighs_exactly_nothing(device: torch.device, attend: Any) -> None:
    k, v = torch.zeros(4, 1, 16, device=device), torch.ones(4, 1, 16, device=device)
    v[0] = 1000.0
    q = torch.zeros(1, 16, device=device)
    out, _ = attend(q if attend is decode else q[None], k, v, window_left=2)
    assert torch.all(out == 1.0)


@pytest.mark.parametrize("attend", [decode, prefill])
@pytest.mark.parametrize("store", [torch.float32, torch.int8])
@pytest.mark.parametrize("options", [{"logits_soft_cap": 1.0}, {"window_left": 3}])
def test_K26_cap_and_window_are_applied_on_every_path(
    make_batch: Callable[..., Any], device: torch.device, attend: Any, store: torch.dtype, options: dict[str, Any]
) -> None:
    batch = make_batch([150], 1, 32, 16, store)
    q = torch.randn(1, 2, 32, device=device) * 6
    truth, other = batch.decode_truth(q, **options)[0], batch.decode_truth(q)[0]
    assert np.vdot(truth, other) / np.linalg.norm(truth) / np.linalg.norm(other) < 0.7  # they differ strongly
    if attend is decode:
        results = [
            paged_decode_attention(q, *batch.tensors(), **batch.scales, **options, split_tokens=s)[0] for s in (64, 512)
        ]
    else:
        tensors = (batch.k_cache, batch.v_cache, batch.block_table)
        results = [prefill_attention(q, *tensors, ints(0, 1), batch.seq_lens, **batch.scales, **options)[0]]
    for out in results:
        assert np.allclose(out.cpu().numpy(), truth, rtol=1e-4, atol=1e-5)


def test_K27_int8_scale_has_no_floor(device: torch.device) -> None:
    row = torch.zeros(1, 1, 16, device=device)
    row[0, 0, :3] = torch.tensor([0.5, -0.25, 0.1])
    caches = [torch.zeros(1, 1, 16, 16, dtype=torch.int8, device=device) for _ in range(2)]
    scales = [torch.zeros(1, 1, 16, device=device) for _ in range(2)]
    append_kv(row, row * 1e-6, *caches, torch.tensor([3], device=device), k_scale=scales[0], v_scale=scales[1])
    codes = caches[0][0, 0, 3, :3].tolist()
    assert codes[0] == 127 and codes[1] in (-64, -63) and codes[2] == 25
    assert scales[0][0, 0, 3].item() == pytest.approx(0.5 / 127, rel=1e-7)
    for cache, scale, rows in ((caches[0], scales[0], row), (caches[1], scales[1], row * 1e-6)):
        error = (cache[0, 0, 3].float() * scale[0, 0, 3] - rows[0, 0]).abs()
        assert torch.all(error <= scale[0, 0, 3] * 0.50001)


@pytest.mark.parametrize("attend", [decode, prefill])
def test_K29_k_and_v_scales_are_not_swapped(make_batch: Callable[..., Any], device: torch.device, attend: Any) -> None:
    batch = make_batch([70], 2, 32, 16, torch.int8)
    batch.scales["k_scale"] *= 0.5  # they differ per head and token, and by a factor
    batch.scales["v_scale"] *= 2.0
    q = torch.randn(1, 4, 32, device=device)
    truth = batch.decode_truth(q)[0]
    if attend is decode:
        out, _ = paged_decode_attention(q, *batch.tensors(), **batch.scales)
    else:
        tensors = (batch.k_cache, batch.v_cache, batch.block_table)
        out, _ = prefill_attention(q, *tensors, ints(0, 1), batch.seq_lens, **batch.scales)
    assert np.allclose(out.cpu().numpy(), truth, rtol=1e-5, atol=1e-5)


def test_K31_last_slot_last_head_last_page(device: torch.device) -> None:
    rows = torch.randn(1, 3, 32, device=device)
    caches = [torch.zeros(5, 3, 16, 32, dtype=torch.int8, device=device) for _ in range(2)]
    scales = [torch.zeros(5, 3, 16, device=device) for _ in range(2)]
    append_kv(rows, -rows, *caches, torch.tensor([79], device=device), k_scale=scales[0], v_scale=scales[1])
    assert torch.equal(caches[0][4, :, 15], -caches[1][4, :, 15]) and torch.equal(scales[0], scales[1])
    assert torch.allclose(caches[0][4, :, 15] * scales[0][4, :, 15, None], rows[0], atol=0.02)
    for cache, scale in zip(caches, scales, strict=True):
        cache[4, :, 15], scale[4, :, 15] = 0, 0
        assert not cache.any() and not scale.any()


def test_K33_tokens_are_written(device: torch.device) -> None:
    rows = torch.randn(6, 2, 32, device=device)
    caches = [torch.zeros(1, 2, 16, 32, device=device) for _ in range(2)]
    append_kv(rows[:5], -rows[:5], *caches, torch.arange(5, device=device))
    append_kv(rows[5:], -rows[5:], *caches, torch.tensor([5], device=device))
    for cache, want in zip(caches, (rows, -rows), strict=True):
        assert torch.equal(cache[0, :, :6].transpose(0, 1), want) and torch.all(cache[0, :, :6] != 0)


def test_K34_float32_is_not_computed_in_tf32(device: torch.device) -> None:
    """Products of 12-bit numbers: exact in float32, off by about 1e-3 where the operands lose 13 bits."""
    length, dim = 8, 16
    k = (1 + torch.arange(length * dim, device=device).view(length, 1, dim) / 2**11).float()
    v = k.clone()
    q = torch.full((1, dim), 1 + 2.0**-11, device=device)
    out, _ = decode(q, k, v)
    score = (q.double() @ k[:, 0].double().T) * dim**-0.5
    truth = torch.softmax(score, -1) @ v[:, 0].double()
    assert torch.allclose(out.double(), truth, rtol=3e-7, atol=0)


SMALL = """
import sys, torch
import gpu_kernels as g
device = torch.device(sys.argv[1])
draw = torch.Generator().manual_seed(0)
def make(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=draw).to(dtype).to(device)
def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)
results = {}
for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
    k, v, q = make(8, 2, 16, 64, dtype=dtype), make(8, 2, 16, 64, dtype=dtype), make(2, 6, 64, dtype=dtype)
    table, lens = ints(0, 1, 2, 3, 4, 5, 6, 7).view(2, 4), ints(64, 50)
    results[name + " decode"] = g.paged_decode_attention(q, k, v, table, lens, logits_soft_cap=3.0)
    results[name + " prefill"] = g.prefill_attention(q, k, v, table, ints(0, 1, 2), lens, window_left=20)
    results[name + " merge"] = g.merge_state(q, make(2, 6), -q, make(2, 6))
    results[name + " norm"] = (g.rms_norm(q.view(2, 384), make(384, dtype=dtype), 1e-5),)
    results[name + " silu"] = (g.silu_mul(q.view(2, 384)),)
    at = torch.tensor([3, 5], device=device)
    results[name + " rope"] = (g.rope(q.clone(), make(8, 32), make(8, 32), at),)
    codes = [torch.zeros(1, 2, 16, 64, dtype=torch.int8, device=device) for _ in range(2)]
    scales = [torch.zeros(1, 2, 16, device=device) for _ in range(2)]
    g.append_kv(k[0].transpose(0, 1), v[0].transpose(0, 1), *codes, torch.arange(16, device=device),
                k_scale=scales[0], v_scale=scales[1])
    results[name + " append"] = (*codes, *scales)
    results[name + " pack"] = (g.pack_for_cpu(k, v, torch.tensor([7, 0], device=device)),)
torch.save({key: [x.cpu() for x in value] for key, value in results.items()}, sys.argv[2])
"""


@pytest.mark.gpu
def test_K35_interpreted_equals_compiled(tmp_path: Path) -> None:
    """Every kernel, the same small inputs, both modes."""
    saved = []
    for interpret, device in (("1", "cpu"), ("0", "cuda")):
        target = tmp_path / f"{device}.pt"
        environment = os.environ | {"TRITON_INTERPRET": interpret, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", SMALL, device, str(target)]
        subprocess.run(command, check=True, timeout=300, env=environment)
        saved.append(torch.load(target))
    for key, pairs in {key: list(zip(*(s[key] for s in saved), strict=True)) for key in saved[0]}.items():
        for a, b in pairs:
            unit = torch.finfo(torch.float32 if key.startswith("fp32") else torch.float16).eps
            exact = not a.is_floating_point()  # packed bytes are equal; an int8 code at a tie may differ by one
            bound = (1 if "append" in key else 0) if exact else 8 * unit * (1 + float(a.double().abs().max()))
            assert float((a.double() - b.double()).abs().max()) <= bound, key


def test_K35_the_small_run_covers_every_kernel(tmp_path: Path) -> None:
    """The program that the GPU test runs twice is kept working here, interpreted."""
    if not interpreted():
        pytest.skip("runs in both modes in the test above")
    target = tmp_path / "cpu.pt"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "error", "-c", SMALL, "cpu", str(target)]
    subprocess.run(command, check=True, timeout=300, env=environment)
    saved = torch.load(target)
    assert {key.split()[1] for key in saved} == {"decode", "prefill", "merge", "norm", "silu", "rope", "append", "pack"}
    assert all(torch.isfinite(x.float()).all() for value in saved.values() for x in value if x.dtype is not torch.uint8)
