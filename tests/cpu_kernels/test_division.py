"""Division of the work: every token once, fixed splits, chunks of about equal bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu_kernels as ck
from cpu_kernels.codegen.fields import Item
from cpu_kernels.native import chunk_edges, heads_per_unit, work_items
from cpu_kernels.plan import DecodeInputs
from cpu_kernels.reach import reach_of
from cpu_kernels.tuning import TABLE


def inputs(lens: list[int], window: int, split: int) -> DecodeInputs:
    pages = ck.KVPages(1, 1, 16, 16, touch=False, huge_pages=False)
    n = len(lens)
    table = np.zeros((n, 1), np.int32)
    reach = reach_of(np.array(lens), None, None, True, window, None)
    return DecodeInputs(pages, table, np.array(lens, np.int32), reach, np.arange(n), 1, 1, 1.0, 0.0, None, None, split)


@settings(deadline=None, max_examples=150)
@given(
    lens=st.lists(st.integers(0, 500), min_size=1, max_size=8),
    window=st.sampled_from([-1, 0, 5, 64, 1000]),
    split=st.sampled_from([16, 64, 2048]),
)
def test_every_allowed_token_is_in_exactly_one_item(lens: list[int], window: int, split: int) -> None:
    items, partials = work_items(inputs(lens, window, split))
    seen = [np.zeros(n, int) for n in lens]
    for row in items:
        first, last = row[Item.FIRST], row[Item.LAST]
        assert last - first <= split and (first == last or first // split == (last - 1) // split)
        seen[row[Item.SEQ]][first:last] += 1
        assert row[Item.SEQ_LEN] == lens[row[Item.SEQ]]
    for n, counts in zip(lens, seen, strict=True):
        begin = 0 if window < 0 else max(0, n - 1 - window)
        assert not counts[:begin].any() and (counts[begin:] == 1).all()
    slots = [row[Item.PARTIAL] + row[Item.SPLIT] for row in items if row[Item.NUM_SPLITS] > 1]
    assert sorted(slots) == list(range(partials))
    for seq in range(len(lens)):
        mine = items[items[:, Item.SEQ] == seq]
        assert len(mine) == mine[0, Item.NUM_SPLITS] and sorted(mine[:, Item.SPLIT]) == list(range(len(mine)))
        assert (mine[:, Item.APPEND_SLOT] >= 0).sum() == 1 and mine[-1, Item.APPEND_SLOT] == seq


@settings(deadline=None, max_examples=100)
@given(
    lens=st.lists(st.integers(0, 5000), min_size=1, max_size=20),
    heads=st.sampled_from([1, 3, 8, 40]),
    group=st.sampled_from([1, 3, 4]),
)
def test_chunks_cover_all_units_in_order(lens: list[int], heads: int, group: int) -> None:
    items, _ = work_items(inputs(lens, -1, 2048))
    per_unit = heads_per_unit(items, heads, 512, group, TABLE)
    assert 1 <= per_unit <= heads
    units = -(-heads // per_unit)
    edges = chunk_edges(items, units, per_unit * 512, TABLE.chunk_bytes)
    assert edges[0] == 0 and edges[-1] == len(items) * units and (np.diff(edges) > 0).all()


def test_long_rows_are_shared_out_and_short_ones_gathered() -> None:
    items, _ = work_items(inputs([131_072], -1, 2048))
    edges = chunk_edges(items, 8, 512, TABLE.chunk_bytes)
    assert len(items) == 64 and len(edges) - 1 > 64
    items, _ = work_items(inputs([100] * 256, -1, 2048))
    edges = chunk_edges(items, 8, 512, TABLE.chunk_bytes)
    costs = np.diff(edges) * 100 * 512
    assert costs.max() <= TABLE.chunk_bytes + 100 * 512 and len(edges) - 1 < 256


@pytest.mark.parametrize("heads", [8, 64])
def test_a_single_short_row_is_still_divided(heads: int) -> None:
    items, _ = work_items(inputs([2000], -1, 2048))
    assert -(-heads // heads_per_unit(items, heads, 512, 1, TABLE)) >= 8
