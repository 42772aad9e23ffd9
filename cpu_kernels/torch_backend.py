"""The torch back end: gathers the pages of each row and attends with plain torch operations in float32.

Slow and simple; it is there for machines without a native level of interest, and as a second opinion in tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cpu_kernels.pages import KVPages, append_kv, gather_kv
from cpu_kernels.plan import DecodeInputs


class TorchDecode:
    """Decode attention row by row with `torch`."""

    def __init__(self, inputs: DecodeInputs) -> None:
        self.inputs = inputs

    def workspace(self) -> None:
        return None

    def run(self, q: Any, out: Any, lse: Any, layer: int, k_new: Any, v_new: Any, workspace: Any) -> None:
        inputs = self.inputs
        if (k_new is None) != (v_new is None):
            raise ValueError("k_new and v_new come together; one of them is missing")
        if k_new is not None:
            append_kv(inputs.pages, layer, k_new, v_new, inputs.slots)
        queries, results = as_torch(q), as_torch(out)
        shape = (inputs.num_seqs, inputs.num_q_heads, inputs.pages.head_dim)
        for name, x in (("q", queries), ("out", results)):
            if tuple(x.shape) != shape:
                raise ValueError(f"{name} has shape {list(x.shape)}, expected {list(shape)}")
        sums = None if lse is None else as_torch(lse)
        for row, length in enumerate(inputs.seq_lens.tolist()):
            o, s = self._row(row, length, queries[row].float(), layer)
            results[row] = o.to(results.dtype)
            if sums is not None:
                sums[row] = s

    def _row(self, row: int, length: int, q: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, pages = self.inputs, self.inputs.pages
        first = int(inputs.first_keys()[row])
        if length == 0:
            return torch.zeros_like(q), torch.full((len(q),), -torch.inf)
        used = inputs.block_table[row, : -(-length // pages.page_size)]
        k = torch.empty(length, pages.num_kv_heads, pages.head_dim)
        v = torch.empty_like(k)
        gather_kv(pages, layer, used, length, k, v)
        keys, values = (x[first:].transpose(0, 1) for x in (k, v))  # [kv heads, keys, head_dim]
        grouped = q.view(pages.num_kv_heads, inputs.group, pages.head_dim)
        scores = self._shape(grouped @ keys.transpose(1, 2) * inputs.sm_scale, length, first)
        total = torch.logsumexp(scores, -1)
        if inputs.sinks is not None:
            total = torch.logaddexp(total, torch.from_numpy(inputs.sinks).view_as(total))
        weights = torch.exp(scores - total[..., None])
        return (weights @ values).reshape_as(q), total.reshape(-1)

    def _shape(self, scores: torch.Tensor, length: int, first: int) -> torch.Tensor:
        inputs = self.inputs
        if inputs.logits_soft_cap > 0:
            scores = inputs.logits_soft_cap * torch.tanh(scores / inputs.logits_soft_cap)
        if inputs.alibi_slopes is not None:
            slopes = torch.from_numpy(inputs.alibi_slopes).view(-1, inputs.group, 1)
            scores = scores + slopes * torch.arange(first - length + 1, 1)
        return scores


def as_torch(x: Any) -> torch.Tensor:
    """View a NumPy array (uint16: bf16 bits) as a tensor that shares its memory; tensors pass through."""
    if isinstance(x, torch.Tensor):
        return x
    if x.dtype == np.uint16 or x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def make(inputs: DecodeInputs, isa: str | None) -> TorchDecode:
    """Build the torch back end (it has no ISA level to choose)."""
    if isa is not None:
        raise ValueError(f"isa={isa!r} has no meaning for backend 'torch'")
    return TorchDecode(inputs)


def prefill(
    pages: KVPages,
    q: Any,
    out: Any,
    table: np.ndarray,
    lens: np.ndarray,
    query_lens: np.ndarray,
    layer: int,
    lse: Any,
    options: dict[str, Any],
) -> None:
    """Causal attention by scaled-dot-product attention over gathered pages; see `cpu_kernels.prefill.prefill`."""
    scale, window = options.pop("sm_scale", None), options.pop("window_left", -1)
    unsupported = [name for name, value in options.items() if value is not None and value != 0]
    if lse is not None or unsupported:
        raise ValueError(f"the torch prefill has no {', '.join(unsupported) or 'lse'}; use backend='native'")
    queries, results = as_torch(q), as_torch(out)
    start = 0
    for row, (length, count) in enumerate(zip(lens.tolist(), query_lens.tolist(), strict=True)):
        if count:
            k = torch.empty(length, pages.num_kv_heads, pages.head_dim)
            v = torch.empty_like(k)
            gather_kv(pages, layer, table[row, : -(-length // pages.page_size)], length, k, v)
            mine = queries[start : start + count].float().transpose(0, 1)
            o = torch.nn.functional.scaled_dot_product_attention(
                mine[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                attn_mask=_causal(length, count, window),
                scale=scale,
                enable_gqa=True,
            )
            results[start : start + count] = o[0].transpose(0, 1).to(results.dtype)
            start += count


def _causal(length: int, count: int, window: int) -> torch.Tensor:
    """Mask ``[count, length]``: keys up to the query's position, and at most `window` before it."""
    distance = torch.arange(length - count, length)[:, None] - torch.arange(length)[None]
    return (distance >= 0) if window < 0 else (distance >= 0) & (distance <= window)
