"""Which keys a query attends to, of keys that may be one part of a sequence.

A row's keys stand at the positions ``key_start`` to ``key_start + seq_len - 1``, its query at ``query_pos``::

    sequence          0 . . . . . . . . . . . . . . . . query
    a cold part       |key_start=0      |                      window and ALiBi count from the query's position,
    a hot part                          |key_start     |       wherever the part begins

Everything after this file counts from the row's own first key, so no kernel knows of parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_kernels.arrays import integers

MAX_POSITION = 2**30  # so that differences and sums of two positions fit 32 bits


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """Rows of queries, int64 ``[n]`` each, counted from the row's first key.

    Attributes
    ----------
    query : ndarray
        Position of the query; may lie outside of the row's keys.
    first, last : ndarray
        The allowed keys, ``first <= j < last``; 0 and 0 where there are none.
    """

    query: np.ndarray
    first: np.ndarray
    last: np.ndarray


def reach_of(
    lens: np.ndarray, key_start: Any, query_pos: Any, causal: Any, window_left: Any, window_right: Any
) -> Reach:
    """Find the allowed keys of rows of one query each; the arguments are those of `plan_decode`.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, the sequence and the numbers.
    """
    count = lens.astype(np.int64)
    return reach_at(
        count, relative_query(count, key_start, query_pos, 1), *sides(causal, window_left, window_right, len(count))
    )


def relative_query(count: np.ndarray, key_start: Any, query_pos: Any, queries: Any) -> np.ndarray:
    """Position of each row's first query, counted from the row's first key."""
    if key_start is None and query_pos is None:
        return count - queries
    start = np.zeros_like(count) if key_start is None else _positions("key_start", key_start, len(count))
    if query_pos is None:
        return count - queries
    return _positions("query_pos", query_pos, len(count)) - start


def sides(causal: Any, window_left: Any, window_right: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys before and after the query that each row attends to, int64; `MAX_POSITION` for all."""
    left, right = window("window_left", window_left, rows), window("window_right", window_right, rows)
    strict = flags("causal", causal, rows)
    clash = strict & (right < MAX_POSITION) & (right > 0)
    if clash.any():
        row = int(np.argmax(clash))
        raise ValueError(f"window_right is {right[row]} for sequence {row}, which is causal: give causal=False as well")
    return left, np.where(strict, 0, right)


def reach_at(count: np.ndarray, query: np.ndarray, left: np.ndarray, right: np.ndarray) -> Reach:
    """Cut the keys that stand within `left` and `right` of each query out of the row's `count` keys."""
    first, last = np.maximum(query - left, 0), np.minimum(query + right + 1, count)
    some = first < last
    return Reach(query, np.where(some, first, 0), np.where(some, last, 0))


def window(name: str, value: Any, rows: int) -> np.ndarray:
    """A side of the window per row, int64; `MAX_POSITION` where it is off (-1 or None)."""
    if value is None:
        value = -1
    kind = np.asarray(value).dtype.kind if not isinstance(value, (str, bytes)) else "S"
    ndim = 0 if np.ndim(value) == 0 else 1
    if kind not in "iu" or ndim and np.shape(value) != (rows,):
        raise TypeError(
            f"{name} is {value!r}, expected a count of keys, or one per sequence ({rows}); -1 or None is off here"
        )
    counts = np.broadcast_to(np.asarray(value, np.int64), (rows,))
    if np.min(np.asarray(value), initial=0) < -1:
        raise ValueError(
            f"{name} is {int(np.min(np.asarray(value)))}, expected a count of keys; -1 or None is off here"
        )
    return np.where((counts < 0) | (counts > MAX_POSITION), MAX_POSITION, counts)


def flags(name: str, value: Any, rows: int) -> np.ndarray:
    """A switch per row: bool ``[rows]`` from one bool or one per row."""
    source = np.asarray(value.cpu() if hasattr(value, "data_ptr") and hasattr(value, "cpu") else value)
    if source.dtype.kind != "b" or source.shape not in ((), (rows,)):
        raise TypeError(f"{name} is {value!r}, expected True or False, or one per sequence ({rows})")
    return np.broadcast_to(source, (rows,))


def _positions(name: str, values: Any, rows: int) -> np.ndarray:
    at = integers(name, values, np.int64, 1)
    if len(at) != rows:
        raise ValueError(f"{name} has {len(at)} entries, but there are {rows} sequences")
    if len(at) and (at.min() < 0 or at.max() >= MAX_POSITION):
        seq = int(np.argmax((at < 0) | (at >= MAX_POSITION)))
        raise ValueError(f"{name}[{seq}] is {at[seq]}, expected a position from 0 to {MAX_POSITION - 1}")
    return at
