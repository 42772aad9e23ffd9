"""Seeing NumPy arrays and torch tensors alike: address, element type, shape and byte strides, without importing torch.

bfloat16 convention for NumPy: an array of ``uint16`` holds bf16 bits (`to_bf16` and `from_bf16` convert); an array of
the ``bfloat16`` type of the package ml_dtypes is accepted as well.
"""

from __future__ import annotations

import ctypes
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

    __slots__ = ("array", "pointer", "code", "shape", "strides")

    def __init__(self, name: str, array: Any) -> None:
        self.array = array
        if isinstance(array, np.ndarray):
            self.pointer = _address(array)
            self.shape, self.strides = array.shape, array.strides
        elif hasattr(array, "data_ptr"):
            if not array.is_cpu:
                raise ValueError(f"{name} lives on {array.device}; the CPU kernels take host memory only")
            self.pointer = array.data_ptr()
            size = array.element_size()
            self.shape, self.strides = tuple(array.shape), tuple([s * size for s in array.stride()])
        else:
            raise TypeError(f"{name} must be a NumPy array or a torch tensor, got {type(array).__name__}")
        code = _BY_DTYPE.get(array.dtype)
        self.code = _code_of(name, array.dtype) if code is None else code

    def check(self, name: str, shape: tuple[int, ...]) -> View:
        """Refuse another shape than `shape`, or elements whose last axis is not contiguous."""
        if self.shape != shape:
            raise ValueError(f"{name} has shape {list(self.shape)}, expected {list(shape)}")
        # An empty array may have any strides: NumPy's own are 0.
        if self.shape[-1] > 1 and self.strides[-1] != _BYTES[self.code] and 0 not in shape:
            raise ValueError(f"{name} has a last-axis stride of {self.strides[-1]} bytes, expected {_BYTES[self.code]}")
        return self


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
    _BY_DTYPE[dtype] = _CODES[kind]
    return _CODES[kind]


def integers(name: str, values: Any, dtype: type, ndim: int) -> np.ndarray:
    """Copy an integer argument (NumPy, torch, list) into a contiguous array of `dtype`; refuse floats and overflow."""
    if hasattr(values, "data_ptr") and not isinstance(values, np.ndarray):
        values = values.detach().cpu().numpy()
    source = np.asarray(values)
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


def floats(name: str, values: Any, length: int) -> np.ndarray:
    """Copy a per-head float argument into a contiguous float32 array of `length`."""
    if hasattr(values, "data_ptr") and not isinstance(values, np.ndarray):
        values = values.detach().float().cpu().numpy()
    out = np.array(values, dtype=np.float32, order="C", copy=True)
    if out.shape != (length,):
        raise ValueError(f"{name} has shape {list(out.shape)}, expected [{length}] (one per query head)")
    if not np.isfinite(out).all():
        raise ValueError(f"{name} holds a value that is not finite at query head {int(np.argmin(np.isfinite(out)))}")
    return out


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bf16 bits (uint16), ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """Widen bf16 bits (uint16) to float32, exactly."""
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)
