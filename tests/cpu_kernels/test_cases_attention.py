"""Cases from public bug reports, attention: each test is named after its case and checks the whole kind."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cpu_kernels as ck
from cpu_kernels.codegen.convert import EXP2


@pytest.mark.parametrize("lens", [[5, 0, 3], [0], [0, 0, 0]])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "fp8"])
def test_K01_zero_length_rows_are_written(problem: Any, level: str, lens: list[int], dtype: str) -> None:
    p = problem(lens, dtype=dtype)
    out, lse = p.run(isa=level)
    for i, n in enumerate(lens):
        if n == 0:
            assert not out[i].any() and np.isneginf(lse[i]).all()
            continue
        one, one_lse = np.full_like(p.out[:1], np.nan), np.full_like(p.lse[:1], np.nan)
        ck.plan_decode(p.pages, p.table[i : i + 1], [n], p.heads, isa=level).run(p.q[i : i + 1], one, one_lse)
        assert np.array_equal(one[0], out[i]) and np.array_equal(one_lse[0], lse[i])


def test_K01_sinks_do_not_fill_an_empty_row(problem: Any) -> None:
    p = problem([0, 4])
    out, lse = p.run(sinks=np.ones(4, np.float32))
    assert not out[0].any() and np.isneginf(lse[0]).all() and np.isfinite(lse[1]).all()


@pytest.mark.parametrize("length", [1, 16, 17])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "fp8"])
def test_K03_scores_far_below_any_sentinel(problem: Any, level: str, dtype: str, length: int) -> None:
    p = problem([length], heads=1, group=1, dtype=dtype)
    ck.pack(p.pages, 0, p.table[0], np.full_like(p.k[p.table[0]], -100), np.ones_like(p.v[p.table[0]]))
    p.q[...] = 100
    out, lse = p.run(isa=level)
    assert np.abs(out - 1).max() < 1e-5
    stored = ck.unpack(p.pages, 0, p.table[0])[0][0, 0, 0, 0]  # -100, or -96 in fp8
    assert np.abs(lse - (800 * stored + math.log(length))).max() < (1 if dtype == "int8" else 0.02)


def test_K03_a_score_of_minus_1e30(problem: Any, level: str) -> None:
    p = problem([17], heads=1, group=1, dtype="fp32")
    ck.pack(p.pages, 0, p.table[0], np.full_like(p.k[p.table[0]], -1e14), np.ones_like(p.v[p.table[0]]))
    p.q[...] = 1e16 / 8
    out, lse = p.run(isa=level)
    assert np.abs(out - 1).max() < 1e-6 and np.allclose(lse, -1e30, rtol=1e-6)


def test_K05_window_leaves_whole_blocks_masked_for_every_length(problem: Any) -> None:
    level = ck.isa.detect().level
    lens = np.arange(1, 601)
    pages = problem([600], heads=1, group=2, dtype="fp32", poison=False)
    table = np.repeat(pages.table, 600, axis=0)
    q = np.repeat(pages.q, 600, axis=0)
    want, want_lse = ck.reference.decode_reference(q, pages.k, pages.v, table, lens, window_left=10)
    for split in (32, 160, 2048):
        out, lse = np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, np.float32)
        plan = ck.plan_decode(pages.pages, table, lens, 2, window_left=10, isa=level, split_tokens=split)
        plan.run(q, out, lse)
        assert np.abs(out - want).max() < 1e-5 and np.abs(lse - want_lse).max() < 1e-5


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_K06_window_is_exact_to_the_token(problem: Any, level: str, dtype: str, width: int) -> None:
    """`width` keys are window_left = width - 1; uniform attention over one-hot values shows who took part."""
    for length in range(2, 40):
        p = problem([length], heads=1, group=1, dtype=dtype)
        onehot = np.zeros((2, 1, 32, 64), np.float32)
        for position in range(length):
            onehot[position // 32, 0, position % 32, position] = 1
        used = p.table[0]
        ck.pack(p.pages, 0, used, np.zeros((len(used), 1, 32, 64), np.float32), onehot[: len(used)])
        p.q[...] = 0
        out, _ = p.run(isa=level, window_left=width - 1)
        inside = np.zeros(64, np.float32)
        inside[max(0, length - width) : length] = 1 / min(width, length)
        assert np.abs(out[0, 0] - inside).max() < 1e-6
        full, _ = p.run(isa=level)
        wide, _ = p.run(isa=level, window_left=length)
        assert np.array_equal(full, wide)


@pytest.mark.parametrize(("heads", "group"), [(4, 7), (4, 6), (8, 5), (2, 6), (4, 16), (3, 3), (1, 15), (1, 71)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_K08_odd_group_sizes(problem: Any, heads: int, group: int, dtype: str) -> None:
    level = ck.isa.detect().level
    p = problem([257], heads=heads, group=group, dim=128, dtype=dtype)
    out, _ = p.run()
    assert np.abs(out - p.want()[0]).max() <= p.bound(level)


@pytest.mark.parametrize("dtype", ["fp16", "int8", "fp8"])
def test_K08_odd_group_in_the_other_dtypes(problem: Any, dtype: str) -> None:
    p = problem([257], heads=1, group=7, dim=128, dtype=dtype)
    assert np.abs(p.run()[0] - p.want()[0]).max() <= p.bound(ck.isa.detect().level)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_K10_group_of_seven_in_bf16(problem: Any, backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    p = problem([256], heads=4, group=7, dim=128, page=16)
    out, _ = p.run(backend=backend)
    want, _ = p.want()
    cosine = (out * want).sum(-1) / np.linalg.norm(out, axis=-1) / np.linalg.norm(want, axis=-1)
    assert np.abs(out - want).max() < 4e-3 and cosine.min() > 0.9999


@pytest.mark.parametrize("dim", [8, 40, 72, 100, 1024])
def test_K11_unsupported_head_dims_are_refused_at_construction(dim: int) -> None:
    with pytest.raises(ValueError, match=f"head_dim {dim} is not supported: multiples of 16 up to 512 are"):
        ck.KVPages(2, 1, dim)


@pytest.mark.parametrize("dim", [112, 160, 192])
def test_K11_the_upper_half_of_the_head_counts(problem: Any, dim: int) -> None:
    p = problem([70], heads=1, group=1, dim=dim, dtype="fp32")
    p.q[..., : dim // 2] = 0
    assert np.abs(p.run()[0] - p.want()[0]).max() < 1e-5


def test_K14_block_table_too_short() -> None:
    pages = ck.KVPages(4, 1, 64, 16, huge_pages=False)
    message = "block_table is too short for sequence 0: its 33 tokens need 3 pages of 16, the table has 2 columns"
    with pytest.raises(ValueError, match=message):
        ck.plan_decode(pages, [[0, 1]], [33], 1)  # 32 tokens and an appended one
    ck.plan_decode(pages, [[0, 1]], [32], 1)


def test_K15_padding_is_never_read_and_bad_ids_are_refused(problem: Any) -> None:
    p = problem([33, 5])
    want, _ = p.run()
    for filler in (-1, 2**31 - 1):
        table = np.concatenate([p.table, np.full((2, 3), filler, np.int32)], axis=1)
        table[1, 1:] = filler
        out = np.full_like(p.out, np.nan)
        ck.plan_decode(p.pages, table, p.lens, p.heads).run(p.q, out)
        assert np.array_equal(out, want)
    for bad in (p.pages.num_pages, -1):
        table = p.table.copy()
        table[0, 1] = bad
        with pytest.raises(ValueError, match=rf"block_table\[0, 1\] is page {bad}, but the pool has pages 0 to"):
            ck.plan_decode(p.pages, table, p.lens, p.heads)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_K16_pages_beyond_two_to_the_31(dtype: str) -> None:
    """Untouched memory costs nothing: the pool is larger than 2**31 elements and two of its pages are used."""
    each = 8 * 128 * 16 * 2  # elements of a page, K and V
    border = 2**31 // each
    pages = ck.KVPages(2 * border + 2, 8, 128, 16, dtype, touch=False, huge_pages=False)
    small = ck.KVPages(2, 8, 128, 16, dtype, huge_pages=False)
    rng = np.random.default_rng(0)
    k, v, q = (rng.standard_normal((n, 8, 128)).astype(np.float32) for n in (20, 20, 1))
    ids = [border - 1, 2 * border + 1]  # bytes above 2**31 and 2**32 as well
    slots = np.arange(20)
    ck.append_kv(small, 0, k, v, slots)
    ck.append_kv(pages, 0, k, v, np.array(ids)[slots // 16] * 16 + slots % 16)
    outs = []
    for pool, table in ((small, [[0, 1]]), (pages, [ids])):
        out = np.full_like(q, np.nan)
        ck.plan_decode(pool, table, [20], 8).run(q, out)
        outs.append(out)
    assert np.array_equal(*outs)
    got = [np.empty_like(k), np.empty_like(v)]
    ck.gather_kv(pages, 0, ids, 20, *got)
    assert np.abs(got[0] - k).max() < 0.05 and np.abs(got[1] - v).max() < 0.05


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 8191])
def test_K18_splits_hardly_matter_and_threads_not_at_all(problem: Any, length: int) -> None:
    p = problem([length], heads=2, group=2, dim=64, page=16, dtype="fp32")
    whole, whole_lse = p.run(split_tokens=16 * 1024)
    for split in (16, 32, 48, 64, 1024):
        out, lse = p.run(split_tokens=split)
        assert np.abs(out - whole).max() < 2e-6 and np.abs(lse - whole_lse).max() < 2e-5
        plan = p.plan(split_tokens=split)
        for workers in (1, 2, 7):
            with ck.WorkerPool(workers, cpus=ck.topology.read().allowed) as pool:
                again = np.full_like(out, np.nan)
                pool.submit(plan, p.q, again).wait(20)  # LSE not asked for
            assert np.array_equal(again, out)


def test_K20_a_row_does_not_depend_on_its_batch(problem: Any, level: str) -> None:
    lens = np.random.default_rng(0).integers(1, 400, 32)
    p = problem(lens)
    out, lse = p.run(isa=level, split_tokens=128)
    again, _ = p.run(isa=level, split_tokens=128)
    assert np.array_equal(out, again)
    alone = np.full_like(out[:1], np.nan)
    ck.plan_decode(p.pages, p.table[:1], lens[:1], p.heads, isa=level, split_tokens=128).run(p.q[:1], alone)
    assert np.array_equal(alone, out[:1])
    back = np.full_like(out, np.nan)
    plan = ck.plan_decode(p.pages, p.table[::-1], lens[::-1], p.heads, isa=level, split_tokens=128)
    plan.run(np.ascontiguousarray(p.q[::-1]), back)
    assert np.array_equal(back[::-1], out)


@pytest.mark.parametrize("size", [60, 300])
def test_K22_products_beyond_fp16(problem: Any, level: str, size: int) -> None:
    p = problem([20], heads=1, group=1, dim=128, dtype="fp16")
    ck.pack(p.pages, 0, p.table[0], np.full_like(p.k[p.table[0]], size), np.ones_like(p.v[p.table[0]]))
    p.q[...] = size
    out, lse = p.run(isa=level)
    assert np.abs(out - 1).max() < 1e-6 and np.isfinite(lse).all()


def test_K24_masked_keys_weigh_exactly_nothing(problem: Any, level: str) -> None:
    assert EXP2[-1] == 1.0  # a score equal to the maximum weighs exactly 1
    for dtype in ("fp32", "bf16", "fp16", "int8", "fp8"):
        p = problem([3], heads=1, group=1, dtype=dtype, poison=False)
        used = p.table[0]
        k, v = np.zeros_like(p.k[used]), np.ones_like(p.v[used])
        v[0, 0, 3] = 1000.0  # the fourth slot is past the length
        ck.pack(p.pages, 0, used, k, v)
        out, _ = p.run(isa=level)
        assert np.abs(out - 1).max() < 1e-6
        inside = problem([4], heads=1, group=1, dtype=dtype, poison=False)
        v = np.ones_like(inside.v[inside.table[0]])
        v[0, 0, 0] = 1000.0
        ck.pack(inside.pages, 0, inside.table[0], k, v)
        out, _ = inside.run(isa=level, window_left=2)  # the first is outside of the window
        assert np.abs(out - 1).max() < 1e-6


def test_K24_scores_of_minus_infinity_give_zero_weight(problem: Any, level: str) -> None:
    p = problem([3], heads=1, group=1, dtype="fp32")
    k = np.zeros_like(p.k[p.table[0]])
    k[0, 0, 1] = -np.inf
    ck.pack(p.pages, 0, p.table[0], k, np.full_like(k, 1.0))
    p.q[...] = 1.0
    out, lse = p.run(isa=level)
    assert np.array_equal(out, np.ones_like(out)) and np.abs(lse - math.log(2)).max() < 1e-6
    k[...] = -np.inf
    ck.pack(p.pages, 0, p.table[0], k, np.full_like(k, 1.0))
    out, lse = p.run(isa=level)
    assert not out.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "fp8"])
def test_K26_cap_and_window_are_applied_on_every_path(problem: Any, level: str, dtype: str) -> None:
    p = problem([300], heads=1, group=2, dtype=dtype)
    p.q[...] *= 8
    plain, _ = p.want()
    for options in ({"logits_soft_cap": 0.5}, {"window_left": 20}):
        want, _ = p.want(**options)
        cosine = (plain * want).sum() / np.linalg.norm(plain) / np.linalg.norm(want)
        assert cosine < 0.9  # the option matters, so ignoring it would show
        for split in (32, 2048):
            out, _ = p.run(isa=level, split_tokens=split, **options)
            assert np.abs(out - want).max() <= p.bound(level, **options)
        out = np.full_like(p.out, np.nan)
        ck.prefill_attention(p.q, p.pages, p.table, [0, 1], p.lens, out=out, isa=level, **options)
        assert np.abs(out - want).max() <= p.bound(level, **options)


@pytest.mark.parametrize("strong", [0, 3])
def test_K18_splits_whose_maxima_lie_far_apart(problem: Any, level: str, strong: int) -> None:
    """One split holds a score that is 400 above all others: it alone counts, whichever split it is."""
    p = problem([128], heads=1, group=1, dtype="fp32", poison=False)
    k = np.zeros((4, 1, 32, 64), np.float32)
    k[strong, 0, 5, 0] = 1.0
    v = np.broadcast_to(np.arange(4, dtype=np.float32)[:, None, None, None], k.shape)
    ck.pack(p.pages, 0, p.table[0], k, np.ascontiguousarray(v))
    p.q[...] = 0
    p.q[..., 0] = 400 * 8
    out, lse = p.run(isa=level, split_tokens=32)
    assert np.abs(out - strong).max() < 1e-6 and np.abs(lse - 400).max() < 1e-3


def test_K18_counts_left_in_a_workspace_do_not_matter(problem: Any) -> None:
    """A run that was cut short leaves finish counts behind."""
    p = problem([300], dtype="fp32")
    want, _ = p.run(split_tokens=32)
    plan = p.plan(split_tokens=32)
    space = plan.workspace()
    space.counters[...], space.partials[...] = 3, np.nan
    out = np.full_like(want, np.nan)
    plan.run(p.q, out, workspace=space)
    assert np.array_equal(out, want)


@pytest.mark.parametrize(
    ("place", "dtype"),
    [("query", d) for d in ("fp32", "bf16", "fp16", "int8", "fp8")] + [("key", d) for d in ("fp32", "bf16", "fp16")],
)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_what_overflowed_upstream_is_nan_and_no_empty_row(dtype, backend, place):
    """In the row that meets it alone; a maximum that passes NaN over would make a row of zeros of it."""
    if backend == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    pages = ck.KVPages(2, 1, 32, 16, dtype, huge_pages=False)
    k, q = np.full((32, 1, 32), 0.1, np.float32), np.full((2, 2, 32), 0.5, np.float32)
    if place == "key":
        k[19, 0, 5] = np.inf  # as a product beyond fp16 leaves it
    else:
        q[1, 1, 3] = np.nan
    ck.append_kv(pages, 0, k, np.ones_like(k), np.arange(32))
    plan = ck.plan_decode(pages, [[0], [1]], [16, 9], 2, backend=backend)
    out, lse = np.zeros_like(q), np.zeros((2, 2), np.float32)
    plan.run(q, out, lse)
    assert np.isnan(out[1, 1]).all() and not np.isneginf(lse[1, 1])
    assert np.allclose(out[0], 1.0, atol=0.01) and np.isfinite(lse[0]).all()
