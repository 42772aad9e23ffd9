"""Handing pages between a GPU layer's cache and the CPU's tile layout, so that the copy is one contiguous transfer.

::

    down:  pack_for_cpu (gpu.compute) -> one copy (gpu.d2h) -> CPU pages       up:  the same, backwards
    or     copy_down: pages of all layers straight into page-locked CPU pages       copy_up: backwards

One page of one kv head is one block of bytes (``bodies/pack.py`` draws it); a page holds the blocks of its kv heads in
order, as the CPU package stores them, so the copy's target can be the CPU pages themselves.
"""

from dataclasses import dataclass
from typing import Any

import torch

from gpu_kernels.bodies import pack as bodies
from gpu_kernels.cache_shape import CacheShape, cache_shape, check_scales
from gpu_kernels.capability import capability_of
from gpu_kernels.checks import check_aligned, check_contiguous, check_tensor, device_integers, first_where, refuse
from gpu_kernels.config import COPY_PROGRAMS, SCALED, pack_config
from gpu_kernels.launch import launch
from gpu_kernels.overlap import refuse_overlap

# by cache dtype: elements per word, word dtype, V element dtype (unsigned: widening must not copy the sign)
_WORDS = {
    torch.float32: (1, torch.int32, torch.int32),
    torch.bfloat16: (2, torch.int32, torch.uint16),
    torch.float16: (1, torch.int16, torch.int16),
    torch.int8: (4, torch.int32, torch.uint8),
    torch.float8_e4m3fn: (4, torch.int32, torch.uint8),
}


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Bytes of a page in the CPU's layout."""

    num_kv_heads: int
    page_size: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in _WORDS:
            refuse("dtype", f"{self.dtype} has no CPU layout")

    @property
    def head_bytes(self) -> int:
        """Bytes of one page of one kv head: K, V, and the scales of an int8 or fp8 cache."""
        scales = 8 * self.page_size if self.dtype in SCALED else 0
        return 2 * self.page_size * self.head_dim * self.dtype.itemsize + scales

    @property
    def page_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes


def block_shape(cache: CacheShape) -> BlockShape:
    """The CPU blocks that hold this cache's pages."""
    return BlockShape(cache.num_kv_heads, cache.page_size, cache.head_dim, cache.dtype)


def pack_for_cpu(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_ids: Any,
    out: torch.Tensor | None = None,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    check_ids: bool = True,
) -> torch.Tensor:
    """Pages of one layer in the CPU's layout -> uint8 [num_ids, num_kv_heads, head_bytes], contiguous.

    Parameters
    ----------
    k_cache, v_cache
        [num_pages, num_kv_heads, page_size, head_dim], float32, float16, bfloat16, int8 or float8_e4m3fn.
    page_ids
        [num_ids] integers; int32 or int64 on the cache's device cost no copy.
    out
        Where to write; made when absent.
    k_scale, v_scale
        For an int8 or fp8 cache: [num_pages, num_kv_heads, page_size] float32.
    check_ids
        Check the ids. On a CUDA tensor that waits for the device; pass False where the caller knows.

    Raises
    ------
    ValueError
        one sentence that names the argument, the row and the numbers.
    """
    cache = cache_shape(k_cache, v_cache)
    page_ids = _ids(page_ids, cache)
    shape = (page_ids.shape[0], cache.num_kv_heads, block_shape(cache).head_bytes)
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=cache.device)
    _move(bodies.pack, cache, k_cache, v_cache, page_ids, ("out", out), k_scale, v_scale, check_ids)
    return out


def unpack_from_cpu(
    blocks: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_ids: Any,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    check_ids: bool = True,
) -> None:
    """Write uint8 ``blocks [num_ids, num_kv_heads, head_bytes]`` of the CPU's layout into pages of one layer.

    The inverse of `pack_for_cpu`, with its arguments; no page may be named twice.
    """
    cache = cache_shape(k_cache, v_cache)
    page_ids = _ids(page_ids, cache)
    if check_ids and len(page_ids.unique()) != len(page_ids):
        refuse("page_ids", f"{len(page_ids)} ids name {len(page_ids.unique())} pages; each may be written once")
    _move(bodies.unpack, cache, k_cache, v_cache, page_ids, ("blocks", blocks), k_scale, v_scale, check_ids)


def copy_down(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_ids: torch.Tensor,
    blocks: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Page ``page_ids[i]`` of every layer -> block ``block_ids[i]`` of that layer of the CPU's pool, in one launch.

    Parameters
    ----------
    k_cache, v_cache
        [num_layers, num_pages, num_kv_heads, page_size, head_dim], contiguous, of the dtypes of `pack_for_cpu`.
    page_ids, block_ids
        [num_ids] int64 on the cache's device, each at most once. They are not checked.
    blocks
        uint8 [num_layers, num_blocks, num_kv_heads, head_bytes], contiguous: page-locked host memory, or on the device.
    k_scale, v_scale
        For an int8 or fp8 cache: [num_layers, num_pages, num_kv_heads, page_size] float32.

    Raises
    ------
    ValueError
        one sentence that names the argument and the numbers.
    """
    _copy(bodies.copy_down, k_cache, v_cache, page_ids, blocks, block_ids, k_scale, v_scale)


def copy_up(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_ids: torch.Tensor,
    blocks: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """The inverse of `copy_down`, with its arguments."""
    _copy(bodies.copy_up, k_cache, v_cache, page_ids, blocks, block_ids, k_scale, v_scale)


def _copy(
    body: Any,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_ids: torch.Tensor,
    blocks: torch.Tensor,
    block_ids: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("blocks", blocks)):
        check_contiguous(name, tensor)
    if k_cache.dim() != 5:
        refuse("k_cache", f"shape {tuple(k_cache.shape)} is not [layers, pages, kv heads, page_size, head_dim]")
    cache = cache_shape(k_cache[0], v_cache[0])
    capability_of(cache.device)
    shape, (num_layers, num_pages) = block_shape(cache), k_cache.shape[:2]
    rows = (num_layers, blocks.shape[1] if blocks.dim() > 1 else 0, cache.num_kv_heads, shape.head_bytes)
    check_tensor("blocks", blocks, rows, (torch.uint8,), blocks.device)
    check_aligned("blocks", blocks)
    for name, ids in (("page_ids", page_ids), ("block_ids", block_ids)):
        check_tensor(name, ids, (len(page_ids),), (torch.int64,), cache.device)
    scales = () if k_scale is None or v_scale is None else (k_scale, v_scale)
    check_scales(cache, *(scale[0] for scale in scales) if scales else (None, None))
    _, word, element = _WORDS[cache.dtype]
    k, v, flat = k_cache[0].view(word), v_cache[0].view(element), blocks.view(-1).view(word)
    k_words, v_words = (scale.view(torch.int32) for scale in scales) if scales else (k, k)  # k: not followed
    parts = num_layers * len(page_ids) * cache.num_kv_heads * (cache.page_size // 16)
    launch(
        body, (min(COPY_PROGRAMS, parts),), pack_config(cache.dtype, cache.head_dim), cache.device,
        k, v, k_words, v_words, page_ids, block_ids, flat, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        cache.num_kv_heads * cache.page_size, cache.page_size, cache.head_dim, cache.page_size,
        shape.head_bytes // word.itemsize, shape.page_bytes // word.itemsize, len(page_ids), cache.num_kv_heads,
        num_layers, num_pages, rows[1],
    )  # fmt: skip


def _move(
    body: Any,
    cache: CacheShape,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_ids: torch.Tensor,
    named_blocks: tuple[str, torch.Tensor],
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    check_ids: bool,
) -> None:
    capability_of(cache.device)
    name, blocks = named_blocks
    shape = block_shape(cache)
    if cache.stride_position != cache.head_dim or cache.pages_per_block > 1:
        refuse(
            "k_cache",
            f"blocks of {cache.block_tokens} positions, {cache.stride_position} elements apart, have no CPU layout: "
            "contiguous positions in pages of 16, 32, 64 or 128 have",
        )
    if check_ids:
        _check_pages(page_ids, cache.num_pages)
    check_tensor(name, blocks, (page_ids.shape[0], cache.num_kv_heads, shape.head_bytes), (torch.uint8,), cache.device)
    check_aligned(name, blocks)
    check_contiguous(name, blocks)
    refuse_overlap(name, blocks, [("k_cache", k_cache), ("v_cache", v_cache)], in_place=False)
    share, word, element = _WORDS[cache.dtype]
    k, v, flat = k_cache.view(word), v_cache.view(element), blocks.view(-1).view(word)
    scales = check_scales(cache, k_scale, v_scale)
    k_scale, v_scale = (scale.view(torch.int32) for scale in scales) if scales else (k, k)  # k: not followed
    launch(
        body, (page_ids.shape[0], cache.num_kv_heads, cache.page_size // 16), pack_config(cache.dtype, cache.head_dim),
        cache.device,
        k, v, k_scale, v_scale, page_ids, flat, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        cache.num_kv_heads * cache.page_size, cache.page_size, cache.head_dim, cache.page_size,
        shape.head_bytes // word.itemsize, shape.page_bytes // word.itemsize,
    )  # fmt: skip


def _ids(page_ids: Any, cache: CacheShape) -> torch.Tensor:
    if isinstance(page_ids, torch.Tensor) and page_ids.dtype is torch.int32 and page_ids.device == cache.device:
        if page_ids.dim() == 1:
            return page_ids
    return device_integers("page_ids", page_ids, cache.device)


def _check_pages(page_ids: torch.Tensor, num_pages: int) -> None:
    host = page_ids.detach().cpu()
    bad = first_where((host < 0) | (host >= num_pages))
    if bad:
        refuse("page_ids", f"row {bad[0]} names page {int(host[bad])}, there are {num_pages} pages")
