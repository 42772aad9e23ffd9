"""Merging attention results over disjoint sets of keys, for NumPy arrays and torch tensors.

With ``m = max(lse_i)`` and ``w_i = exp(lse_i - m)``: ``out = sum(w_i out_i) / sum(w_i)``, ``lse = m + log(sum(w_i))``.
An empty part (lse -inf) changes nothing, bit for bit; merging only empty parts gives an empty result. Sinks belong to
one part only (they are in its lse).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cpu_kernels.arrays import from_bf16, to_bf16


def _to_numpy(x: Any) -> np.ndarray:
    """Return float32 values of a NumPy array (uint16: bf16 bits) or a torch tensor."""
    if isinstance(x, np.ndarray):
        return from_bf16(x) if x.dtype == np.uint16 else x.astype(np.float32, copy=False)
    return x.detach().float().numpy()


def _like(x: np.ndarray, model: Any) -> Any:
    """Return `x` as the kind and dtype of `model`."""
    if isinstance(model, np.ndarray):
        return to_bf16(x) if model.dtype == np.uint16 else x.astype(model.dtype, copy=False)
    full = model.detach().float().new_empty(x.shape)
    full.numpy()[...] = x
    return full.to(model.dtype)


def merge_states(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Merge any number of partial results.

    Parameters
    ----------
    outs : sequence of array ``[n, num_heads, head_dim]``
        NumPy (fp32, uint16 as bf16) or torch, all alike.
    lses : sequence of float32 array ``[n, num_heads]``
        Natural logs; -inf marks an empty part, whose out is not read.

    Returns
    -------
    out, lse : as the first of the inputs

    Raises
    ------
    ValueError
        If there are no parts or shapes differ.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"merge_states got {len(outs)} outs and {len(lses)} lses; expected as many, at least one")
    out, lse = _to_numpy(outs[0]), _to_numpy(lses[0])
    for number, (o, s) in enumerate(zip(outs, lses, strict=True)):
        if tuple(o.shape) != out.shape or tuple(s.shape) != out.shape[:-1]:
            raise ValueError(
                f"part {number} has out {list(o.shape)} and lse {list(s.shape)}, expected {list(out.shape)} and "
                f"{list(out.shape[:-1])}"
            )
    for o, s in zip(outs[1:], lses[1:], strict=True):
        out, lse = _merge_two(out, lse, _to_numpy(o), _to_numpy(s))
    return _like(out, outs[0]), _like(lse, lses[0])


def _merge_two(a: np.ndarray, lse_a: np.ndarray, b: np.ndarray, lse_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    top = np.maximum(lse_a, lse_b)
    base = np.where(np.isneginf(top), np.float32(0), top)
    wa, wb = np.exp(lse_a - base), np.exp(lse_b - base)
    mass = wa + wb
    safe = np.where(mass == 0, np.float32(1), mass)
    # An empty part's out may be anything: give it no chance to meet a weight of 0.
    mixed = _weighted(a, wa, safe) + _weighted(b, wb, safe)
    only_a, only_b = np.isneginf(lse_b), np.isneginf(lse_a) & ~np.isneginf(lse_b)
    out = np.where(only_b[..., None], b, np.where(only_a[..., None], a, mixed))
    empty = np.isneginf(top)
    out = np.where(empty[..., None], np.float32(0), out)
    lse = np.where(only_b, lse_b, np.where(only_a, lse_a, base + np.log(safe)))
    return out.astype(np.float32, copy=False), lse.astype(np.float32, copy=False)


def _weighted(x: np.ndarray, weight: np.ndarray, mass: np.ndarray) -> np.ndarray:
    return np.where((weight == 0)[..., None], np.float32(0), x) * (weight / mass)[..., None]


def merge_state(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Merge two partial results; see `merge_states`."""
    return merge_states((out_a, out_b), (lse_a, lse_b))
