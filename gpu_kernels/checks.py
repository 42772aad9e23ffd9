"""Argument checks that more than one launcher needs. Each raises one sentence: argument, row, numbers.

The one door for callers' tensors: beside shape, dtype, device and strides, results are refused that lie over themselves
(expanded) or share memory with an input, other than in exactly its place. `cpu_kernels.arrays` gives the same verdicts.
"""

import math
import operator
from collections.abc import Sequence
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
    """Geometry of one layer's paged cache: K and V are [num_pages, num_kv_heads, page_size, head_dim] each.

    A cache whose blocks are several pages long (48 tokens are three of 16) has ``pages_per_block`` above 1. Its pages
    are numbered by their place in memory: those of block b are ``b * block_step`` and the ones behind it.
    """

    num_pages: int
    num_kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    stride: int
    stride_head: int
    stride_position: int
    pages_per_block: int = 1
    block_step: int = 1

    def __post_init__(self) -> None:
        check_head_dim("head_dim", self.head_dim)
        if self.page_size not in PAGE_SIZES:
            refuse("page_size", f"{self.page_size} is not supported; use one of {PAGE_SIZES}, or a multiple of one")
        if self.num_kv_heads < 1:
            refuse("num_kv_heads", f"{self.num_kv_heads} must be at least 1")
        if self.dtype not in (*DTYPES, *SCALED):
            known = "float32, float16, bfloat16, int8 or float8_e4m3fn"
            refuse("k_cache", f"dtype {self.dtype} is not supported; use {known}")
        if max(self.stride, self.stride_head, self.stride_position) > _INT32_MAX:
            refuse("k_cache", f"page stride {self.stride} exceeds {_INT32_MAX} elements")
        if self.stride % 16 or self.stride_head % 16 or self.stride_position % 16:
            refuse(
                "k_cache",
                f"strides {self.stride} of pages, {self.stride_head} of heads, {self.stride_position} of positions are "
                "no multiples of 16",
            )
        if self.num_pages * self.block_step > _INT32_MAX:
            refuse("k_cache", f"{self.num_pages} blocks make more than {_INT32_MAX} page numbers")

    @property
    def quantised(self) -> bool:
        return self.dtype in SCALED

    @property
    def page_shift(self) -> int:
        return self.page_size.bit_length() - 1

    @property
    def strides(self) -> tuple[int, int, int, int, int]:
        """Elements from page to page, head to head and position to position of the cache, then of its scales."""
        block = self.block_tokens
        scales = self.page_size if self.pages_per_block > 1 else self.num_kv_heads * block, block
        return self.stride, self.stride_head, self.stride_position, *scales

    @property
    def block_tokens(self) -> int:
        """Positions of one entry of a block table."""
        return self.page_size * self.pages_per_block

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.block_tokens

    def pages_of(self, table: torch.Tensor) -> torch.Tensor:
        """A block table as one of pages, int32; entries that name no block become -1."""
        if self.pages_per_block == 1:
            return table
        known = (table >= 0) & (table < self.num_pages)
        first = torch.where(known, table, 0).to(torch.int64) * self.block_step
        pages = first[:, :, None] + torch.arange(self.pages_per_block)
        return torch.where(known[:, :, None], pages, -1).flatten(1).to(torch.int32)

    def places_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of blocks as slots of pages; -1 stays."""
        if self.pages_per_block == 1:
            return slots
        block, inside = slots // self.block_tokens, slots % self.block_tokens
        page = block * self.block_step + inside // self.page_size
        return torch.where(slots < 0, -1, page * self.page_size + inside % self.page_size)

    def check(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Refuse caches of another geometry than this."""
        other = cache_shape(k_cache, v_cache)
        if other != self:
            refuse("k_cache", f"geometry {other} is not the plan's {self}")


def cache_shape(k_cache: torch.Tensor, v_cache: torch.Tensor) -> CacheShape:
    """Read the geometry off one layer's cache tensors."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_is_tensor(name, cache)
        if cache.dim() != 4:
            refuse(name, f"shape {tuple(cache.shape)} is not [num_pages, num_kv_heads, page_size, head_dim]")
        if cache.stride(3) != 1:
            refuse(name, f"strides {cache.stride()} do not keep the last axis contiguous")
        check_aligned(name, cache)
    if k_cache.shape[:3] == v_cache.shape[:3] and k_cache.shape[3] != v_cache.shape[3]:
        refuse(
            "v_cache",
            f"head_dim {v_cache.shape[3]} is not k_cache's {k_cache.shape[3]}: K and V of different head dims (as in "
            "MLA) are not supported",
        )
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.dtype != v_cache.dtype:
        refuse(
            "v_cache",
            f"shape {tuple(v_cache.shape)}, strides {v_cache.stride()}, {v_cache.dtype} differ from k_cache's "
            f"{tuple(k_cache.shape)}, {k_cache.stride()}, {k_cache.dtype}",
        )
    if k_cache.device != v_cache.device:
        refuse("v_cache", f"is on {v_cache.device} and k_cache on {k_cache.device}")
    blocks, heads, tokens, head_dim = k_cache.shape
    stride, stride_head, position, _ = k_cache.stride()
    page_size = next((size for size in reversed(PAGE_SIZES) if tokens and tokens % size == 0), tokens)
    ratio = tokens // page_size if page_size else 1
    if ratio <= 1:
        return CacheShape(
            blocks, heads, page_size, head_dim, k_cache.dtype, k_cache.device, stride, stride_head, position
        )
    inside = page_size * position
    if stride % inside:
        refuse("k_cache", f"a block stride of {stride} elements is no multiple of {inside}, a page of {page_size}")
    if k_cache.dtype not in DTYPES and stride // inside != heads * ratio:
        refuse(
            "k_cache", f"a cache with scales and blocks of {tokens} positions must be contiguous, strides are {stride}"
        )
    return CacheShape(
        blocks, heads, page_size, head_dim, k_cache.dtype, k_cache.device, inside, stride_head, position, ratio,
        stride // inside,
    )  # fmt: skip


def check_is_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        refuse(name, f"is a {type(tensor).__name__}, not a torch tensor")


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
        if tensor.shape[axis] > 1 and (tensor.stride(axis) % 16 or tensor.stride(axis) > _INT32_MAX):
            refuse(name, f"stride {tensor.stride(axis)} of axis {axis} is not a multiple of 16 below 2**31")


def check_result(name: str, tensor: torch.Tensor) -> None:
    """Refuse a result whose elements lie over each other (an expanded tensor)."""
    end = 1
    for stride, count in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < end and tensor.numel():
            refuse(
                name,
                f"strides {tensor.stride()} lay its elements over each other (expanded?): results need a place each",
            )
        end += stride * (count - 1)


def refuse_overlap(
    name: str, result: torch.Tensor, others: Sequence[tuple[str, torch.Tensor | None]], *, in_place: bool = True
) -> None:
    """Refuse a result that shares memory with another tensor, unless (``in_place``) it is exactly that tensor."""
    low, high = _span(result)
    for other_name, other in others:
        if other is None:
            continue
        start, stop = _span(other)
        if start >= high or low >= stop or low == high or start == stop:
            continue
        if in_place and _same_place(result, other):
            continue
        a, b = _rows(result), _rows(other)
        sizes = [x.shape[-1] * x.element_size() for x in (result, other)]
        before = torch.searchsorted(b, a + sizes[0]) - 1  # the last row of `other` that begins before a's row ends
        if bool(((before >= 0) & (b[before.clamp(min=0)] + sizes[1] > a)).any()):
            exact = " other than in exactly its place" if in_place else ""
            refuse(name, f"shares memory with {other_name}{exact}: one would overwrite the other")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last; an empty tensor has none."""
    start, size = tensor.data_ptr(), tensor.element_size()
    if not tensor.numel():
        return start, start
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * size


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.data_ptr(), a.dtype, a.shape) != (b.data_ptr(), b.dtype, b.shape):
        return False
    return all(s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if n > 1)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Addresses of the contiguous rows (all axes but the last), ascending."""
    at = torch.tensor([tensor.data_ptr()])
    for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        at = (at[:, None] + torch.arange(n) * (s * tensor.element_size())).flatten()
    return at.sort().values


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
    shape = (cache.num_pages, cache.num_kv_heads, cache.block_tokens)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_tensor(name, scale, shape, (torch.float32,), cache.device)
        check_contiguous(name, scale)
    return k_scale, v_scale


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
    """An integer of any kind."""
    try:
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
    bad = first_where((lengths < 0) | (lengths > _INT32_MAX // 2))
    if bad:
        refuse(name, f"sequence {bad[0]} has length {lengths[bad].item()}")


def check_table(
    table: torch.Tensor, lengths: torch.Tensor, begin: torch.Tensor, end: torch.Tensor, cache: CacheShape
) -> torch.Tensor:
    """Refuse a table that does not name a page for each of the keys ``begin`` to ``end - 1``; return it in pages.

    Other entries (before the window, past the last page) are not looked at.
    """
    if table.shape[0] != lengths.shape[0]:
        refuse("block_table", f"{table.shape[0]} rows do not match the {lengths.shape[0]} sequences of seq_lens")
    size, columns = cache.block_tokens, table.shape[1]
    pages = ceil_div(lengths.to(torch.int64), size)
    short = first_where(pages > columns)
    if short:
        refuse(
            "block_table",
            f"sequence {short[0]} has length {lengths[short].item()} and needs {pages[short].item()} pages of "
            f"{size}, the table's {columns} columns hold {columns * size}",
        )
    column = torch.arange(columns)
    used = (column >= (begin // size)[:, None]) & (column < ceil_div(end, size)[:, None])
    bad = first_where(used & ((table < 0) | (table >= cache.num_pages)))
    if bad:
        refuse(
            "block_table",
            f"sequence {bad[0]}, column {bad[1]} names page {table[bad].item()}, there are {cache.num_pages} pages",
        )
    return cache.pages_of(table)


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
