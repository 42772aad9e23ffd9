"""Prefill on the CPU, both forms, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cpu_kernels as ck


def case(problem: Any, query_lens: list[int], lens: list[int], **options: Any) -> Any:
    p = problem(lens, **options)
    total = sum(query_lens)
    q = np.random.default_rng(5).standard_normal((total, p.heads, p.pages.head_dim)).astype(np.float32)
    return p, q


def want(p: Any, q: np.ndarray, query_lens: list[int], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    outs, sums, start = [], [], 0
    for i, (length, count) in enumerate(zip(p.lens.tolist(), query_lens, strict=True)):
        used = p.table[i, : -(-length // p.pages.page_size)]
        k, v = (np.swapaxes(x[used], 1, 2).reshape(-1, x.shape[1], x.shape[3])[:length] for x in (p.k, p.v))
        out, lse = ck.reference.prefill_reference(q[start : start + count], k, v, **options)
        outs.append(out)
        sums.append(lse)
        start += count
    return np.concatenate(outs), np.concatenate(sums)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_native_chunks_of_several_sequences(problem: Any, dtype: str, pooled: bool) -> None:
    counts = [5, 0, 33, 1]
    p, q = case(problem, counts, [5, 9, 100, 17], dtype=dtype)
    options = {"window_left": 40, "logits_soft_cap": 2.0}
    out, lse = np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, np.float32)
    if pooled:
        with ck.WorkerPool(1) as pool:
            ck.prefill_attention(
                q, p.pages, p.table, None, p.lens, query_lens=counts, out=out, lse=lse, pool=pool, **options
            )
    else:
        ck.prefill_attention(q, p.pages, p.table, None, p.lens, query_lens=counts, out=out, lse=lse, **options)
    expected, sums = want(p, q, counts, **options)
    tolerance = 2e-2 if dtype == "bf16" else 1e-5
    assert np.abs(out - expected).max() < tolerance and np.abs(lse - sums).max() < tolerance


@pytest.mark.parametrize("window", [-1, 20])
def test_torch_form_agrees(problem: Any, window: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    counts = [64, 3]
    p, q = case(problem, counts, [64, 90], dtype="fp32", group=3)
    out = torch.full(q.shape, torch.nan)
    ck.prefill_attention(
        torch.from_numpy(q),
        p.pages,
        p.table,
        None,
        p.lens,
        query_lens=counts,
        out=out,
        backend="torch",
        window_left=window,
    )
    assert np.abs(out.numpy() - want(p, q, counts, window_left=window)[0]).max() < 1e-5
    lse, options = np.full(q.shape[:2], np.nan, np.float32), {"logits_soft_cap": 1.0, "window_left": window}
    ck.prefill_attention(
        q, p.pages, p.table, None, p.lens, query_lens=counts, out=out.numpy(), backend="torch", lse=lse, **options
    )
    expected, sums = want(p, q, counts, **options)
    assert np.abs(out.numpy() - expected).max() < 1e-5 and np.abs(lse - sums).max() < 1e-5


def test_refusals(problem: Any) -> None:
    p, q = case(problem, [6], [5])
    with pytest.raises(ValueError, match=r"expected \[2, num_q_heads, head_dim\]"):
        ck.prefill_attention(q, p.pages, p.table, None, p.lens, query_lens=[2], out=q.copy())
    with pytest.raises(ValueError, match="backend 'ipex' has no prefill"):
        ck.prefill_attention(q[:5], p.pages, p.table, None, p.lens, query_lens=[5], out=q[:5].copy(), backend="ipex")
