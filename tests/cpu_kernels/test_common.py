"""Rows that begin with the same pages, against the float64 oracle, and what is read once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cpu_kernels as ck
from cpu_kernels.codegen.fields import TOGETHER, Item, Member
from cpu_kernels.common import common_beginnings, rows_at_once
from cpu_kernels.native import items_together, work_items

LENS = [200, 161, 40, 577, 330, 0, 290, 300]


def alike(problem: Any, lens: list[int], shared: dict[int, int], **options: Any) -> Any:
    """A problem in which row i begins with the first ``shared[i]`` pages of row 0."""
    p = problem(lens, poison=False, **options)
    for row, count in shared.items():
        p.table[row, :count] = p.table[0, :count]
    return p


def check(p: Any, isa: str, split: int | None = 64, **options: Any) -> None:
    out, lse = p.run(isa=isa, split_tokens=split, read_once=True, **options)
    want, want_lse = p.want(**options)
    assert np.abs(out - want).max() <= p.bound(isa, **options)
    finite = np.isfinite(want_lse)
    assert np.array_equal(np.isneginf(lse), ~finite)
    assert np.abs(lse[finite] - want_lse[finite]).max(initial=0) <= (2e-2 if p.coarse(isa) else 2e-5)


def test_every_level(problem: Any, level: str) -> None:
    dtype = {"portable": "fp32", "avx2": "int8", "avx512": "fp16", "avx512_bf16": "int8"}.get(level, "bf16")
    check(alike(problem, LENS, {1: 5, 3: 6, 4: 6, 6: 5, 7: 6}, group=3, dtype=dtype), level)


@pytest.mark.parametrize("group", [1, 9])
def test_groups(problem: Any, group: int) -> None:
    rows = rows_at_once(group)
    lens = [160 + 8 * i for i in range(rows + 2)]
    check(alike(problem, lens, dict.fromkeys(range(1, len(lens)), 4), heads=1, group=group), ck.isa.detect().level)


@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 100},
        {"window_left": 450},
        {"logits_soft_cap": 1.5},
        {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)},
        {"sinks": np.array([2.0, -1.0, 0.0, 5.0], np.float32)},
    ],
)
def test_features(problem: Any, options: dict[str, Any]) -> None:
    check(alike(problem, LENS, {1: 5, 3: 6, 4: 6, 6: 5, 7: 6}), ck.isa.detect().level, **options)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lens=st.lists(st.integers(0, 400), min_size=1, max_size=9),
    counts=st.lists(st.integers(0, 12), min_size=9, max_size=9),
    split=st.sampled_from([32, 96, 2048]),
)
def test_any_rows_share_any_pages(problem: Any, lens: list[int], counts: list[int], split: int) -> None:
    p = alike(problem, lens, {i: min(c, lens[0] // 32) for i, c in enumerate(counts[: len(lens)]) if i})
    check(p, ck.isa.detect().level, split)
    inputs = replace(p.plan(split_tokens=split).inputs, read_once=True)
    common = common_beginnings(inputs)
    own, partials = work_items(inputs, common)
    items, members = items_together(inputs, common, own, 3) if common else (own[:0], np.empty((0, 3), int))
    seen, slots = [np.zeros(n, int) for n in lens], []
    for item in own:
        seen[item[Item.SEQ]][item[Item.FIRST] : item[Item.LAST]] += 1
        if item[Item.NUM_SPLITS] > 1:
            slots.append(item[Item.PARTIAL] + item[Item.SPLIT])
    for item in items:
        assert item[Item.APPEND_SLOT] == TOGETHER and item[Item.LAST] - item[Item.FIRST] <= split
        for member in members[item[Item.PARTIAL] :][: item[Item.NUM_SPLITS]]:
            seen[member[Member.SEQ]][item[Item.FIRST] : item[Item.LAST]] += 1
            slots.append(member[Member.PARTIAL] + item[Item.SPLIT])
    assert all((s == 1).all() for s in seen) and sorted(slots) == list(range(partials))


def test_the_page_that_is_written_is_nobody_elses(problem: Any) -> None:
    """Two rows of one table: the page of the newest token is read by each row alone."""
    p = alike(problem, [192, 192], {1: 6})
    (common,) = common_beginnings(replace(p.plan().inputs, read_once=True))
    assert (common.rows.tolist(), common.tokens) == ([0, 1], 160)


def test_short_beginnings_and_rows_alone_are_read_as_before(problem: Any) -> None:
    p = alike(problem, [200, 200, 300], {1: 3})
    assert common_beginnings(replace(p.plan().inputs, read_once=True)) == []
    plain, once = p.plan(), p.plan(read_once=True)
    assert once.native.kernel == plain.native.kernel
    assert np.array_equal(plain.run(p.q)[0], once.run(p.q)[0])


@pytest.mark.filterwarnings("ignore:num_workers 2 is more than the")  # where one cpu is left
def test_new_tokens_are_appended_and_workers_agree(problem: Any) -> None:
    p = alike(problem, LENS, {1: 5, 3: 6, 4: 6, 6: 5, 7: 6}, dtype="fp32")
    k, v = (np.random.default_rng(i).standard_normal((len(LENS), 2, 64)).astype(np.float32) for i in (1, 2))
    rows = np.flatnonzero(np.array(LENS) > 0)
    slots = [
        int(p.table[i, (LENS[i] - 1) // 32]) * 32 + (LENS[i] - 1) % 32 if LENS[i] else -1 for i in range(len(LENS))
    ]
    for i in rows:
        page, at = divmod(slots[i], 32)
        p.k[page, :, at], p.v[page, :, at] = k[i], v[i]
    plan = p.plan(slot_mapping=slots, read_once=True, split_tokens=64)
    with ck.WorkerPool(2) as pool:
        job = pool.submit(plan, p.q, p.out, p.lse, k_new=k, v_new=v)
        job.wait(60)
    want, _ = p.want()
    assert np.abs(p.out - want).max() <= p.bound(plan.isa)
    again = plan.run(p.q, k_new=k, v_new=v)[0]
    assert np.array_equal(again, p.out)  # whoever computed what
