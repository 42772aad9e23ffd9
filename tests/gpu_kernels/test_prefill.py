"""Prefill attention against the float64 oracle: chunks, odd lengths, window, every row written."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu_kernels import plan_prefill, prefill_attention


def rows(starts: list[int], heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(starts[-1], heads, dim, generator=draw).to(dtype).to(device)


def starts_of(q_lens: list[int]) -> list[int]:
    return [0, *np.cumsum(q_lens).tolist()]


def loc(starts: list[int]) -> torch.Tensor:
    return torch.tensor(starts, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"),
    [(2, 2, 64, 16), (9, 3, 80, 32), (14, 2, 128, 16), (2, 1, 256, 64), (71, 1, 16, 16)],
)
def test_chunks_match_the_oracle(
    make_batch: Callable[..., Any], check_error: Any, plain: Any, device: torch.device, dtype: torch.dtype, heads: int,
    kv_heads: int, dim: int, page: int,
) -> None:  # fmt: skip
    lens, q_lens = [17, 54, 1, 97], [17, 5, 1, 0]
    batch, starts = make_batch(lens, kv_heads, dim, page, dtype), starts_of(q_lens)
    q = rows(starts, heads, dim, dtype, device)
    out = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:2], torch.nan, device=device)
    prefill_attention(q, batch.k_cache, batch.v_cache, batch.block_table, loc(starts), batch.seq_lens, out=out, lse=lse)
    for seq, (length, count) in enumerate(zip(lens, q_lens, strict=True)):
        here = slice(starts[seq], starts[seq + 1])
        truth, lse_truth = batch.prefill_truth(q[here], seq)
        lines = [plain(q[starts[seq] + i].cpu(), batch.keys(seq, length - count + i + 1)) for i in range(count)]
        check_error(out[here], truth, np.stack(lines) if lines else truth, dtype)
        atol = 1e-5 if dtype is torch.float32 else 4e-3
        assert np.allclose(lse[here].cpu().numpy(), lse_truth, rtol=0, atol=atol)


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_left": 9},
    "window_of_one": {"window_left": 0},
    "cap": {"logits_soft_cap": 0.7},
    "alibi": {"alibi_slopes": np.linspace(0.01, 0.5, 6, dtype=np.float32)},
    "sinks": {"sinks": np.linspace(-3, 3, 6, dtype=np.float32)},
    "all": {
        "window_left": 20,
        "logits_soft_cap": 2.0,
        "alibi_slopes": np.linspace(0.0, 0.1, 6, dtype=np.float32),
        "sinks": np.linspace(3, -3, 6, dtype=np.float32),
        "sm_scale": 0.3,
    },
}


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (8, 128)])
def test_a_window_matches_the_oracle_in_16_bits(
    make_batch: Callable[..., Any], device: torch.device, heads: int, dim: int, dtype: torch.dtype
) -> None:
    lens, starts = [97, 41], [0, 33, 66]
    batch = make_batch(lens, 2, dim, 16, dtype)
    q = rows(starts, heads, dim, dtype, device)
    out, _ = prefill_attention(q, *batch.tensors()[:3], loc(starts), batch.seq_lens, window_left=40)
    for seq in range(2):
        here = slice(starts[seq], starts[seq + 1])
        truth, _ = batch.prefill_truth(q[here], seq, window_left=40)
        unit = torch.finfo(dtype).eps * max(1.0, float(np.abs(truth).max()))
        assert np.abs(out[here].double().cpu().numpy() - truth).max() <= 4 * unit


@pytest.mark.parametrize("store", [torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("feature", FEATURES)
def test_features_match_the_oracle(
    make_batch: Callable[..., Any], device: torch.device, feature: str, store: torch.dtype
) -> None:
    lens, starts = [70, 41], [0, 30, 71]
    batch = make_batch(lens, 2, 32, 16, store)
    q = rows(starts, 6, 32, torch.float32, device)
    out, lse = prefill_attention(
        q, batch.k_cache, batch.v_cache, batch.block_table, loc(starts), batch.seq_lens, **batch.scales,
        **FEATURES[feature],
    )  # fmt: skip
    for seq in range(2):
        here = slice(starts[seq], starts[seq + 1])
        truth, lse_truth = batch.prefill_truth(q[here], seq, **FEATURES[feature])
        assert np.allclose(out[here].cpu().numpy(), truth, rtol=1e-5, atol=3e-6)
        assert np.allclose(lse[here].cpu().numpy(), lse_truth, rtol=1e-6, atol=1e-5)
        assert not np.allclose(truth, batch.prefill_truth(q[here], seq)[0], atol=1e-3)


def test_not_causal_attends_to_every_key(make_batch: Callable[..., Any], device: torch.device) -> None:
    batch = make_batch([40], 2, 32)
    q = rows([0, 7], 4, 32, torch.float32, device)
    out, _ = prefill_attention(
        q, batch.k_cache, batch.v_cache, batch.block_table, loc([0, 7]), batch.seq_lens, causal=False
    )
    last = [batch.prefill_truth(q[i : i + 1], 0)[0][0] for i in range(7)]
    assert np.allclose(out.cpu().numpy(), np.stack(last), atol=2e-6)


@pytest.mark.parametrize("window_left", [-1, 11])
def test_chunked_equals_whole(make_batch: Callable[..., Any], device: torch.device, window_left: int) -> None:
    batch = make_batch([75], 1, 32)
    q = rows([0, 75], 3, 32, torch.float32, device)
    caches = (batch.k_cache, batch.v_cache, batch.block_table)
    whole, whole_lse = prefill_attention(q, *caches, loc([0, 75]), batch.seq_lens, window_left=window_left)
    for begin, end in ((0, 20), (20, 21), (21, 64), (64, 75)):
        part, lse = prefill_attention(
            q[begin:end],
            *caches,
            loc([0, end - begin]),
            torch.tensor([end], dtype=torch.int32),
            window_left=window_left,
        )
        # The interpreter's products are NumPy's, whose BLAS may sum in another order for another number of rows.
        torch.testing.assert_close(part, whole[begin:end], rtol=0, atol=1e-6)
        torch.testing.assert_close(lse, whole_lse[begin:end], rtol=0, atol=1e-6)


def test_pages_before_the_window_may_be_gone(make_batch: Callable[..., Any], device: torch.device) -> None:
    batch = make_batch([100], 1, 32)
    q = rows([0, 4], 2, 32, torch.float32, device)
    caches = (batch.k_cache, batch.v_cache, batch.block_table)
    want, _ = prefill_attention(q, *caches, loc([0, 4]), batch.seq_lens, window_left=16)
    batch.block_table[0, :5] = -1  # the first token is at 96 and reads from 80 on
    got, _ = prefill_attention(q, *caches, loc([0, 4]), batch.seq_lens, window_left=16)
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="block_table: sequence 0, column 4 names page -1"):
        prefill_attention(q, *caches, loc([0, 4]), batch.seq_lens, window_left=17)


@pytest.mark.parametrize(
    ("starts", "lens", "message"),
    [
        ([0, 5, 3], [9, 9], "query_start_loc: sequence 1 starts at 5 and ends at 3"),
        ([1, 5], [9], "query_start_loc: begins at 1"),
        ([0, 5, 9], [9], "query_start_loc: 3 entries do not fit 1 sequences"),
        ([0, 5], [40], "block_table: sequence 0 has length 40"),
    ],
)
def test_plan_refuses(device: torch.device, starts: list[int], lens: list[int], message: str) -> None:
    cache = torch.zeros(4, 2, 16, 32, device=device)
    table = torch.zeros(len(lens), 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        plan_prefill(cache, cache, table, loc(starts), torch.tensor(lens, dtype=torch.int32), 4)


def test_run_refuses_other_shapes(device: torch.device) -> None:
    cache = torch.zeros(4, 2, 16, 32, device=device)
    table = torch.zeros(1, 2, dtype=torch.int32)
    plan = plan_prefill(cache, cache, table, loc([0, 3]), torch.tensor([3], dtype=torch.int32), 4)
    with pytest.raises(ValueError, match=r"q: shape \(2, 4, 32\) is not the needed \(3, 4, 32\)"):
        plan.run(torch.zeros(2, 4, 32, device=device), cache, cache)
    with pytest.raises(ValueError, match="k_cache: geometry"):
        plan.run(torch.zeros(3, 4, 32, device=device), cache[:2], cache[:2])
