"""Contiguous slot ranges of the residual and exchange slabs: one range per micro-batch."""

from __future__ import annotations


class SlotRanges:
    """First fit over ``0 .. capacity - 1``. When no free range is long enough, the longest one is given: the caller
    dispatches fewer rows now and the rest later. With nothing taken the whole slab is one range, so it never gets
    stuck."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free: list[tuple[int, int]] = [(0, capacity)]  # (first, length), sorted, never adjacent

    def take(self, count: int) -> tuple[int, int]:
        """(first slot, length <= count); length 0 when the slab is full."""
        if not self._free or count < 1:
            return 0, 0
        at = next((i for i, (_, length) in enumerate(self._free) if length >= count), None)
        if at is None:
            at = max(range(len(self._free)), key=lambda i: self._free[i][1])
        first, length = self._free.pop(at)
        given = min(count, length)
        if given < length:
            self._free.insert(at, (first + given, length - given))
        return first, given

    def give_back(self, first: int, count: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (first, count)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged
