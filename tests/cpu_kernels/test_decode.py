"""Decode kernels against the float64 oracle: shapes, dtypes, levels, features."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu_kernels as ck

LENS = [5, 0, 33, 97, 577, 1]
FOUR = ("fp32", "bf16", "int8", "fp8")


def check(p: Any, isa: str, **options: Any) -> None:
    plan_only = {"split_tokens": options.pop("split_tokens", None)}
    out, lse = p.run(isa=isa, **plan_only, **options)
    want, want_lse = p.want(**options)
    assert np.abs(out - want).max() <= p.bound(isa, **options)
    empty = np.isneginf(want_lse)
    assert np.array_equal(np.isneginf(lse), empty)
    slack = 2e-2 if p.coarse(isa) else 2e-5
    assert np.abs(np.where(empty, 0, lse) - np.where(empty, 0, want_lse)).max() <= slack


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "fp8"])
def test_every_dtype_on_every_level(problem: Any, level: str, dtype: str) -> None:
    check(problem(LENS, heads=2, group=3, dim=64, dtype=dtype), level, split_tokens=64)


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", FOUR[1:])
def test_every_page_size(problem: Any, page: int, dtype: str) -> None:
    check(problem(LENS, group=3, page=page, dtype=dtype), "avx512_bf16" if _has("avx512_bf16") else "portable")


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 96, 128, 256, 512])
def test_head_dims(problem: Any, dim: int) -> None:
    p = problem([3, 60], heads=1, group=2, dim=dim)
    p.q[..., : dim // 2] = 0  # all signal in the upper half
    check(p, ck.isa.detect().level)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 9, 16, 17])
def test_groups(problem: Any, group: int) -> None:
    check(problem([40, 97], heads=2, group=group), ck.isa.detect().level)


def _has(level: str) -> bool:
    return level in ck.isa.detect().available


FEATURES: list[dict[str, Any]] = [
    {"window_left": 0},
    {"window_left": 40},
    {"logits_soft_cap": 1.5},
    {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)},
    {"sinks": np.array([2.0, -1.0, 0.0, 5.0], np.float32)},
    {"sm_scale": 0.5, "window_left": 90, "logits_soft_cap": 3.0, "alibi_slopes": np.full(4, 0.01, np.float32),
     "sinks": np.zeros(4, np.float32)},
]  # fmt: skip


@pytest.mark.parametrize("options", FEATURES, ids=lambda o: "+".join(o))
@pytest.mark.parametrize("dtype", FOUR)
def test_features_on_every_level(problem: Any, level: str, dtype: str, options: dict[str, Any]) -> None:
    check(problem(LENS, heads=2, group=2, dim=64, dtype=dtype), level, split_tokens=64, **options)


def _shapes() -> list[tuple[str, int, int, str]]:
    """dtype, group, page size and level of kernels that tests above have compiled."""
    every = [(dtype, group, 32, level) for dtype in FOUR for group in (2, 3) for level in _levels()]
    best = ck.isa.detect().level
    middle = "avx512_bf16" if _has("avx512_bf16") else "portable"
    return every + [("bf16", group, 32, best) for group in (1, 8, 9)] + [(x, 3, 16, middle) for x in FOUR[1:]]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_small_problem(data: st.DataObject) -> None:
    make = _maker()
    lens = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))
    dtype, group, page, level = data.draw(st.sampled_from(_shapes()))
    p = make(lens, heads=2, group=group, dim=64, page=page, dtype=dtype, seed=data.draw(st.integers(0, 99)))
    options: dict[str, Any] = {
        "window_left": data.draw(st.sampled_from([-1, 0, 1, 15, 16, 31, 100])),
        "logits_soft_cap": data.draw(st.sampled_from([0.0, 0.7, 30.0])),
    }
    if data.draw(st.booleans()):
        options["alibi_slopes"] = np.linspace(0, 0.3, 2 * group, dtype=np.float32)
    if data.draw(st.booleans()):
        options["sinks"] = np.linspace(-2, 2, 2 * group, dtype=np.float32)
    check(p, level, split_tokens=data.draw(st.sampled_from([32, 64, 2048])), **options)


def _maker() -> Any:
    return _PROBLEM["make"]


def _levels() -> tuple[str, ...]:
    return _PROBLEM["levels"]


_PROBLEM: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _share(problem: Any, levels: tuple[str, ...]) -> None:
    """Hypothesis functions take no function-scoped fixtures; this hands the makers over."""
    _PROBLEM.update(make=problem, levels=levels)


def test_rerun_is_bit_equal(problem: Any, level: str) -> None:
    p = problem(LENS)
    first = p.run(isa=level, split_tokens=64)
    second = p.run(isa=level, split_tokens=64)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", [np.float32, np.uint16, np.float16])
def test_query_and_output_types_and_strides(problem: Any, kind: Any) -> None:
    p = problem([40, 97], dtype="fp32")

    def stored(x: np.ndarray) -> np.ndarray:
        return ck.to_bf16(x) if kind is np.uint16 else x.astype(kind)

    q = np.zeros((2, 5, 100), kind)[:, :4, :64]  # rows and heads with gaps
    q[...] = stored(p.q)
    out = np.zeros((2, 6, 80), kind)[:, 1:5, :64]
    p.plan().run(q, out)
    got = ck.from_bf16(out) if kind is np.uint16 else out.astype(np.float32)
    q_used = ck.from_bf16(np.ascontiguousarray(q)) if kind is np.uint16 else q.astype(np.float32)
    want, _ = ck.reference.decode_reference(q_used, p.k, p.v, p.table, p.lens)
    assert np.abs(got - want).max() < (2e-2 if kind is np.uint16 else 2e-3 if kind is np.float16 else 1e-5)


def test_one_plan_serves_all_layers_and_copies_its_inputs(problem: Any) -> None:
    p = problem([40, 97], num_layers=3)
    rng = np.random.default_rng(1)
    other = rng.standard_normal(p.k.shape).astype(np.float32)
    ck.pack(p.pages, 2, np.arange(p.pages.num_pages), other, -other)
    plan = p.plan()
    table, lens = p.table.copy(), p.lens.copy()
    p.table[...], p.lens[...] = -7, 0
    for layer in (0, 2):
        k, v = ck.unpack(p.pages, layer, np.arange(p.pages.num_pages))
        plan.run(p.q, p.out, p.lse, layer=layer)
        want, _ = ck.reference.decode_reference(p.q, k, v, table, lens)
        assert np.abs(p.out - want).max() < 2e-2


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "fp8"])
def test_run_appends_the_new_token_before_it_attends(problem: Any, dtype: str) -> None:
    p = problem([1, 32, 33, 150], dtype=dtype, poison=False)
    rng = np.random.default_rng(3)
    k_new, v_new = (rng.standard_normal((4, 2, 64)).astype(np.float32) for _ in range(2))
    last = p.lens - 1
    slots = p.table[np.arange(4), last // 32].astype(np.int64) * 32 + last % 32
    p.plan(slot_mapping=slots, split_tokens=64).run(p.q, p.out, p.lse, k_new=k_new, v_new=v_new)
    k, v = ck.unpack(p.pages, 0, np.arange(p.pages.num_pages))
    error = 0.2 if dtype == "fp8" else 0.03
    for i, slot in enumerate(slots.tolist()):
        assert np.abs(k[slot // 32, :, slot % 32] - k_new[i]).max() < error
        assert np.abs(v[slot // 32, :, slot % 32] - v_new[i]).max() < error
    want, _ = ck.reference.decode_reference(p.q, k, v, p.table, p.lens)
    assert np.abs(p.out - want).max() < 2e-2


def test_slot_minus_one_appends_nothing(problem: Any) -> None:
    p = problem([40, 97])
    before = p.pages.buffer.copy()
    new = np.ones((2, 2, 64), np.float32)
    p.plan(slot_mapping=[-1, -1]).run(p.q, p.out, k_new=new, v_new=new)
    assert np.array_equal(before, p.pages.buffer)


def test_lse_of_parts_merges_to_the_whole_over_the_window_boundary(problem: Any) -> None:
    """LSE is the natural log: a row's first 64 tokens and the rest, merged, are the row."""
    p = problem([200], dtype="fp32", poison=False)
    whole, whole_lse = p.run()
    parts = []
    for table, n in ((p.table[:, :2], 64), (p.table[:, 2:], 136)):
        out, lse = np.empty_like(p.out), np.empty_like(p.lse)
        ck.plan_decode(p.pages, table, [n], p.heads).run(p.q, out, lse)
        parts.append((out, lse))
    out, lse = ck.merge_state(*parts[0], *parts[1])
    assert np.abs(out - whole).max() < 1e-6 and np.abs(lse - whole_lse).max() < 1e-5
