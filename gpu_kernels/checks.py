"""Argument checks that more than one launcher needs. Each raises one sentence: argument, row, numbers."""

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from gpu_kernels.config import DTYPES, HEAD_DIMS, PAGE_SIZES, SCALED

_INT32_MAX = 2**31 - 1


def refuse(name: str, problem: str) -> NoReturn:
    """Raise the package's one kind of complaint."""
    raise ValueError(f"{name}: {problem}")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Geometry of one layer's paged cache: K and V are [num_pages, num_kv_heads, page_size, head_dim] each."""

    num_pages: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    stride: int
    stride_head: int

    def __post_init__(self) -> None:
        check_head_dim("head_dim", self.head_dim)
        if self.page_size not in PAGE_SIZES:
            refuse("page_size", f"{self.page_size} is not supported; use one of {PAGE_SIZES}")
        if self.num_kv_heads < 1:
            refuse("num_kv_heads", f"{self.num_kv_heads} must be at least 1")
        if self.dtype not in (*DTYPES, *SCALED):
            known = "float32, float16, bfloat16, int8 or float8_e4m3fn"
            refuse("k_cache", f"dtype {self.dtype} is not supported; use {known}")
        if max(self.stride, self.stride_head) > _INT32_MAX:
            refuse("k_cache", f"page stride {self.stride} exceeds {_INT32_MAX} elements")
        if self.stride % 16 or self.stride_head % 16:
            refuse("k_cache", f"strides {self.stride} of pages, {self.stride_head} of heads are no multiples of 16")

    @property
    def quantised(self) -> bool:
        return self.dtype in SCALED

    @property
    def page_shift(self) -> int:
        return self.page_size.bit_length() - 1

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Elements from page to page and from head to head, of the cache and then of its scales."""
        return self.stride, self.stride_head, self.num_kv_heads * self.page_size, self.page_size

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def check(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Refuse caches of another geometry than this."""
        other = cache_shape(k_cache, v_cache)
        if other != self:
            refuse("k_cache", f"geometry {other} is not the plan's {self}")


def cache_shape(k_cache: torch.Tensor, v_cache: torch.Tensor) -> CacheShape:
    """Read the geometry off one layer's cache tensors."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4:
            refuse(name, f"shape {tuple(cache.shape)} is not [num_pages, num_kv_heads, page_size, head_dim]")
        if cache.stride(3) != 1 or cache.stride(2) != cache.shape[3]:
            refuse(name, f"strides {cache.stride()} do not keep the positions of a page and head contiguous")
        check_aligned(name, cache)
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.dtype != v_cache.dtype:
        refuse(
            "v_cache",
            f"shape {tuple(v_cache.shape)}, strides {v_cache.stride()}, {v_cache.dtype} differ from k_cache's "
            f"{tuple(k_cache.shape)}, {k_cache.stride()}, {k_cache.dtype}",
        )
    if k_cache.device != v_cache.device:
        refuse("v_cache", f"is on {v_cache.device} and k_cache on {k_cache.device}")
    pages, heads, page_size, head_dim = k_cache.shape
    return CacheShape(
        pages, heads, page_size, head_dim, k_cache.dtype, k_cache.device, k_cache.stride(0), k_cache.stride(1)
    )


def codes(cache: torch.Tensor) -> torch.Tensor:
    """A cache as the kernels take it: fp8 by its bits, so that they run on devices without the type."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


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
        if tensor.shape[axis] > 1 and (tensor.stride(axis) % 16 or tensor.stride(axis) > _INT32_MAX):
            refuse(name, f"stride {tensor.stride(axis)} of axis {axis} is not a multiple of 16 below 2**31")


def check_scales(
    cache: CacheShape, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """int8 and fp8 caches need both scales, [num_pages, num_kv_heads, page_size] float32; others take none."""
    if not cache.quantised:
        if k_scale is not None or v_scale is not None:
            refuse("k_scale, v_scale", f"given for a cache of {cache.dtype}, which has none")
        return None
    if k_scale is None or v_scale is None:
        name = "an int8" if cache.dtype is torch.int8 else "a float8_e4m3fn"
        raise ValueError(f"k_scale, v_scale: {name} cache needs both, [num_pages, num_kv_heads, page_size] float32")
    shape = (cache.num_pages, cache.num_kv_heads, cache.page_size)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_tensor(name, scale, shape, (torch.float32,), cache.device)
        check_contiguous(name, scale)
    return k_scale, v_scale


def host_integers(name: str, values: Any, dtype: torch.dtype, dim: int) -> torch.Tensor:
    """An integer argument (tensor or array) as a host tensor of its own; a CUDA one waits for the device."""
    host = torch.as_tensor(values).detach().to("cpu", copy=True)
    if host.dtype is not dtype:
        refuse(name, f"dtype {host.dtype} is not {dtype}")
    if host.dim() != dim:
        refuse(name, f"{host.dim()} dimensions are not the needed {dim}")
    return host.contiguous()


def first_where(condition: torch.Tensor) -> tuple[int, ...] | None:
    """Indices of the first true element, or None."""
    found = condition.nonzero()
    return tuple(found[0].tolist()) if len(found) else None


def ceil_div(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """Whole-number division of non-negative values, rounded up."""
    return (values + divisor - 1) // divisor


def per_head(name: str, values: Any, num_q_heads: int, absent: float, device: torch.device) -> torch.Tensor:
    """A float32 value per query head on ``device``; ``absent`` stands where the argument is not given."""
    if values is None:
        return torch.full((num_q_heads,), absent, dtype=torch.float32, device=device)
    tensor = torch.as_tensor(values)
    if tuple(tensor.shape) != (num_q_heads,):
        refuse(name, f"shape {tuple(tensor.shape)} is not ({num_q_heads},), one value per query head")
    host = tensor.detach().to("cpu", torch.float32)
    if not bool(torch.isfinite(host).all()):
        refuse(name, f"holds a value that is not finite: {host.tolist()}")
    return host.to(device, copy=True)


def check_scalars(
    num_q_heads: int, num_kv_heads: int, sm_scale: float, window_left: int, logits_soft_cap: float
) -> None:
    """The scalar half of the attention contract."""
    if num_q_heads < 1 or num_q_heads % num_kv_heads:
        refuse("num_q_heads", f"{num_q_heads} is not a positive multiple of num_kv_heads {num_kv_heads}")
    if not math.isfinite(sm_scale):
        refuse("sm_scale", f"{sm_scale} is not finite")
    if not -1 <= window_left <= _INT32_MAX:
        refuse("window_left", f"{window_left} is neither -1 (no window) nor a number of earlier positions")
    if not (math.isfinite(logits_soft_cap) and logits_soft_cap >= 0.0):
        refuse("logits_soft_cap", f"{logits_soft_cap} is neither 0 (no cap) nor a positive number")


def check_lengths(name: str, lengths: torch.Tensor) -> None:
    """No length is negative, and none so long that a tile past it would leave int32."""
    bad = first_where((lengths < 0) | (lengths > _INT32_MAX // 2))
    if bad:
        refuse(name, f"sequence {bad[0]} has length {lengths[bad].item()}")


def first_keys_of(lengths: torch.Tensor, window_left: int) -> torch.Tensor:
    """First position that the query at position ``length - 1`` attends to, int64."""
    if window_left < 0:
        return torch.zeros_like(lengths, dtype=torch.int64)
    return (lengths.to(torch.int64) - 1 - window_left).clamp(min=0)


def check_table(table: torch.Tensor, lengths: torch.Tensor, first_keys: torch.Tensor, cache: CacheShape) -> None:
    """Every page that will be read exists; entries before the window and past the last used page are not looked at."""
    if table.shape[0] != lengths.shape[0]:
        refuse("block_table", f"{table.shape[0]} rows do not match the {lengths.shape[0]} sequences of seq_lens")
    pages, columns = ceil_div(lengths.to(torch.int64), cache.page_size), table.shape[1]
    short = first_where(pages > columns)
    if short:
        refuse(
            "block_table",
            f"sequence {short[0]} has length {lengths[short].item()} and needs {pages[short].item()} pages of "
            f"{cache.page_size}, the table's {columns} columns hold {columns * cache.page_size}",
        )
    column = torch.arange(columns)
    used = (column >= (first_keys // cache.page_size)[:, None]) & (column < pages[:, None])
    bad = first_where(used & ((table < 0) | (table >= cache.num_pages)))
    if bad:
        refuse(
            "block_table",
            f"sequence {bad[0]}, column {bad[1]} names page {table[bad].item()}, there are {cache.num_pages} pages",
        )


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
