"""Rows that begin with the same pages: found in their block tables, read once for many of them.

    row a   |p0|p1|p2|a3|a4|         work items   p0 p1 p2 with the queries of a, b and c, as if they were one group
    row b   |p0|p1|p2|b3|                         a3 a4, b3, c3 c4 c5 with one query each
    row c   |p0|p1|p2|c3|c4|c5|      results      the last item of a row to end merges its parts

The page of a row's newest token is never among them, so that nobody writes to what others read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from cpu_kernels.plan import DecodeInputs

LEAST_TOKENS = 128  # a shorter beginning is not worth an item of its own
QUERIES = 16  # query heads per KV head that an item brings together, as far as more than one row does


@dataclass(frozen=True, slots=True, eq=False)
class Common:
    """Rows, int64, and how many of their first tokens lie in the same pages: whole pages."""

    rows: np.ndarray
    tokens: int


def rows_at_once(group: int) -> int:
    """Rows whose queries one item brings together, for so many query heads per KV head."""
    return max(2, QUERIES // group)


def common_beginnings(inputs: DecodeInputs) -> list[Common]:
    """Rows that share at least `LEAST_TOKENS`; each row is in one set at most.

    Rows with biases by position (ALiBi) or with a window that has left the beginning behind take no part.
    """
    size, table, reach = inputs.pages.page_size, inputs.block_table, inputs.reach
    column = -(-LEAST_TOKENS // size) - 1
    if inputs.alibi_slopes is not None or table.shape[1] <= column:
        return []
    whole = (reach.last - 1) // size  # pages before the newest key's
    able = np.flatnonzero((reach.first == 0) & (whole > column))
    order = able[np.argsort(table[able, column], kind="stable")]
    found = []
    for rows in np.split(order, np.flatnonzero(np.diff(table[order, column])) + 1):
        if len(rows) < 2:
            continue
        width = int(whole[rows].min())
        same = (table[rows, :width] == table[rows[0], :width]).all(axis=0)
        count = width if same.all() else int(np.argmin(same))
        if count > column:
            found.append(Common(rows, count * size))
    return found
