"""Argument checks that more than one launcher needs. Each raises one sentence: argument, row, numbers.

With `cache_shape` and `overlap` the one door for callers' tensors; `cpu_kernels.arrays` gives the same verdicts.
"""

import math
import operator
from typing import Any, NoReturn

import torch

from gpu_kernels.config import HEAD_DIMS

INT32_MAX = 2**31 - 1


def refuse(name: str, problem: str) -> NoReturn:
    """Raise the package's one kind of complaint."""
    raise ValueError(f"{name}: {problem}")


def check_is_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        refuse(name, f"is a {type(tensor).__name__}, not a torch tensor")
    if tensor.is_neg() or tensor.is_sparse:
        refuse(name, "is a negated view or sparse: its memory does not hold its values")


def check_head_dim(name: str, head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        refuse(name, f"{head_dim} is not supported; use a multiple of 16 from 16 to 256")


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """Kernels are compiled for 16-byte aligned data; another start would compile one more, unchecked variant."""
    if tensor.numel() and tensor.data_ptr() % 16:
        refuse(name, f"data starts {tensor.data_ptr() % 16} bytes past a 16-byte boundary")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        refuse(name, f"strides {tensor.stride()} are not those of a contiguous tensor")


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Shape, dtype, device, and contiguity of the last axis."""
    check_is_tensor(name, tensor)
    if tuple(tensor.shape) != shape:
        refuse(name, f"shape {tuple(tensor.shape)} is not the needed {shape}")
    if tensor.dtype not in dtypes:
        refuse(name, f"dtype {tensor.dtype} is not one of {', '.join(str(dtype) for dtype in dtypes)}")
    if tensor.device != device:
        refuse(name, f"is on {tensor.device} and the other tensors on {device}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        refuse(name, f"strides {tensor.stride()} do not keep the last axis contiguous")


def check_rows(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """``check_tensor`` for data that kernels read in 16-byte pieces: [rows, (heads,) columns]."""
    check_tensor(name, tensor, shape, dtypes, device)
    check_aligned(name, tensor)
    for axis in range(tensor.dim() - 1 if tensor.numel() else 0):
        if tensor.shape[axis] > 1 and (tensor.stride(axis) % 16 or tensor.stride(axis) > INT32_MAX):
            refuse(name, f"stride {tensor.stride(axis)} of axis {axis} is not a multiple of 16 below 2**31")


def host_integers(name: str, values: Any, dtype: torch.dtype, dim: int) -> torch.Tensor:
    """An integer argument (tensor, array or list) as a host tensor of its own; a CUDA one waits for the device."""
    try:
        host = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        refuse(name, f"a {type(values).__name__} of {values!r} holds no integers of one shape")
    if not host.numel() and host.dtype is torch.float32:  # an empty list
        host = host.to(dtype)
    if host.dtype.is_floating_point or host.dtype.is_complex or host.dtype is torch.bool:
        refuse(name, f"dtype {host.dtype} is no integer type")
    if host.dim() != dim:
        refuse(name, f"{host.dim()} dimensions are not the needed {dim}")
    wide = host.to(torch.int64)
    limits = torch.iinfo(dtype)
    if wide.numel() and (int(wide.max()) > limits.max or int(wide.min()) < limits.min):
        refuse(name, f"holds {int(wide.min())} to {int(wide.max())}, beyond {dtype}")
    return wide.to(dtype, copy=True).contiguous()


def device_integers(name: str, values: Any, device: torch.device) -> torch.Tensor:
    """An integer argument of one axis as int64 on ``device``; such a tensor is taken as it is."""
    if isinstance(values, torch.Tensor) and values.dtype is torch.int64 and values.dim() == 1:
        if values.device == device or device.type == "cpu":
            return values.detach().to(device)
    if isinstance(values, torch.Tensor) and values.device != device and values.device.type != "cpu":
        refuse(name, f"is on {values.device} and the other tensors on {device}")
    return host_integers(name, values, torch.int64, 1).to(device)


def whole(name: str, value: Any) -> int:
    """An integer of any kind, no truth value."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        refuse(name, f"{value!r} is not an integer")


def number(name: str, value: Any) -> float:
    """A finite number of any kind."""
    try:
        x = float(value)
    except (TypeError, ValueError, RuntimeError):
        refuse(name, f"{value!r} is not a number")
    if not math.isfinite(x):
        refuse(name, f"{x} is not finite")
    return x


def first_where(condition: torch.Tensor) -> tuple[int, ...] | None:
    """Indices of the first true element, or None."""
    found = condition.nonzero()
    return tuple(found[0].tolist()) if len(found) else None


def ceil_div(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """Whole-number division of non-negative values, rounded up."""
    return (values + divisor - 1) // divisor


def per_head(
    name: str, values: Any, num_q_heads: int, absent: float, device: torch.device, rows: int | None = None
) -> torch.Tensor:
    """A float32 value per query head on ``device``, or one per sequence and head where there are ``rows``.

    ``absent`` stands where the argument is not given, and may be among the values if it is infinite.
    """
    if values is None:
        return torch.full((num_q_heads,), absent, dtype=torch.float32, device=device)
    tensor = torch.as_tensor(values)
    if tensor.dtype is torch.uint16:  # NumPy's way to hold bf16 bits
        tensor = tensor.view(torch.bfloat16)
    if tuple(tensor.shape) != (num_q_heads,) and (rows is None or tuple(tensor.shape) != (rows, num_q_heads)):
        each = "" if rows is None else f", nor ({rows}, {num_q_heads})"
        refuse(name, f"shape {tuple(tensor.shape)} is not ({num_q_heads},), one value per query head{each}")
    host = tensor.detach().to("cpu", torch.float32)
    good = torch.isfinite(host) | ((host == absent) if math.isinf(absent) else False)
    if not bool(good.all()):
        refuse(name, f"holds a value that is not finite: {host.tolist()}")
    return host.contiguous().to(device, copy=True)


def check_heads(num_q_heads: Any, num_kv_heads: int) -> int:
    """Query heads, a multiple of the KV heads."""
    heads = whole("num_q_heads", num_q_heads)
    if heads < 1 or heads % num_kv_heads:
        refuse("num_q_heads", f"{heads} is not a positive multiple of num_kv_heads {num_kv_heads}")
    return heads


def soft_cap(value: Any) -> float:
    """The cap of the scores; 0 is off."""
    cap = 0.0 if value is None else number("logits_soft_cap", value)
    if cap < 0.0:
        refuse("logits_soft_cap", f"{cap} is neither 0 or None (no cap) nor a positive number")
    return cap


def check_lengths(name: str, lengths: torch.Tensor) -> None:
    """No length is negative, and none so long that a tile past it would leave int32."""
    bad = first_where((lengths < 0) | (lengths > INT32_MAX // 2))
    if bad:
        refuse(name, f"sequence {bad[0]} has length {lengths[bad].item()}")


def owners(counts: torch.Tensor) -> torch.Tensor:
    """Item -> sequence where sequence i owns ``counts[i]`` items, one after another.

    What ``repeat_interleave`` gives, without its parallel region: waking threads costs milliseconds on a busy host.
    """
    ends = counts.cumsum(0)
    total = int(ends[-1]) if len(counts) else 0
    return torch.zeros(total + 1, dtype=torch.int64).index_add_(0, ends, torch.ones_like(ends)).cumsum(0)[:total]


def upload(device: torch.device, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Integer host tensors as int32 tensors on ``device``, in one copy."""
    sizes = [-(-part.numel() // 4) * 4 for part in parts]  # each part begins 16-byte aligned
    flat = torch.zeros(max(sum(sizes), 1), dtype=torch.int32)
    for part, place in zip(parts, flat.split_with_sizes([*sizes, flat.numel() - sum(sizes)]), strict=False):
        place[: part.numel()] = part.flatten()
    packed = flat.to(device, non_blocking=True)
    places = packed.split_with_sizes([*sizes, flat.numel() - sum(sizes)])
    return [place[: part.numel()].view(part.shape) for part, place in zip(parts, places, strict=False)]
