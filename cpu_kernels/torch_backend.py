"""The torch back end: gathers the pages of each row and attends with plain torch operations in float32.

Slow and simple; it is there for machines without a native level of interest, and as a second opinion in tests. Plain
pages (``KVPages(layout="plain")``) are read where they lie, one page's view after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cpu_kernels import handed
from cpu_kernels.pages import KVPages, append_kv, gather_kv
from cpu_kernels.plan import DecodeInputs

QUERY_BLOCK = 128  # queries of a prefill that are scored at once: bounds the memory of the scores


class TorchDecode:
    """Decode attention row by row with `torch`."""

    def __init__(self, inputs: DecodeInputs) -> None:
        self.inputs = inputs

    def workspace(self) -> None:
        return None

    def run(self, q: Any, out: Any, lse: Any, layer: int, k_new: Any, v_new: Any, workspace: Any) -> None:
        inputs = self.inputs
        handed.take(inputs, q, out, lse, k_new, v_new)
        if k_new is not None:
            append_kv(inputs.pages, layer, k_new, v_new, inputs.slots)
        queries, results = as_torch(q), as_torch(out)
        sums = None if lse is None else as_torch(lse)
        for row in range(inputs.num_seqs):
            o, s = self._row(row, queries[row].float(), layer)
            results[row] = o.to(results.dtype)
            if sums is not None:
                sums[row] = s

    def _row(self, row: int, q: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, reach = self.inputs, self.inputs.reach
        first, last = int(reach.first[row]), int(reach.last[row])
        if first == last:
            return torch.zeros_like(q), torch.full((len(q),), -torch.inf)
        keys, values = keys_of(inputs.pages, layer, inputs.block_table[row], first, last)
        grouped = q.view(inputs.pages.num_kv_heads, inputs.group, inputs.pages.head_dim)
        scores = self._shape(grouped @ keys.transpose(1, 2) * inputs.sm_scale, row, first, last)
        total = torch.logsumexp(scores, -1)
        if inputs.sinks is not None:
            sinks = torch.from_numpy(_of_row(inputs.sinks, row)).view_as(total)
            total = torch.where(total == -torch.inf, total, torch.logaddexp(total, sinks))
        weights = torch.exp(scores - torch.where(total == -torch.inf, 0.0, total)[..., None])
        return (weights @ values).reshape_as(q), total.reshape(-1)

    def _shape(self, scores: torch.Tensor, row: int, first: int, last: int) -> torch.Tensor:
        inputs = self.inputs
        if inputs.logits_soft_cap > 0:
            scores = inputs.logits_soft_cap * torch.tanh(scores / inputs.logits_soft_cap)
        if inputs.alibi_slopes is not None:
            slopes = torch.from_numpy(_of_row(inputs.alibi_slopes, row)).view(-1, inputs.group, 1)
            scores = scores + slopes * (torch.arange(first, last) - int(inputs.reach.query[row]))
        return scores


def keys_of(pages: KVPages, layer: int, table: np.ndarray, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the row's keys ``first`` to ``last - 1``, float32 ``[num_kv_heads, keys, head_dim]``.

    Pages before `first` are not looked at, and other keys of the first and last page are left out.
    """
    size = pages.page_size
    start = first // size
    used, count = table[start : -(-last // size)], last - start * size
    k = torch.empty(count, pages.num_kv_heads, pages.head_dim)
    v = torch.empty_like(k)
    gather_kv(pages, layer, used, count, k, v)
    return tuple(x[first - start * size :].transpose(0, 1) for x in (k, v))  # type: ignore[return-value]


def _of_row(values: np.ndarray, row: int) -> np.ndarray:
    return values[row] if values.ndim == 2 else values


def as_torch(x: Any) -> torch.Tensor:
    """View a NumPy array (uint16: bf16 bits) as a tensor that shares its memory; tensors pass through.

    A read-only array is copied: torch knows no tensor that may not be written.
    """
    if isinstance(x, torch.Tensor):
        return x
    if not x.flags.writeable:
        x = x.copy()
    if x.dtype == np.uint16 or x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def make(inputs: DecodeInputs, isa: str | None) -> TorchDecode:
    """Build the torch back end (it has no ISA level to choose)."""
    if isa is not None:
        raise ValueError(f"isa={isa!r} has no meaning for backend 'torch'")
    return TorchDecode(inputs)


def prefill(inputs: DecodeInputs, q: Any, out: Any, lse: Any, layer: int, counts: np.ndarray) -> None:
    """Attention of several queries a sequence: matrix products over gathered pages, a block of queries at a time.

    Where a key or value is not finite, a masked one would be multiplied by a weight of 0 and still be NaN: then the
    queries are computed one by one over exactly their keys.

    Parameters
    ----------
    inputs : DecodeInputs
        One row per query, the rows of a sequence one after the other.
    counts : int ``[num_seqs]``
        Queries of each sequence.
    """
    handed.take(inputs, q, out, lse, None, None)
    queries, results, rows = as_torch(q), as_torch(out), TorchDecode(inputs)
    sums = None if lse is None else as_torch(lse)
    start = 0
    for count in counts.tolist():
        for at in range(start, start + count, QUERY_BLOCK):
            some = slice(at, min(at + QUERY_BLOCK, start + count))
            found = _block(inputs, queries[some].float(), layer, some)
            if found is None:
                each = [rows._row(row, queries[row].float(), layer) for row in range(some.start, some.stop)]
                found = torch.stack([o for o, _ in each]), torch.stack([s for _, s in each])
            results[some] = found[0].to(results.dtype)
            if sums is not None:
                sums[some] = found[1]
        start += count


def _block(inputs: DecodeInputs, q: torch.Tensor, layer: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attend with some queries of one sequence at once; None where a key or value is not finite."""
    reach, pages, group = inputs.reach, inputs.pages, inputs.group
    low, high, query = (torch.from_numpy(x[rows]) for x in (reach.first, reach.last, reach.query))
    some = low < high
    if not some.any():
        return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
    first, last = int(low[some].min()), int(high.max())
    k, v = keys_of(pages, layer, inputs.block_table[rows.start], first, last)
    if not (torch.isfinite(k).all() and torch.isfinite(v).all()):
        return None
    shape = (pages.num_kv_heads, len(q), group)  # of the queries: [kv heads, rows, group]
    grouped = q.view(len(q), pages.num_kv_heads, group, -1).transpose(0, 1).reshape(shape[0], len(q) * group, -1)
    scores = (grouped @ k.transpose(1, 2) * inputs.sm_scale).view(*shape, last - first)
    if inputs.logits_soft_cap > 0:
        scores = inputs.logits_soft_cap * torch.tanh(scores / inputs.logits_soft_cap)
    at = torch.arange(first, last)
    if inputs.alibi_slopes is not None:
        slopes = _of_rows(inputs.alibi_slopes, rows, shape)
        scores = scores + slopes[..., None] * (at[None] - query[:, None])[None, :, None]
    allowed = (at >= low[:, None]) & (at < high[:, None])
    scores = scores.masked_fill(~allowed[None, :, None], -torch.inf)
    total = torch.logsumexp(scores, -1)
    if inputs.sinks is not None:
        sinks = _of_rows(inputs.sinks, rows, shape)
        total = torch.where(total == -torch.inf, total, torch.logaddexp(total, sinks))
    weights = torch.exp(scores - torch.where(total == -torch.inf, 0.0, total)[..., None])
    o = weights.view(shape[0], -1, last - first) @ v
    return o.view(*shape, -1).transpose(0, 1).reshape(q.shape), total.transpose(0, 1).reshape(q.shape[:2])


def _of_rows(values: np.ndarray, rows: slice, shape: tuple[int, int, int]) -> torch.Tensor:
    """Values per head, or per row and head, as ``[kv heads, rows, group]``."""
    mine = torch.from_numpy(values[rows] if values.ndim == 2 else values[None])
    return mine.view(-1, shape[0], shape[2]).transpose(0, 1).expand(shape)
