"""Integers that stay on the card, against those that are laid out anew."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.page_table import PageTable
from hybridattn.core.stages import Segment
from hybridattn.models.resident_rows import ResidentRows

ROWS, PAGE, SPLIT, LONGEST = 5, 16, 64, 400
WINDOWS = (None, 70)
ITEMS = ROWS * (LONGEST // SPLIT + 2)


def laid_out(window, lengths):
    """spans, and the splits of each row."""
    spans = [(max(0, n - window) if window is not None and n else 0, n, max(n - 1, 0)) for n in lengths]
    splits = [list(range(b // SPLIT, max(-(-e // SPLIT), b // SPLIT + 1))) for b, e, _ in spans]
    return [list(s) if s[1] else [0, 0, 0] for s in spans], splits


def check(rows, segments):
    lengths = [s.start + 1 - s.hot_from for s in segments] + [0] * (ROWS - len(segments))
    for i, s in enumerate(segments):
        pages = s.request.pages.hot
        assert rows.table[i, : len(pages)].tolist() == pages
        newest = s.start - s.hot_from
        assert rows.slots[i] == pages[newest // PAGE] * PAGE + newest % PAGE
    assert (rows.slots[len(segments) :] == -1).all() and np.array_equal(rows.host_slots, rows.slots)
    assert rows._ids[:, : len(segments)].tolist() == [
        [s.request.token_ids[s.start] for s in segments],
        [s.start for s in segments],
    ]
    for window in WINDOWS:
        mine = rows.integers(window)
        spans, splits = laid_out(window, lengths)
        starts = mine.part_start.tolist()
        assert mine.spans.tolist() == spans
        for i in range(ROWS):
            assert mine.item_split[starts[i] : starts[i + 1]].tolist() == splits[i]
            assert (mine.item_seq[starts[i] : starts[i + 1]] == i).all()
        assert (mine.item_split[starts[ROWS] :] * SPLIT > LONGEST).all()
        assert rows.num_parts(window, ROWS) == sum(map(len, splits))


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_what_is_written_is_what_a_new_plan_would_lay_out(data):
    """Rows come, go, move on, change places, and get other pages (moved, or begun anew), in any order."""
    ids = torch.zeros(2, ROWS + 3, dtype=torch.int64)
    rows = ResidentRows(
        ROWS, LONGEST // PAGE + 1, ITEMS, WINDOWS, PAGE, SPLIT, ids, lambda n: torch.zeros(n, dtype=torch.int32)
    )
    fresh = iter(range(10**6))
    alive = []
    for _ in range(8):
        for _ in range(data.draw(st.integers(0 if alive else 1, ROWS - len(alive)))):
            length = data.draw(st.integers(1, LONGEST - 20))
            cold = data.draw(st.integers(0, (length - 1) // PAGE))
            table = PageTable([0] * cold, [next(fresh) for _ in range(-(-length // PAGE) - cold)])
            alive.append(SimpleNamespace(request_id="r", pages=table, token_ids=list(range(7, 7 + length))))
        for request in alive:
            if data.draw(st.integers(0, 5)) == 0:
                request.pages.hot = [next(fresh) for _ in request.pages.hot]
        segments = tuple(
            Segment(r, "gpu", len(r.token_ids) - 1, 1, True, False, PAGE * len(r.pages.cold), PAGE * r.pages.gone)
            for r in alive
        )
        rows.plan(segments)()
        check(rows, segments)
        for request in alive:
            for _ in range(data.draw(st.sampled_from([1, 1, 1, 2]))):
                request.token_ids.append(len(request.token_ids))
            if (request.pages.gone + len(request.pages)) * PAGE < len(request.token_ids):
                request.pages.append("gpu", [next(fresh)])
            if len(request.pages.hot) > 1 and data.draw(st.integers(0, 4)) == 0:  # a window leaves pages behind
                request.pages.leave_behind(request.pages.gone + len(request.pages.cold) + 1)
        alive = [r for r in alive if len(r.token_ids) < LONGEST and data.draw(st.integers(0, 4))]
        if data.draw(st.booleans()):
            alive.reverse()
