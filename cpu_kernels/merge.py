"""Merging attention results over disjoint sets of keys, for NumPy arrays and torch tensors.

With ``m = max(lse_i)`` and ``w_i = exp(lse_i - m)``: ``out = sum(w_i out_i) / sum(w_i)``, ``lse = m + log(sum(w_i))``.
An empty part (lse -inf, or +inf as some libraries write it) changes nothing, bit for bit; merging only empty parts
gives an empty result. Sinks belong to one part only (they are in its lse).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cpu_kernels.arrays import View, as_float32, refuse_overlap, to_bf16
from cpu_kernels.codegen.fields import Code

LN2 = math.log(2.0)


def _store(x: np.ndarray, target: Any) -> None:
    """Write float32 values into an array or tensor of any of the three types."""
    if not isinstance(target, np.ndarray):
        target.copy_(target.detach().float().new_tensor(x).to(target.dtype))
    elif target.dtype == np.uint16:
        target[...] = to_bf16(x)
    else:
        target[...] = x.astype(target.dtype, copy=False)


def _empty_like(model: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, model.dtype) if isinstance(model, np.ndarray) else model.detach().new_empty(shape)


def merge_states(
    outs: Sequence[Any], lses: Sequence[Any], out: Any = None, lse: Any = None, *, mask: Any = None, base2: bool = False
) -> tuple[Any, Any]:
    """Merge any number of partial results, from the first to the last.

    Parameters
    ----------
    outs : sequence of array ``[n, num_heads, head_dim]``
        fp32, bf16 (NumPy: uint16 bits) or fp16; NumPy or torch, all of one type.
    lses : sequence of float32 array ``[n, num_heads]``
        Natural logs; -inf or +inf marks an empty part, whose out is not read.
    out, lse : array, optional
        Where to write; made when absent, and may be exactly one of the parts.
    mask : bool ``[n]``, optional
        Rows to merge; the others keep the first part.
    base2 : bool
        The lses, given and returned, are logs to base 2.

    Returns
    -------
    out, lse : as the first of the inputs, where they were not given

    Raises
    ------
    ValueError, TypeError
        If there are no parts, shapes or dtypes differ, or a result cannot be written.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not hasattr(parts, "__len__"):
            raise TypeError(f"{name} must be a sequence of arrays, got {type(parts).__name__}")
    if not len(outs) or len(outs) != len(lses):
        raise ValueError(f"merge_states got {len(outs)} outs and {len(lses)} lses; expected as many, at least one")
    first = View("outs[0]", outs[0])
    if len(first.shape) != 3:
        raise ValueError(f"outs[0] has shape {list(first.shape)}, expected [n, num_heads, head_dim]")
    shape, unit = first.shape, LN2 if base2 else 1.0
    for number, (o, s) in enumerate(zip(outs, lses, strict=True)):
        _check_part(number, o, s, first)
    out = _empty_like(outs[0], shape) if out is None else _result("out", out, outs, first.code)
    lse = _empty_like(lses[0], shape[:2]) if lse is None else _result("lse", lse, lses, Code.FP32)
    refuse_overlap(View("lse", lse), View("out", out), in_place=False)
    rows = _rows_of(mask, shape[0])
    total, sums = as_float32("outs[0]", outs[0], shape), _lse_of(lses[0], shape[:2])
    for number in range(1, len(outs)):
        other = _lse_of(lses[number], shape[:2])
        if rows is not None:
            other = np.where(rows[:, None], other, np.float32(-np.inf))
        total, sums = _merge_two(total, sums, as_float32(f"outs[{number}]", outs[number], shape), other, unit)
    total = np.where(np.isneginf(sums)[..., None], np.float32(0), total)
    _store(total, out)
    _store(sums, lse)
    return out, lse


def _check_part(number: int, out: Any, lse: Any, first: View) -> None:
    a, b = View(f"outs[{number}]", out), View(f"lses[{number}]", lse)
    if a.shape != first.shape or b.shape != first.shape[:-1]:
        raise ValueError(
            f"part {number} has out {list(a.shape)} and lse {list(b.shape)}, expected {list(first.shape)} and "
            f"{list(first.shape[:-1])}"
        )
    if a.code != first.code or b.code != Code.FP32:
        raise TypeError(
            f"part {number} has an out of {a.code.name.lower()} and an lse of {b.code.name.lower()}, expected "
            f"{first.code.name.lower()} and fp32"
        )


def _result(name: str, array: Any, parts: Sequence[Any], code: Code) -> Any:
    view, parts_of = View(name, array), [View(f"{name}s[{i}]", x) for i, x in enumerate(parts)]
    view.check_result(parts_of[0].shape)
    if view.code != code:
        raise TypeError(f"{name} is {view.code.name.lower()}, the parts are {code.name.lower()}")
    refuse_overlap(view, *parts_of)
    return array


def _rows_of(mask: Any, rows: int) -> np.ndarray | None:
    if mask is None:
        return None
    found = np.asarray(mask.cpu() if hasattr(mask, "data_ptr") and hasattr(mask, "cpu") else mask)
    if found.dtype != np.bool_ or found.shape != (rows,):
        raise ValueError(f"mask has dtype {found.dtype} and shape {list(found.shape)}, expected bool [{rows}]")
    return found


def _lse_of(lse: Any, shape: tuple[int, ...]) -> np.ndarray:
    """LSEs as float32, +inf of an empty part as -inf."""
    x = as_float32("lse", lse, shape)
    return np.where(np.isposinf(x), np.float32(-np.inf), x)


def _merge_two(
    a: np.ndarray, lse_a: np.ndarray, b: np.ndarray, lse_b: np.ndarray, unit: float
) -> tuple[np.ndarray, np.ndarray]:
    top = np.maximum(lse_a, lse_b)
    base = np.where(np.isneginf(top), np.float32(0), top)
    wa, wb = np.exp((lse_a - base) * np.float32(unit)), np.exp((lse_b - base) * np.float32(unit))
    mass = wa + wb
    safe = np.where(mass == 0, np.float32(1), mass)
    # An empty part's out may be anything: give it no chance to meet a weight of 0.
    mixed = _weighted(a, wa, safe) + _weighted(b, wb, safe)
    only_a, only_b = np.isneginf(lse_b), np.isneginf(lse_a) & ~np.isneginf(lse_b)
    out = np.where(only_b[..., None], b, np.where(only_a[..., None], a, mixed))
    lse = np.where(only_b, lse_b, np.where(only_a, lse_a, base + np.log(safe) / np.float32(unit)))
    return out.astype(np.float32, copy=False), lse.astype(np.float32, copy=False)


def _weighted(x: np.ndarray, weight: np.ndarray, mass: np.ndarray) -> np.ndarray:
    return np.where((weight == 0)[..., None], np.float32(0), x) * (weight / mass)[..., None]


def merge_state(
    out_a: Any,
    lse_a: Any,
    out_b: Any,
    lse_b: Any,
    out: Any = None,
    lse: Any = None,
    *,
    mask: Any = None,
    base2: bool = False,
) -> tuple[Any, Any]:
    """Merge two partial results; see `merge_states`."""
    return merge_states((out_a, out_b), (lse_a, lse_b), out, lse, mask=mask, base2=base2)
