"""Plain pages: K and V as ``[pages, kv_heads, page_size, head_dim]`` arrays, and how rows go in and out of them.

A page of one KV head is still one block, so that whole pages move as they do in the tile layout::

    K [page_size][head_dim]   V [page_size][head_dim]   scales (int8, fp8)   bounds [2][head_dim] float32 (plain_bounds)

The bounds are the minimum and the maximum of each dim of K over all positions of the page, as they lie in memory: what
earlier tokens left there widens them, and a NaN counts as nothing. Everything here is NumPy: right for pages that other
libraries and kernels in numba read, not for speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cpu_kernels.arrays import View, from_bf16, to_bf16
from cpu_kernels.codegen.fields import Code
from cpu_kernels.layout import Layout, pack_k, pack_v, unpack_k, unpack_v

if TYPE_CHECKING:
    from cpu_kernels.pages import KVPages

_NUMPY = {Code.FP32: np.float32, Code.BF16: np.uint16, Code.FP16: np.float16}


def views(pages: KVPages, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Stored elements of K and V, ``[num_pages, num_kv_heads, page_size, head_dim]`` each, not copied."""
    layout = pages.layout
    if layout.order == "tiles":
        raise ValueError(f"pages of layout 'tiles' are no plain arrays; make them with layout='plain': {pages!r}")
    shape = (pages.num_pages, pages.num_kv_heads, layout.page_size, layout.head_dim)
    size = layout.element_bytes
    steps = (pages.page_bytes, layout.head_bytes, layout.head_dim * size, size)
    at = layer * pages.layer_bytes
    k, v = (np.ndarray(shape, layout.numpy_dtype, pages.buffer.data, at + i * layout.k_bytes, steps) for i in range(2))
    return k, v


def scales(pages: KVPages, layer: int) -> np.ndarray:
    """Scales of K and of V, float32 ``[num_pages, num_kv_heads, 2, page_size]``."""
    layout = pages.layout
    shape = (pages.num_pages, pages.num_kv_heads, 2, layout.page_size)
    steps = (pages.page_bytes, layout.head_bytes, 4 * layout.page_size, 4)
    at = layer * pages.layer_bytes + 2 * layout.k_bytes
    return np.ndarray(shape, np.float32, pages.buffer.data, at, steps)


def bounds(pages: KVPages, layer: int) -> np.ndarray:
    """Minimum and maximum of K's dims, float32 ``[num_pages, num_kv_heads, 2, head_dim]``."""
    layout = pages.layout
    shape = (pages.num_pages, pages.num_kv_heads, 2, layout.head_dim)
    steps = (pages.page_bytes, layout.head_bytes, 4 * layout.head_dim, 4)
    at = layer * pages.layer_bytes + layout.head_bytes - layout.bounds_bytes
    return np.ndarray(shape, np.float32, pages.buffer.data, at, steps)


def store(pages: KVPages, layer: int, slots: np.ndarray, k: View, v: View) -> None:
    """Write rows ``[n, kv_heads, head_dim]`` (or whole pages) into slots; -1 skips a row."""
    kind, used = pages.layout.kind, slots >= 0
    page, inside = np.divmod(slots[used], pages.page_size)
    for which, (source, target) in enumerate(zip((k, v), views(pages, layer), strict=True)):
        rows = _rows(source)[used]
        if rows.dtype == np.uint16 and pages.dtype == "bf16":
            target[page, :, inside] = rows  # the bits as they are
            continue
        wide = from_bf16(rows) if rows.dtype == np.uint16 else rows.astype(np.float32, copy=False)
        factor = kind.scales_of(wide)
        target[page, :, inside] = kind.encode(wide, factor)
        if factor is not None:
            scales(pages, layer)[page, :, which, inside] = factor
    refresh(pages, layer, page)


def refresh(pages: KVPages, layer: int, page_ids: np.ndarray) -> None:
    """Bring the bounds of some pages up to date, where pages have them."""
    if pages.layout.bounds_bytes and len(page_ids):
        ids = np.unique(page_ids)
        keys = pages.layout.kind.values(views(pages, layer)[0][ids])
        keys = np.where(np.isfinite(keys), keys, np.nan)
        span = np.stack((np.fmin.reduce(keys, 2), np.fmax.reduce(keys, 2)), 2)
        bounds(pages, layer)[ids] = np.nan_to_num(span, nan=0.0)


def load(pages: KVPages, layer: int, ids: np.ndarray, count: int, k: View, v: View) -> None:
    """Copy the first `count` tokens of a list of pages to rows (or whole pages)."""
    kind = pages.layout.kind
    for which, (source, target) in enumerate(zip(views(pages, layer), (k, v), strict=True)):
        factor = scales(pages, layer)[ids][:, :, which] if kind.limit else None
        found = source[ids]
        exact = pages.dtype == "bf16" and target.code == Code.BF16
        values = found if exact else kind.decode(found, factor)
        rows = np.swapaxes(values, 1, 2).reshape(-1, *values.shape[1::2])[:count]
        narrow = to_bf16(rows) if target.code == Code.BF16 and not exact else rows
        _rows(target, narrow.astype(_NUMPY[target.code], copy=False))


def _rows(view: View, values: np.ndarray | None = None) -> np.ndarray:
    """A caller's rows (whole pages: one row per position) as ``[n, kv_heads, head_dim]``, or those rows written."""
    array = view.array
    if not isinstance(array, np.ndarray):
        if view.code == Code.BF16:
            array = array.detach().view(_int16_of(array))
        array = array.detach().numpy()
    if view.code == Code.BF16:
        array = array.view(np.uint16)
    if values is not None:
        if array.ndim == 4:
            values = np.swapaxes(values.reshape(array.shape[0], array.shape[2], array.shape[1], array.shape[3]), 1, 2)
        array[...] = values
        return array
    return np.swapaxes(array, 1, 2).reshape(-1, *array.shape[1::2]) if array.ndim == 4 else array


def _int16_of(tensor: object) -> object:
    """torch.int16, from a tensor: NumPy knows no bfloat16, so its bits are taken."""
    return tensor.new_empty(0).short().dtype  # type: ignore[attr-defined]


def reorder(block: np.ndarray, source: Layout, target: Layout) -> np.ndarray:
    """Blocks ``[..., head_bytes]`` of one order as blocks of the other, bit for bit; bounds are left to `refresh`."""
    made = np.zeros((*block.shape[:-1], target.head_bytes), np.uint8)
    rest = source.scale_bytes
    for which, (take, put) in enumerate(((unpack_k, pack_k), (unpack_v, pack_v))):
        part = slice(which * source.k_bytes, (which + 1) * source.k_bytes)
        stored: np.ndarray = np.ascontiguousarray(block[..., part]).view(source.numpy_dtype)
        flat = (*stored.shape[:-1], source.page_size, source.head_dim)
        plain = take(stored, source) if source.order == "tiles" else stored.reshape(flat)
        made[..., part] = (put(plain, target) if target.order == "tiles" else plain.reshape(stored.shape)).view(
            np.uint8
        )
    made[..., 2 * source.k_bytes : 2 * source.k_bytes + rest] = block[..., 2 * source.k_bytes :][..., :rest]
    return made
