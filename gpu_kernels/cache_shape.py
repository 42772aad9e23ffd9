"""The geometry of a paged cache: read off its tensors, and what block tables and scales have to be beside it."""

from dataclasses import dataclass

import torch

from gpu_kernels.checks import (
    INT32_MAX,
    ceil_div,
    check_aligned,
    check_contiguous,
    check_head_dim,
    check_is_tensor,
    check_tensor,
    first_where,
    refuse,
)
from gpu_kernels.config import DTYPES, PAGE_SIZES, SCALED


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
        if max(self.stride, self.stride_head, self.stride_position) > INT32_MAX:
            refuse("k_cache", f"page stride {self.stride} exceeds {INT32_MAX} elements")
        if self.stride % 16 or self.stride_head % 16 or self.stride_position % 16:
            refuse(
                "k_cache",
                f"strides {self.stride} of pages, {self.stride_head} of heads, {self.stride_position} of positions are "
                "no multiples of 16",
            )
        if self.num_pages * self.block_step > INT32_MAX:
            refuse("k_cache", f"{self.num_pages} blocks make more than {INT32_MAX} page numbers")

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
    ratio, pages = max(1, tokens // page_size if page_size else 1), 1
    if ratio > 1:
        inside = page_size * position
        if stride % inside:
            refuse("k_cache", f"a block stride of {stride} elements is no multiple of {inside}, a page of {page_size}")
        if k_cache.dtype not in DTYPES and stride // inside != heads * ratio:
            refuse(
                "k_cache",
                f"a cache with scales and blocks of {tokens} positions must be contiguous, strides are {stride}",
            )
        stride, pages = inside, stride // inside
    return CacheShape(
        blocks, heads, page_size, head_dim, k_cache.dtype, k_cache.device, stride, stride_head, position, ratio, pages
    )


def codes(cache: torch.Tensor) -> torch.Tensor:
    """A cache as the kernels take it: fp8 by its bits, so that they run on devices without the type."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


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
