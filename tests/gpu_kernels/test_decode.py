"""Paged decode attention against the float64 oracle."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu_kernels import cache_shape, paged_decode_attention, plan_decode
from gpu_kernels.checks import owners
from gpu_kernels.decode import _work

ODD = [17, 54, 97]


def query(num_seqs: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, seed: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(num_seqs, heads, dim, generator=draw).to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"),
    [
        (2, 2, 64, 16),
        (9, 3, 80, 32),
        (8, 1, 128, 16),
        (5, 1, 96, 64),
        (4, 2, 256, 128),
        (40, 1, 16, 32),
        (7, 7, 48, 16),
    ],
)
def test_matches_the_oracle(
    make_batch: Callable[..., Any], check_error: Any, plain: Any, device: torch.device, dtype: torch.dtype, heads: int,
    kv_heads: int, dim: int, page: int,
) -> None:  # fmt: skip
    lens = [*ODD, 0, 1, 130] if heads < 10 else [97, 0]  # many heads are many programs to interpret
    batch = make_batch(lens, kv_heads, dim, page, dtype)
    q = query(len(lens), heads, dim, dtype, device)
    out = torch.full_like(q, torch.nan)
    lse = torch.full((len(lens), heads), torch.nan, device=device)
    paged_decode_attention(q, *batch.tensors(), out=out, lse=lse, split_tokens=64)
    truth, lse_truth = batch.decode_truth(q)
    rows = [plain(q[i].cpu(), batch.keys(i)) if n else np.zeros(q.shape[1:]) for i, n in enumerate(lens)]
    check_error(out, truth, np.stack(rows), dtype)
    empty = lens.index(0)
    assert torch.all(out[empty] == 0) and torch.all(lse[empty] == -torch.inf)
    lse_host = lse.double().cpu().numpy()
    scores = 1e-5 if dtype is torch.float32 else 4e-3  # 16-bit products are exact in float32, their sum is not
    assert np.allclose(np.delete(lse_host, empty, 0), np.delete(lse_truth, empty, 0), rtol=0, atol=scores)


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_left": 30},
    "window_of_one": {"window_left": 0},
    "cap": {"logits_soft_cap": 0.7},
    "alibi": {"alibi_slopes": np.linspace(0.01, 0.5, 6, dtype=np.float32)},
    "sinks": {"sinks": np.linspace(-3, 3, 6, dtype=np.float32)},
    "scale": {"sm_scale": 0.5},
    "all": {
        "window_left": 70,
        "logits_soft_cap": 2.0,
        "alibi_slopes": np.linspace(0.0, 0.1, 6, dtype=np.float32),
        "sinks": np.linspace(3, -3, 6, dtype=np.float32),
        "sm_scale": 0.3,
    },
}


@pytest.mark.parametrize("split_tokens", [64, 512])
@pytest.mark.parametrize("store", [torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("feature", FEATURES)
def test_features_match_the_oracle(
    make_batch: Callable[..., Any], device: torch.device, feature: str, store: torch.dtype, split_tokens: int
) -> None:
    options = FEATURES[feature]
    lens = [3, 0, 200, 64]
    batch = make_batch(lens, 2, 32, 16, store)
    q = query(4, 6, 32, torch.float32, device)
    out, lse = paged_decode_attention(q, *batch.tensors(), **batch.scales, **options, split_tokens=split_tokens)
    truth, lse_truth = batch.decode_truth(q, **options)
    assert np.allclose(out.cpu().numpy(), truth, rtol=1e-5, atol=3e-6)
    assert np.allclose(lse.cpu().numpy(), lse_truth, rtol=1e-6, atol=1e-5)
    if feature != "scale":  # the feature changes the result, or the comparison would prove nothing
        assert not np.allclose(truth, batch.decode_truth(q)[0], atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("feature", ["window", "cap", "alibi", "sinks"])
def test_features_match_the_oracle_in_16_bits(
    make_batch: Callable[..., Any], check_error: Any, plain: Any, device: torch.device, feature: str, dtype: torch.dtype
) -> None:
    lens = [3, 0, 200]
    batch = make_batch(lens, 2, 64, 16, dtype)
    q = query(3, 6, 64, dtype, device)
    out, _ = paged_decode_attention(q, *batch.tensors(), **FEATURES[feature], split_tokens=64)
    rows = [plain(q[i].cpu(), batch.keys(i)) if n else np.zeros(q.shape[1:]) for i, n in enumerate(lens)]
    off = np.stack(rows) - batch.decode_truth(q)[0]  # how far plain products are off with these keys, without features
    truth = batch.decode_truth(q, **FEATURES[feature])[0]
    check_error(out, truth, truth + off, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_int8_keeps_precision_whatever_the_size_of_the_values(
    make_batch: Callable[..., Any], device: torch.device, dtype: torch.dtype, size: float
) -> None:
    batch = make_batch([150], 1, 64, 16, torch.int8)
    batch.scales["v_scale"] *= size
    q = query(1, 4, 64, dtype, device)
    out, _ = paged_decode_attention(q, *batch.tensors(), **batch.scales, out=torch.empty(1, 4, 64, device=device))
    truth, _ = batch.decode_truth(q)
    unit = 2 * torch.finfo(dtype).eps
    assert np.abs(out.cpu().numpy() - truth).max() <= unit * np.abs(batch.keys(0)[1]).max()


@pytest.mark.parametrize("loudest", [100, 2300])
def test_more_parts_than_one_step_of_the_merge(
    make_batch: Callable[..., Any], device: torch.device, loudest: int
) -> None:
    """38 parts are merged in two steps, and the largest score lies in the first or in the second."""
    batch = make_batch([2400], 1, 16)
    at = (int(batch.block_table[0, loudest // 16]), 0, loudest % 16)
    batch.k_cache[at] = 2.0
    q = torch.full((1, 1, 16), 1.0, device=device)
    out, lse = paged_decode_attention(q, *batch.tensors(), split_tokens=64)
    truth, lse_truth = batch.decode_truth(q)
    assert np.allclose(out.cpu().numpy(), truth, atol=3e-6) and np.allclose(lse.cpu().numpy(), lse_truth, atol=1e-5)


def test_rows_do_not_depend_on_their_neighbours(make_batch: Callable[..., Any], device: torch.device) -> None:
    lens = [100, 300, 7, 129]
    batch = make_batch(lens, 2, 32)
    q = query(4, 4, 32, torch.float32, device)
    out, lse = paged_decode_attention(q, *batch.tensors(), split_tokens=128)
    for row in range(4):
        alone, alone_lse = paged_decode_attention(
            q[row : row + 1], batch.k_cache, batch.v_cache, batch.block_table[row : row + 1],
            batch.seq_lens[row : row + 1], split_tokens=128,
        )  # fmt: skip
        assert torch.equal(alone[0], out[row]) and torch.equal(alone_lse[0], lse[row])


def test_a_plan_serves_every_layer_and_keeps_its_own_integers(
    make_batch: Callable[..., Any], device: torch.device
) -> None:
    batch = make_batch([40, 100], 2, 32)
    q = query(2, 4, 32, torch.float32, device)
    plan = plan_decode(*batch.tensors(), 4, split_tokens=64)
    want, _ = plan.run(q, batch.k_cache, batch.v_cache)
    truth, _ = batch.decode_truth(q)
    negative = -batch.v_cache
    batch.block_table.fill_(-7)
    batch.seq_lens.fill_(1)
    workspace = plan.make_workspace().fill_(torch.nan)
    assert plan.workspace_size == 3 * 4 * 33
    got, _ = plan.run(q, batch.k_cache, negative, workspace=workspace)
    assert torch.equal(got, -want) and np.allclose(want.cpu().numpy(), truth, atol=2e-6)


def test_reads_queries_and_writes_results_through_strides(make_batch: Callable[..., Any], device: torch.device) -> None:
    batch = make_batch([40, 10], 2, 32)
    fused = query(2, 8, 32, torch.float32, device)
    q = fused[:, :4]
    wide = torch.full((2, 8, 32), 7.0, device=device)
    got, _ = paged_decode_attention(q, *batch.tensors(), out=wide[:, 4:])
    want, _ = paged_decode_attention(q.contiguous(), *batch.tensors())
    assert torch.equal(got, want) and torch.all(wide[:, :4] == 7.0)


def test_caches_of_several_layers_in_one_allocation(make_batch: Callable[..., Any], device: torch.device) -> None:
    batch = make_batch([40], 2, 32)
    both = torch.stack((batch.k_cache, batch.v_cache), 1)
    q = query(1, 4, 32, torch.float32, device)
    got, _ = paged_decode_attention(q, both[:, 0], both[:, 1], batch.block_table, batch.seq_lens)
    assert torch.equal(got, paged_decode_attention(q, *batch.tensors())[0])


def test_work_list_covers_every_key_once() -> None:
    lens, first = torch.tensor([0, 1, 64, 65, 1000]), torch.tensor([0, 0, 0, 0, 700])
    seq, split, start = _work(lens, first, 64)
    assert start.tolist() == [0, 1, 2, 3, 5, 11] and len(seq) == 11
    assert seq.tolist() == [0, 1, 2, 3, 3] + [4] * 6
    assert split.tolist() == [0, 0, 0, 0, 1] + list(range(10, 16))


@pytest.mark.parametrize("counts", [[], [0], [2, 0, 0, 3, 1, 0]])
def test_owners_are_repeated_by_their_counts(counts: list[int]) -> None:
    want = [i for i, count in enumerate(counts) for _ in range(count)]
    assert owners(torch.tensor(counts, dtype=torch.int64)).tolist() == want


def _refusals() -> list[tuple[str, dict[str, Any], str]]:
    table = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
    return [
        ("short", {"seq_lens": torch.tensor([33, 5], dtype=torch.int32)},
         "block_table: sequence 0 has length 33 and needs 3 pages of 16, the table's 2 columns hold 32"),
        ("id", {"seq_lens": torch.tensor([5, 20], dtype=torch.int32)},
         "block_table: sequence 1, column 1 names page -1, there are 4 pages"),
        ("id high", {"block_table": table + 4}, "sequence 0, column 0 names page 4"),
        ("negative", {"seq_lens": torch.tensor([5, -2], dtype=torch.int32)}, "seq_lens: sequence 1 has length -2"),
        ("rows", {"block_table": table[:1]}, "block_table: 1 rows do not match the 2 sequences"),
        ("table dtype", {"block_table": table.float()}, "block_table: dtype torch.float32 is no integer type"),
        ("table size", {"block_table": table.long() + 2**31}, "block_table: holds 2147483647 to 2147483650, beyond"),
        ("table dim", {"block_table": table[0]}, "block_table: 1 dimensions are not the needed 2"),
        ("heads", {"num_q_heads": 3}, "num_q_heads: 3 is not a positive multiple of num_kv_heads 2"),
        ("cap", {"logits_soft_cap": -1.0}, "logits_soft_cap: -1.0"),
        ("window", {"window_left": -2}, "window_left: -2"),
        ("scale", {"sm_scale": float("nan")}, "sm_scale: nan"),
        ("split", {"split_tokens": 100}, "split_tokens: 100 is not a positive multiple of 64"),
        ("slopes", {"alibi_slopes": torch.zeros(3)}, r"alibi_slopes: shape \(3,\) is not \(4,\)"),
        ("sinks", {"sinks": torch.tensor([0, 0, 0, torch.nan])}, "sinks: holds a value that is not finite"),
        ("dtype", {"q_dtype": torch.float16}, "q_dtype: torch.float16 does not match the cache's torch.float32"),
        ("double", {"q_dtype": torch.float64}, "q_dtype: torch.float64 is not supported"),
        ("page", {"shape": (4, 2, 24, 32)}, "page_size: 24 is not supported"),
        ("dim", {"shape": (4, 2, 16, 40)}, "head_dim: 40 is not supported"),
        ("cache dim", {"shape": (4, 2, 16)}, "k_cache: shape"),
        ("kv", {"v_shape": (4, 2, 32, 32)}, "v_cache: shape"),
        ("kv dtype", {"dtype": torch.float64}, "k_cache: dtype torch.float64"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), [(c, m) for _, c, m in _refusals()], ids=[n for n, _, _ in _refusals()]
)
def test_plan_refuses(device: torch.device, changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "block_table": torch.tensor([[0, 1], [2, -1]], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 5], dtype=torch.int32),
        "num_q_heads": 4,
        "shape": (4, 2, 16, 32),
        "dtype": torch.float32,
    } | changes
    shape, dtype = given.pop("shape"), given.pop("dtype")
    k_cache = torch.zeros(shape, dtype=dtype, device=device)
    v_cache = torch.zeros(given.pop("v_shape", shape), dtype=dtype, device=device)
    with pytest.raises(ValueError, match=message):
        plan_decode(k_cache, v_cache, **given)


def test_run_refuses_what_does_not_fit_the_plan(make_batch: Callable[..., Any], device: torch.device) -> None:
    batch = make_batch([100], 2, 32)
    plan = plan_decode(*batch.tensors(), 4, split_tokens=64)
    q = query(1, 4, 32, torch.float32, device)
    caches = (batch.k_cache, batch.v_cache)
    scale = torch.ones(batch.k_cache.shape[:3], device=device)
    cases: list[tuple[str, Callable[[], Any]]] = [
        (r"q: shape \(1, 2, 32\)", lambda: plan.run(q[:, :2], *caches)),
        ("q: dtype", lambda: plan.run(q.half(), *caches)),
        ("q: strides", lambda: plan.run(q.transpose(1, 2).contiguous().transpose(1, 2), *caches)),
        ("q: data starts 4 bytes", lambda: plan.run(torch.zeros(129, device=device)[1:].view(1, 4, 32), *caches)),
        ("q: stride 33 of axis 1", lambda: plan.run(torch.zeros(1, 4, 33, device=device)[..., :32], *caches)),
        ("k_cache: geometry", lambda: plan.run(q, batch.k_cache[:3], batch.v_cache[:3])),
        ("out: dtype", lambda: plan.run(q, *caches, out=q.half())),
        ("lse: shape", lambda: plan.run(q, *caches, lse=torch.zeros(1, 3, device=device))),
        ("workspace: 1 elements", lambda: plan.run(q, *caches, workspace=torch.zeros(1, device=device))),
        ("k_scale, v_scale: given", lambda: plan.run(q, *caches, k_scale=scale, v_scale=scale)),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
    codes = make_batch([100], 2, 32, dtype=torch.int8)
    with pytest.raises(ValueError, match="k_scale, v_scale: an int8 cache needs both"):
        paged_decode_attention(q, *codes.tensors(), k_scale=codes.scales["k_scale"])


def test_caches_and_scales_are_checked(device: torch.device) -> None:
    cache = torch.zeros(4, 2, 16, 32, device=device)
    apart = torch.zeros(4, 2, 16, 64, device=device)[..., ::2]
    odd = torch.zeros(4 * 1032, device=device).as_strided((4, 2, 16, 32), (1032, 512, 32, 1))
    unaligned = torch.zeros(4097, device=device)[1:].view(4, 2, 16, 32)
    for message, k, v in (
        ("k_cache: strides .* do not keep the last axis contiguous", apart, apart),
        ("v_cache: shape .* differ from k_cache's", cache, cache.half()),
        ("k_cache: strides 1032 of pages, 512 of heads, 32 of positions are no multiples of 16", odd, odd),
        ("v_cache: data starts 4 bytes past", cache, unaligned),
        ("v_cache: is on meta and k_cache on", cache, torch.zeros(4, 2, 16, 32, device="meta")),
    ):
        with pytest.raises(ValueError, match=message):
            cache_shape(k, v)
    codes = cache.to(torch.int8)
    scale = torch.ones(4, 2, 16, device=device)
    row, table, lens = torch.zeros(1, 2, 32, device=device), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5])
    for message, k_scale in (
        ("k_scale: shape", scale[:3]),
        ("k_scale: dtype", scale.half()),
        ("k_scale: strides", torch.ones(4, 2, 32, device=device)[..., :16]),
    ):
        with pytest.raises(ValueError, match=message):
            paged_decode_attention(row, codes, codes, table, lens.int(), k_scale=k_scale, v_scale=scale)
    with pytest.raises(ValueError, match="seq_lens: sequence 0 has length 2000000000"):
        plan_decode(cache, cache, table, torch.tensor([2_000_000_000], dtype=torch.int32), 2)
    plan = plan_decode(
        cache, cache, table.expand(1, 16).contiguous(), torch.tensor([100], dtype=torch.int32), 2, split_tokens=64
    )
    with pytest.raises(ValueError, match="workspace: torch.float64"):
        plan.run(row, cache, cache, workspace=torch.zeros(1000, dtype=torch.float64, device=device))


def test_no_sequences_is_no_work(make_batch: Callable[..., Any], device: torch.device) -> None:
    batch = make_batch([16], 2, 32)
    table, lens = batch.block_table[:0], batch.seq_lens[:0]
    out, lse = paged_decode_attention(torch.zeros(0, 4, 32, device=device), batch.k_cache, batch.v_cache, table, lens)
    assert out.shape == (0, 4, 32) and lse.shape == (0, 4)
