"""Kernels in plain numba on the native workers: exact against the oracle, top-k by its own rule, on plain pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpu_kernels as ck
from cpu_kernels import backends

pytest.importorskip("numba", reason="numba is not installed")

FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "window": {"window_left": 40},
    "all": {"sm_scale": 0.3, "window_left": 90, "logits_soft_cap": 3.0, "alibi_slopes": np.linspace(0, 0.1, 4),
            "sinks": np.linspace(-1, 2, 4)},
    "rows of their own": {"window_left": [3, -1, 50, 7], "sinks": [1.0] * 4, "with_sinks": [True, True, False, True],
                          "key_start": [9, 0, 100, 0], "query_pos": [20, 5, 196, 40]},
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exact_follows_the_contract(problem: Any, dtype: str, name: str) -> None:
    p = problem([5, 0, 97, 33], dtype=dtype, layout="plain")
    options = FEATURES[name]
    out, lse = p.run(backend="numba", **options)
    want, sums = p.want(**options)
    assert np.abs(out - want).max() < 1e-5
    assert np.array_equal(np.isneginf(lse), np.isneginf(sums))
    assert np.abs(np.where(np.isneginf(sums), 0, lse) - np.where(np.isneginf(sums), 0, sums)).max() < 1e-5


@pytest.mark.filterwarnings("ignore:num_workers [0-9]+ is more than the")  # where one cpu is left
@pytest.mark.parametrize("layout", ["plain", "plain_bounds"])
def test_on_the_pool_with_new_tokens_of_every_type(problem: Any, layout: str) -> None:
    """A job appends and attends like a native one; pages end as `append_kv` leaves them."""
    p = problem([33, 64, 1], dtype="bf16", poison=False, layout=layout, num_layers=2)
    twin = ck.KVPages(p.pages.num_pages, 2, 64, 32, "bf16", 2, huge_pages=False, layout=layout)
    new = np.random.default_rng(0).standard_normal((3, 2, 64)).astype(np.float32)
    plan = p.plan(backend="numba")
    with ck.WorkerPool(2) as pool:
        for kind in (np.float32, np.float16, np.uint16):
            rows = ck.to_bf16(new) if kind == np.uint16 else new.astype(kind)
            q = ck.to_bf16(p.q) if kind == np.uint16 else p.q.astype(kind)
            out, lse = np.zeros(p.q.shape, kind), np.zeros(p.lse.shape, np.float32)
            twin.buffer[...] = p.pages.buffer
            pool.submit(plan, q, out, lse, layer=1, k_new=rows, v_new=rows).wait(30)
            ck.append_kv(twin, 1, rows, rows, plan.inputs.slots)
            assert np.array_equal(twin.buffer, p.pages.buffer)
            k, v = ck.unpack(p.pages, 1, np.arange(p.pages.num_pages))
            wide = ck.from_bf16(q) if kind == np.uint16 else q.astype(np.float32)
            want, sums = ck.reference.decode_reference(wide, k, v, p.table, p.lens)
            got = ck.from_bf16(out) if kind == np.uint16 else out.astype(np.float32)
            assert np.abs(got - want).max() < (1e-5 if kind == np.float32 else 2e-2) and np.abs(lse - sums).max() < 1e-5


def test_scores_of_minus_infinity_and_nan_keep_to_the_contract() -> None:
    pages = ck.KVPages(2, 1, 64, 32, "fp32", huge_pages=False, layout="plain")
    k, v = np.zeros((33, 1, 64), np.float32), np.ones((33, 1, 64), np.float32)
    k[:32, 0, 0] = -np.inf  # a whole page of scores of -inf
    ck.append_kv(pages, 0, k, v, np.arange(33))
    q = np.zeros((2, 2, 64), np.float32)
    q[..., 0] = 1
    out, lse = np.zeros_like(q), np.zeros((2, 2), np.float32)
    ck.plan_decode(pages, [[0, 1]] * 2, [33, 32], 2, backend="numba").run(q, out, lse)
    assert (out[0] == v[0]).all() and not lse[0].any()
    assert not out[1].any() and np.isneginf(lse[1]).all()


def test_topk_reads_the_pages_that_can_score_highest_and_says_that_it_is_approximate(problem: Any) -> None:
    p = problem([300, 40, 0], heads=1, group=2, dtype="fp32", poison=False, layout="plain_bounds")
    assert backends.approximate("numba_topk_approx:3") and not backends.approximate("numba")
    whole, sums = p.run(backend="numba_topk_approx")  # 32 pages hold all
    assert np.abs(whole - p.want()[0]).max() < 1e-5
    out, lse = p.run(backend="numba_topk_approx:3")
    used = p.table[0, :10]
    keys = p.k[used, 0]
    x = p.q[0] * 64**-0.5
    bound = np.maximum(x[:, None] * keys.min(1), x[:, None] * keys.max(1)).sum(-1).max(0)
    chosen = sorted([*np.argsort(-bound[:9])[:2].tolist(), 9])
    k, v = (np.concatenate([a[used[j], 0][: min(32, 300 - 32 * j)] for j in chosen])[:, None] for a in (p.k, p.v))
    want, log = ck.reference.attend(p.q[0], k, v, len(k) - 1)
    assert np.abs(out[0] - want).max() < 1e-5 and np.abs(lse[0] - log).max() < 1e-5
    assert (lse[0] < sums[0]).all()  # keys were left out
    assert np.abs(out[1] - p.want()[0][1]).max() < 1e-5 and not out[2].any()


def test_each_shipped_kernel_reads_as_its_formula() -> None:
    for name in ("numba_exact", "numba_topk"):
        assert len((Path(ck.__file__).parent / f"{name}.py").read_text().splitlines()) < 120


def test_refusals(problem: Any) -> None:
    p = problem([5], layout="plain")
    for message, options in (
        ("backend 'native' reads pages of layout 'tiles', these are 'plain'", {"backend": "native"}),
        ("reads pages of layout 'plain_bounds', these are 'plain'", {"backend": "numba_topk_approx"}),
        ("isa='avx2' has no meaning for a kernel in numba", {"backend": "numba", "isa": "avx2"}),
        ("only a kernel in numba takes a number", {"backend": "torch:3"}),
        ("must be one above 0", {"backend": "numba_topk_approx:x"}),
    ):
        with pytest.raises(ValueError, match=message):
            p.plan(**options)
    with pytest.raises(ValueError, match="kernels in numba read pages of fp32 and bf16, these are int8"):
        problem([5], dtype="int8", layout="plain", poison=False).plan(backend="numba")
    with pytest.raises(ValueError, match="layout 'rows' of the KV pages is unknown; known: tiles, plain, plain_bounds"):
        ck.KVPages(1, 1, 16, layout="rows")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "fp8"])
def test_plain_pages_hold_what_tiles_hold(dtype: str) -> None:
    tiles, plain, bounds = (
        ck.KVPages(5, 3, 64, 16, dtype, 2, huge_pages=False, layout=x) for x in ("tiles", "plain", "plain_bounds")
    )
    draw = np.random.default_rng(0)
    k, v = draw.standard_normal((2, 40, 3, 64)).astype(np.float32)
    slots = draw.permutation(80)[:40]
    slots[3] = -1
    for pages in (tiles, plain, bounds):
        ck.append_kv(pages, 1, k, v, slots)
    want = ck.unpack(tiles, 1, np.arange(5))
    for pages in (plain, bounds):
        assert all(np.array_equal(a, b) for a, b in zip(want, ck.unpack(pages, 1, np.arange(5)), strict=True))
        rows = [np.zeros((70, 3, 64), np.uint16) for _ in range(4)]
        ck.gather_kv(tiles, 1, [4, 0, 1, 2, 3], 70, *rows[:2])
        ck.gather_kv(pages, 1, [4, 0, 1, 2, 3], 70, *rows[2:])
        assert np.array_equal(rows[0], rows[2]) and np.array_equal(rows[1], rows[3])
        back = ck.KVPages(5, 3, 64, 16, dtype, 2, huge_pages=False)
        ck.copy_pages(pages, np.arange(5), back, np.arange(5))
        assert np.array_equal(back.buffer, tiles.buffer)
    moved = ck.KVPages(5, 3, 64, 16, dtype, 2, huge_pages=False, layout="plain_bounds")
    ck.copy_pages(tiles, np.arange(5), moved, np.arange(5))
    assert np.array_equal(moved.buffer[1], bounds.buffer[1])


def test_the_engine_speaks_with_a_kernel_in_numba() -> None:
    hybridattn = pytest.importorskip("hybridattn", reason="the framework is not here")
    pytest.importorskip("torch", reason="torch is not installed")
    found = {}
    for backend in ("native", "numba", "numba_topk_approx"):
        with hybridattn.LLM(
            model="dummy:tiny",
            device="host",
            policy="async_overlap",
            gpu_kv_blocks=4,
            cpu_kv_blocks=16,
            page_size=16,
            dtype="fp32",
            backend=backend,
        ) as llm:
            results = llm.generate([[1, 2, 3], [4, 5, 6, 7]], hybridattn.SamplingParams(max_tokens=6))
            found[backend] = [r.token_ids for r in results]
    assert found["numba"] == found["native"] == found["numba_topk_approx"]
