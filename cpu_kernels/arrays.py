"""The one door for callers' arrays: address, element type, shape and byte strides, and whether they may be used so.

NumPy arrays and torch tensors are seen alike, without importing torch. Refused are other byte orders than the
machine's, results that are read-only or lie over themselves (broadcast), and results that share memory with an input,
other than in exactly its place. `gpu_kernels.overlap` gives the same verdicts on tensors.

bfloat16 convention for NumPy: an array of ``uint16`` holds bf16 bits (`to_bf16` and `from_bf16` convert); an array of
the ``bfloat16`` type of the package ml_dtypes is accepted as well.
"""

from __future__ import annotations

import ctypes
import math
import operator
from typing import Any

import numpy as np

from cpu_kernels.codegen.fields import Code

_CODES = {
    "float32": Code.FP32,
    "torch.float32": Code.FP32,
    "uint16": Code.BF16,
    "bfloat16": Code.BF16,
    "torch.bfloat16": Code.BF16,
    "float16": Code.FP16,
    "torch.float16": Code.FP16,
}
# Lookups by dtype object: a dtype's name takes NumPy microseconds to spell, and every submit looks at three arrays.
_BY_DTYPE: dict[Any, Code] = {np.dtype(kind): _CODES[kind] for kind in ("float32", "uint16", "float16")}
_BYTES = {Code.FP32: 4, Code.BF16: 2, Code.FP16: 2}


class View:
    """What a kernel needs to know of a caller's array; holds the array so that the address stays valid."""

    __slots__ = ("array", "name", "pointer", "code", "shape", "strides")

    def __init__(self, name: str, array: Any) -> None:
        self.name, self.array = name, array
        if isinstance(array, np.ndarray):
            self.pointer = _address(array)
            self.shape, self.strides = array.shape, array.strides
        elif hasattr(array, "data_ptr"):
            if not array.is_cpu:
                raise ValueError(f"{name} lives on {array.device}; the CPU kernels take host memory only")
            if array.is_neg() or array.is_sparse:
                raise ValueError(f"{name} is a negated view or sparse: its memory does not hold its values")
            self.pointer = array.data_ptr()
            size = array.element_size()
            self.shape, self.strides = tuple(array.shape), tuple([s * size for s in array.stride()])
        else:
            raise TypeError(f"{name} must be a NumPy array or a torch tensor, got {type(array).__name__}")
        code = _BY_DTYPE.get(array.dtype)
        self.code = _code_of(name, array.dtype) if code is None else code

    def check(self, shape: tuple[int, ...]) -> View:
        """Refuse another shape than `shape`, odd addresses, or elements whose last axis is not contiguous."""
        name, size = self.name, _BYTES[self.code]
        if self.shape != shape:
            raise ValueError(f"{name} has shape {list(self.shape)}, expected {list(shape)}")
        # An empty array may have any strides: NumPy's own are 0.
        if 0 in shape:
            return self
        if shape[-1] > 1 and self.strides[-1] != size:
            raise ValueError(f"{name} has a last-axis stride of {self.strides[-1]} bytes, expected {size}")
        places = self.pointer
        for stride in self.strides:
            places |= stride
        if places & (size - 1):
            raise ValueError(f"{name} has elements of {size} bytes at addresses that are no multiples of {size}")
        return self

    def check_result(self, shape: tuple[int, ...]) -> View:
        """`check`, and refuse what cannot be written: read-only memory, and elements that lie over each other."""
        self.check(shape)
        if isinstance(self.array, np.ndarray) and not self.array.flags.writeable:
            raise ValueError(f"{self.name} is read-only: results cannot be written to it")
        end, steps = _BYTES[self.code], self.strides
        if len(shape) == 3 and steps[1] >= shape[2] * end and steps[0] >= shape[1] * steps[1]:
            return self  # rows behind rows, heads behind heads: what nearly all are
        for stride, count in sorted((abs(s), n) for s, n in zip(self.strides, shape, strict=True) if n > 1):
            if stride < end and 0 not in shape:
                raise ValueError(
                    f"{self.name} has strides of {list(self.strides)} bytes, so that its elements lie over each other "
                    "(a broadcast array?): results need a place each"
                )
            end += stride * (count - 1)
        return self

    def span(self) -> tuple[int, int]:
        """First byte and one past the last; an empty array has none."""
        low = high = self.pointer
        strides = self.strides
        for i, n in enumerate(self.shape):
            if n == 0:
                return (low, low)
            s = strides[i]
            if s > 0:
                high += (n - 1) * s
            else:
                low += (n - 1) * s
        return low, high + _BYTES[self.code]

    def same_place(self, other: View) -> bool:
        """Whether both name the same elements in the same order."""
        if (self.pointer, self.code, self.shape) != (other.pointer, other.code, other.shape):
            return False
        pairs = zip(self.shape, self.strides, other.strides, strict=True)
        return all(a == b for n, a, b in pairs if n > 1)

    def rows(self) -> np.ndarray:
        """Addresses of the contiguous rows (all axes but the last), ascending."""
        at = np.array([self.pointer], np.int64)
        for n, s in zip(self.shape[:-1], self.strides[:-1], strict=True):
            at = (at[:, None] + np.arange(n, dtype=np.int64) * s).ravel()
        return np.sort(at)

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] * _BYTES[self.code]


def refuse_overlap(result: View, *others: View, in_place: bool = True) -> None:
    """Refuse a result that shares memory with another array, unless (`in_place`) it is exactly that array."""
    low, high = result.span()
    for other in others:
        start, stop = other.span()
        if start >= high or low >= stop or low == high or start == stop:
            continue
        if in_place and result.same_place(other):
            continue
        a, b = result.rows(), other.rows()
        before = np.searchsorted(b, a + result.row_bytes) - 1  # the last row of `other` that begins before a's row ends
        if ((before >= 0) & (b[before] + other.row_bytes > a)).any():
            exact = " other than in exactly its place" if in_place else ""
            raise ValueError(f"{result.name} shares memory with {other.name}{exact}: one would overwrite the other")


def refuse_inside(view: View, low: int, size: int) -> None:
    """Refuse an array that lies in the pages: `size` bytes from `low`."""
    start, stop = view.span()
    if start < low + size and low < stop and start < stop:
        raise ValueError(f"{view.name} lies in the memory of the KV pages: give it memory of its own")


def _address(array: np.ndarray) -> int:
    """Address of the first element; NumPy's own ways take 2 us each, the buffer's 0.3 us where it is writable."""
    try:
        return ctypes.addressof(ctypes.c_byte.from_buffer(array.data))
    except (TypeError, ValueError, BufferError):  # read-only, empty, or not contiguous
        return int(array.__array_interface__["data"][0])


def _code_of(name: str, dtype: Any) -> Code:
    """Find the code of a dtype seen for the first time, by its name."""
    kind = dtype.name if isinstance(dtype, np.dtype) else str(dtype)
    if kind not in _CODES:
        raise TypeError(f"{name} has dtype {kind}; expected float32, bfloat16 (NumPy: uint16 bits) or float16")
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        raise TypeError(f"{name} has dtype {dtype.str}, the other byte order: give it as {dtype.newbyteorder('=').str}")
    _BY_DTYPE[dtype] = _CODES[kind]
    return _CODES[kind]


def as_float32(name: str, array: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Values of an array of any strides as float32 (uint16: bf16 bits); a copy where it has to be."""
    view = View(name, array)
    if view.shape != shape:
        raise ValueError(f"{name} has shape {list(view.shape)}, expected {list(shape)}")
    if not isinstance(array, np.ndarray):
        return array.detach().float().numpy()
    return from_bf16(array) if array.dtype == np.uint16 else array.astype(np.float32, copy=False)


def whole(name: str, value: Any) -> int:
    """An integer (of any kind, no truth value), or a sentence."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected an integer") from None


def number(name: str, value: Any) -> float:
    """A finite number, or a sentence."""
    try:
        x = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}, expected a number") from None
    if not math.isfinite(x):
        raise ValueError(f"{name} is {x}, expected a finite number")
    return x


def integers(name: str, values: Any, dtype: type, ndim: int) -> np.ndarray:
    """Copy an integer argument (NumPy, torch, list) into a contiguous array of `dtype`; refuse floats and overflow."""
    if hasattr(values, "data_ptr") and not isinstance(values, np.ndarray):
        values = values.detach().cpu().numpy()
    try:
        source = np.asarray(values)
    except ValueError as error:  # NumPy's words for lists of several lengths
        raise ValueError(f"{name} must hold integers in {ndim} axes, its rows have several lengths") from error
    if source.size == 0 and source.dtype.kind == "f":
        source = source.astype(np.int64)
    if source.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got dtype {source.dtype}")
    if source.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, got shape {list(source.shape)}")
    limits = np.iinfo(dtype)
    if source.size and (source.max() > limits.max or source.min() < limits.min):
        raise ValueError(f"{name} holds {source.min()} to {source.max()}, beyond {np.dtype(dtype).name}")
    return np.array(source, dtype=dtype, order="C", copy=True)


def floats(name: str, values: Any, length: int, rows: int | None = None, *, absent: bool = False) -> np.ndarray:
    """Copy a per-head float argument into contiguous float32: ``[length]``, or ``[rows, length]`` where allowed.

    Parameters
    ----------
    rows : int, optional
        Sequences, where each may have values of its own.
    absent : bool
        Whether -inf is allowed, as "none for this head".
    """
    if hasattr(values, "data_ptr") and not isinstance(values, np.ndarray):
        values = values.detach().float().cpu().numpy()
    values = np.asarray(values)
    if values.dtype == np.uint16:
        values = from_bf16(values)
    if values.dtype.kind not in "fiu":
        raise TypeError(f"{name} must hold numbers, got dtype {values.dtype}")
    out = np.array(values, dtype=np.float32, order="C", copy=True)
    if out.shape != (length,) and (rows is None or out.shape != (rows, length)):
        each = "" if rows is None else f", or [{rows}, {length}] (one per sequence and query head)"
        raise ValueError(f"{name} has shape {list(out.shape)}, expected [{length}] (one per query head){each}")
    good = np.isfinite(out) | (np.isneginf(out) if absent else False)
    if not good.all():
        where = np.argwhere(~good)[0].tolist()
        at = f"query head {where[-1]}" + (f" of sequence {where[0]}" if len(where) > 1 else "")
        raise ValueError(f"{name} holds a value that is not finite at {at}")
    return out


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bf16 bits (uint16), ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Widen bf16 bits (uint16) to float32, exactly."""
    if np.asarray(bits).dtype.newbyteorder("=") != np.uint16:
        raise TypeError(f"bits has dtype {np.asarray(bits).dtype}, expected uint16")
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)
