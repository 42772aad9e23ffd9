"""Integers of decode rows that stay on the card: from step to step only what changed is written.

    host    segments -> one block: slots, spans, work items (numpy; rebuilt where a sequence begins a new split)
    card    the same block, one copy a step | tokens, positions | block table: pages that came since, nothing else

Row i of everything is segment i of the step. Rows past those present are empty sequences: they attend to nothing and
write nowhere, so that a plan for more rows than there are, or a graph of it, may run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu_kernels.resident import DecodeIntegers
from hybridattn.core.stages import Segment

_NEVER = 1 << 20  # a split that no sequence has
_MOST_ENTRIES = 256  # of the table in one step; more are written row by row


class _Window(NamedTuple):
    """What the rows of one attention window need, for kernels that cut keys into splits: parts of a block."""

    spans: Any  # array or tensor, as the block is
    part_start: Any
    item_seq: Any
    item_split: Any

    @classmethod
    def of(cls, block: Any, at: int, rows: int, items: int) -> _Window:
        parts = []
        for count in (3 * rows, rows + 1, items, items):
            parts.append(block[at : at + count])
            at += _padded(count)
        return cls(parts[0].reshape(rows, 3), *parts[1:])

    @staticmethod
    def size(rows: int, items: int) -> int:
        return sum([_padded(n) for n in (3 * rows, rows + 1, items, items)])


class ResidentRows:
    """Up to ``rows`` decode rows.

    Parameters
    ----------
    items : work items at most; more than the pages of the tier can need
    windows : of the model's layers, None for all keys
    split_tokens : keys of a work item
    ids : int64 ``[2, n]`` on the card, ``n >= rows``: token ids and positions go to the front of its rows

    Attributes
    ----------
    slots : int64 ``[rows]`` on the card: where each row's K,V go, -1 for nowhere
    """

    def __init__(
        self, rows: int, max_pages: int, items: int, windows: Iterable[int | None], page_size: int, split_tokens: int,
        ids: torch.Tensor, pinned: Callable[[int], torch.Tensor],
    ) -> None:  # fmt: skip
        self.rows, self.items, self._page, self._split, self._ids = rows, items, page_size, split_tokens, ids
        self.num_rows = 0
        windows = list(dict.fromkeys(windows))
        # int32: tokens, positions and slots are pairs of them; then the windows; then places and pages of new entries
        self._places = 6 * rows + len(windows) * _Window.size(rows, items)
        size = self._places + 3 * _MOST_ENTRIES
        self._host = np.zeros(size, np.int32)
        self._tokens, self._positions, self._slots = self._host[: 6 * rows].view(np.int64).reshape(3, rows)
        self._slots[:] = -1
        self._staged, self._turn = [pinned(size) for _ in range(2)], 0
        card = torch.zeros(size, dtype=torch.int32, device=ids.device)
        self._card = card[4 * rows :]
        self.slots = card[4 * rows : 6 * rows].view(torch.int64)
        self._new_at = card[self._places : self._places + 2 * _MOST_ENTRIES].view(torch.int64)
        self._new_pages = card[self._places + 2 * _MOST_ENTRIES :]
        self._table = np.full((rows, max_pages), -1, np.int32)
        self.table = torch.full((rows, max_pages), -1, dtype=torch.int32, device=ids.device)
        self._windows: dict[int | None, _Window] = {}
        self._integers: dict[int | None, DecodeIntegers] = {}
        for i, window in enumerate(windows):
            at = 6 * rows + i * _Window.size(rows, items)
            self._windows[window] = host = _Window.of(self._host, at, rows, items)
            mine = _Window.of(card, at, rows, items)
            self._integers[window] = DecodeIntegers(
                mine.item_seq, mine.item_split, mine.part_start, self.table, mine.spans
            )
            self._lay_out(host, np.zeros(rows, np.int64), np.ones(rows, np.int64))
        card.copy_(torch.from_numpy(self._host))
        self._counts = {window: np.ones(rows, np.int64) for window in windows}
        self._firsts = {window: np.zeros(rows, np.int64) for window in windows}
        self._requests: list[Any] = []  # of the rows
        self._lists: list[list[int]] = []  # of pages, of the rows: these are only ever extended, or replaced
        self._lengths: list[int] = []

    @property
    def host_slots(self) -> np.ndarray:
        """``slots`` as planned, int64 ``[rows]``."""
        return self._slots

    @property
    def nbytes(self) -> int:
        return 4 * self._host.size + self.table.nbytes

    def integers(self, window: int | None) -> DecodeIntegers:
        return self._integers[window]

    def num_parts(self, window: int | None, rows: int) -> int:
        """Work items of the first ``rows`` rows, empty ones included."""
        return int(self._windows[window].part_start[rows])

    # -- on the host -------------------------------------------------------------------------------------------------

    def plan(self, segments: Sequence[Segment], latest: torch.Tensor | None = None) -> Callable[[], None]:
        """These are the rows from now on. What is returned writes it on the card, on the current stream; the plan after
        the next must not be made before it has run.

        Where tokens are unseen, they are those of ``latest``, int64 on the card in order of the rows planned before.
        """
        before, self.num_rows = self.num_rows, len(segments)
        n = self.num_rows
        unseen = segments[0].unseen > 0  # then all are: nothing but decode rows follows such a step
        places = {id(request): i for i, request in enumerate(self._requests)} if unseen else {}
        self._requests = [s.request for s in segments]
        positions = self._positions[:n]
        positions[:] = [s.start for s in segments]
        self._tokens[:n] = [places[id(s.request)] if unseen else s.request.token_ids[s.start] for s in segments]
        entries = self._follow_pages([s.request.pages.hot for s in segments])
        newest = positions - [s.hot_from for s in segments]  # counted from the first key on the card
        pages = self._table[np.arange(n), newest // self._page]
        self._slots[:n] = pages.astype(np.int64) * self._page + newest % self._page
        self._slots[n:before] = -1
        for window, mine in self._windows.items():
            self._span(window, mine, newest, before)
        return self._to_write(entries, latest if unseen else None)

    def _span(self, window: int | None, mine: _Window, newest: np.ndarray, before: int) -> None:
        """Keys of each row, and its splits where those are others than before."""
        n, counts, firsts = len(newest), self._counts[window], self._firsts[window]
        begin = np.maximum(newest + 1 - window, 0) if window is not None else np.zeros_like(newest)
        mine.spans[:n, 0], mine.spans[:n, 1], mine.spans[:n, 2] = begin, newest + 1, newest
        mine.spans[n:before] = 0
        first = begin // self._split
        count = newest // self._split + 1 - first
        same = n == before and np.array_equal(first, firsts[:n]) and np.array_equal(count, counts[:n])
        if not same:
            firsts[:n], counts[:n] = first, count
            firsts[n:], counts[n:] = 0, 1
            self._lay_out(mine, firsts, counts)

    @staticmethod
    def _lay_out(mine: _Window, firsts: np.ndarray, counts: np.ndarray) -> None:
        """Work items in order of the rows."""
        mine.part_start[1:] = np.cumsum(counts)
        total = mine.part_start[-1]
        seq = np.repeat(np.arange(len(counts)), counts)
        mine.item_seq[:total] = seq
        mine.item_split[:total] = np.arange(total) - mine.part_start[seq] + firsts[seq]
        mine.item_seq[total:], mine.item_split[total:] = 0, _NEVER

    def _follow_pages(self, lists: list[list[int]]) -> list[tuple[int, int, int]] | None:
        """Bring the table up to date: (row, first column, one past the last) that were written; None: all rows."""
        lengths = [len(pages) for pages in lists]
        same = len(lists) == len(self._lists) and all(map(operator.is_, lists, self._lists))
        written: list[tuple[int, int, int]] | None = []
        if same and lengths != self._lengths:
            written = [(i, a, b) for i, (a, b) in enumerate(zip(self._lengths, lengths, strict=True)) if a != b]
            for i, a, b in written:
                self._table[i, a:b] = lists[i][a:b]
        elif not same:
            written = None
            self._rearrange(lists, lengths)
        self._lists, self._lengths = lists, lengths
        return written

    def _rearrange(self, lists: list[list[int]], lengths: list[int]) -> None:
        """Other rows than before: those that stay keep what is known of them."""
        known = {id(pages): i for i, pages in enumerate(self._lists)}
        here = [(i, known[id(pages)]) for i, pages in enumerate(lists) if id(pages) in known]
        width = max(lengths)
        moved = self._table[[old for _, old in here], :width]
        for (i, old), row in zip(here, moved, strict=True):
            a = self._lengths[old]
            self._table[i, :a] = row[:a]
            self._table[i, a : lengths[i]] = lists[i][a:]
        for i in set(range(len(lists))) - {i for i, _ in here}:
            self._table[i, : lengths[i]] = lists[i]

    # -- onto the card -----------------------------------------------------------------------------------------------

    def _to_write(self, entries: list[tuple[int, int, int]] | None, latest: torch.Tensor | None) -> Callable[[], None]:
        new = 0 if entries is None else sum([b - a for _, a, b in entries])
        whole = entries is None or new > _MOST_ENTRIES
        if entries and not whole:
            width = self._table.shape[1]
            at = np.concatenate([np.arange(i * width + a, i * width + b) for i, a, b in entries])
            self._host[self._places : self._places + 2 * new].view(np.int64)[:] = at
            pages = self._host[self._places + 2 * _MOST_ENTRIES :]
            pages[:new] = self._table.reshape(-1)[at]
        table = self._pinned_rows() if whole else None
        staged, self._turn = self._staged[self._turn], 1 - self._turn
        staged.numpy()[:] = self._host
        n, ids = self.num_rows, staged[: 4 * self.rows].view(torch.int64).view(2, self.rows)

        def write() -> None:
            self._card.copy_(staged[4 * self.rows :], non_blocking=True)
            self._ids[0, :n].copy_(ids[0, :n], non_blocking=True)
            self._ids[1, :n].copy_(ids[1, :n], non_blocking=True)
            if latest is not None:
                self._ids[0, :n] = latest[self._ids[0, :n]]
            if table is not None:
                self.table[: len(table)].copy_(table, non_blocking=True)
            elif new:
                self.table.view(-1).scatter_(0, self._new_at[:new], self._new_pages[:new])

        return write

    def _pinned_rows(self) -> torch.Tensor:
        host = torch.from_numpy(self._table[: self.num_rows].copy())
        return host.pin_memory() if self.table.is_cuda else host


def _padded(count: int) -> int:
    """Parts of a block begin 16-byte aligned."""
    return -(-count // 4) * 4
