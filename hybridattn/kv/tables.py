"""From requests to the integer arrays that attention kernels take. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def block_table(block_lists: Sequence[Sequence[int]]) -> np.ndarray:
    """Pages per sequence as int32 ``[num_seqs, longest]``, padded with -1 (never read)."""
    table = np.full((len(block_lists), max((len(b) for b in block_lists), default=0) or 1), -1, np.int32)
    for row, blocks in zip(table, block_lists, strict=True):
        row[: len(blocks)] = blocks
    return table


def slots(blocks: Sequence[int], start: int, count: int, page_size: int) -> np.ndarray:
    """Where positions ``start .. start + count - 1`` live, as int64 ``page * page_size + offset``."""
    positions = np.arange(start, start + count)
    return np.asarray(blocks, np.int64)[positions // page_size] * page_size + positions % page_size
