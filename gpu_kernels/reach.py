"""Which keys a query attends to, of keys that may be one part of a sequence.

A sequence's keys stand at the positions ``key_start`` to ``key_start + seq_len - 1``, its (first) query at
``query_pos``. The kernels count from the first key, so that none of them knows of parts.
"""

from typing import Any

import torch

from gpu_kernels.checks import check_lengths, host_integers, refuse

MAX_POSITION = 2**30  # so that differences and sums of two positions fit 32 bits


def relative_query(lens: torch.Tensor, queries: Any, key_start: Any, query_pos: Any) -> torch.Tensor:
    """Position of each sequence's first query counted from its first key, int64; default: its last `queries` keys."""
    start = torch.zeros_like(lens) if key_start is None else _positions("key_start", key_start, len(lens))
    if query_pos is None:
        return lens - queries
    return _positions("query_pos", query_pos, len(lens)) - start


def sides(causal: Any, window_left: Any, window_right: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys before and after the query that each sequence attends to, int64; `MAX_POSITION` for all."""
    left, right = window("window_left", window_left, rows), window("window_right", window_right, rows)
    strict = flags("causal", causal, rows)
    clash = (strict & (right < MAX_POSITION) & (right > 0)).nonzero()
    if len(clash):
        row = int(clash[0])
        refuse("window_right", f"{int(right[row])} for sequence {row}, which is causal: give causal=False as well")
    return left, torch.where(strict, 0, right)


def span(
    lens: torch.Tensor, first: torch.Tensor, last: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allowed keys, ``begin <= j < end``, of queries from `first` to `last`; 0 and 0 where there are none."""
    begin, end = (first - left).clamp(min=0), torch.minimum(last + right + 1, lens)
    some = begin < end
    return torch.where(some, begin, 0), torch.where(some, end, 0)


def window(name: str, value: Any, rows: int) -> torch.Tensor:
    """A side of the window per sequence, int64; `MAX_POSITION` where it is off (-1 or None)."""
    if value is None:
        value = -1
    try:
        counts = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        counts = torch.empty(0, dtype=torch.bool)
    integer = not (counts.dtype.is_floating_point or counts.dtype.is_complex or counts.dtype is torch.bool)
    if not integer or tuple(counts.shape) not in ((), (rows,)):
        refuse(name, f"{value!r} is no count of keys, nor one per sequence ({rows}); -1 or None is off here")
    counts = counts.to(torch.int64).expand(rows) if counts.dim() == 0 else counts.to(torch.int64)
    lowest = int(torch.as_tensor(value).min()) if torch.as_tensor(value).numel() else 0
    if lowest < -1:
        refuse(name, f"{lowest} is no count of keys; -1 or None is off here")
    return torch.where((counts < 0) | (counts > MAX_POSITION), MAX_POSITION, counts)


def flags(name: str, value: Any, rows: int) -> torch.Tensor:
    """A switch per sequence: bool [rows] from one bool or one per sequence."""
    try:
        found = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    if found.dtype is not torch.bool or tuple(found.shape) not in ((), (rows,)):
        refuse(name, f"{value!r} is neither True nor False, nor one of them per sequence ({rows})")
    return found.expand(rows)


def _positions(name: str, values: Any, rows: int) -> torch.Tensor:
    at = host_integers(name, values, torch.int64, 1)
    if len(at) != rows:
        refuse(name, f"{len(at)} entries do not fit {rows} sequences")
    check_lengths(name, at)
    return at
