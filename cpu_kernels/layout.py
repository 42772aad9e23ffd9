"""How K and V lie inside one page of one KV head. It depends on the dtype alone, so every ISA level reads the same.

A page of one KV head is one contiguous block: all of K, then all of V, then (int8, fp8) the scales::

    K  [page_size/16][head_dim/n][16 positions][n dims]     positions lie across the vector lanes
    V  [head_dim/16 ][page_size/n][16 dims][n positions]    dims lie across the vector lanes
    K scales [page_size] float32, V scales [page_size] float32          int8, fp8 only

``n`` elements share a 32-bit lane (fp32 1, bf16 2, int8 and fp8 4), so a line of K or V is one 64-byte vector. fp16
uses ``n = 1``: its lines are 32 bytes and widen with one conversion. In bf16 a line is also a row of an AMX B tile.

A page holds the blocks of all KV heads in order, a layer holds all pages in order. A kernel that computes a page
head by head, K before V, with all query heads of a group for each line, therefore reads memory strictly in ascending
order at an even pace, which is what the processor's prefetchers follow best (`docs/performance.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cpu_kernels.dtypes import LANES, KVDtype, kind_of

PAGE_SIZES = (16, 32, 64, 128)
ORDERS = ("tiles", "plain", "plain_bounds")
MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a page of one KV head, all in bytes unless named otherwise.

    Parameters
    ----------
    dtype : str
        Name of a K,V dtype (`cpu_kernels.dtypes`): ``fp32``, ``bf16``, ``fp16``, ``int8``, ``fp8``.
    head_dim : int
        A multiple of 16 up to 512.
    page_size : int
        16, 32, 64 or 128 tokens.
    order : str
        ``tiles`` as above; ``plain`` and ``plain_bounds`` as in `cpu_kernels.plain`.
    """

    dtype: str
    head_dim: int
    page_size: int
    order: str = "tiles"

    def __post_init__(self) -> None:
        kind_of(self.dtype)
        if self.order not in ORDERS:
            raise ValueError(f"layout {self.order!r} of the KV pages is unknown; known: {', '.join(ORDERS)}")
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size {self.page_size} is not supported; supported: 16, 32, 64, 128")
        if self.head_dim % LANES or not 0 < self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim {self.head_dim} is not supported: multiples of 16 up to {MAX_HEAD_DIM} are")

    @property
    def kind(self) -> KVDtype:
        """What the dtype is."""
        return kind_of(self.dtype)

    @property
    def element_bytes(self) -> int:
        return self.kind.element_bytes

    @property
    def per_lane(self) -> int:
        """Elements that share a lane (``n`` of the layout picture)."""
        return self.kind.per_lane

    @property
    def numpy_dtype(self) -> type:
        """NumPy type of one stored element (bf16 as uint16 bits)."""
        return self.kind.element

    @property
    def line_bytes(self) -> int:
        return LANES * self.per_lane * self.element_bytes

    @property
    def k_bytes(self) -> int:
        return self.page_size * self.head_dim * self.element_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the K and V scales together."""
        return 8 * self.page_size if self.kind.limit else 0

    @property
    def head_bytes(self) -> int:
        """Bytes of one page of one KV head."""
        return 2 * self.k_bytes + self.scale_bytes + self.bounds_bytes

    @property
    def bounds_bytes(self) -> int:
        """Bytes of the minima and maxima of K's dims, of `plain_bounds`."""
        return 8 * self.head_dim if self.order == "plain_bounds" else 0


def pack_k(plain: np.ndarray, layout: Layout) -> np.ndarray:
    """Reorder ``[..., page_size, head_dim]`` stored elements of K to the block's order, flat in the last axis."""
    n, lead = layout.per_lane, plain.shape[:-2]
    x = plain.reshape(*lead, layout.page_size // LANES, LANES, layout.head_dim // n, n)
    return np.ascontiguousarray(np.swapaxes(x, -3, -2)).reshape(*lead, layout.page_size * layout.head_dim)


def pack_v(plain: np.ndarray, layout: Layout) -> np.ndarray:
    """Reorder ``[..., page_size, head_dim]`` stored elements of V to the block's order, flat in the last axis."""
    n, lead = layout.per_lane, plain.shape[:-2]
    x = plain.reshape(*lead, layout.page_size // n, n, layout.head_dim // LANES, LANES)
    order = (*range(len(lead)), *(len(lead) + i for i in (2, 0, 3, 1)))
    return np.ascontiguousarray(x.transpose(order)).reshape(*lead, layout.page_size * layout.head_dim)


def unpack_k(block: np.ndarray, layout: Layout) -> np.ndarray:
    """Invert `pack_k`: flat block order to ``[..., page_size, head_dim]``."""
    n, lead = layout.per_lane, block.shape[:-1]
    x = block.reshape(*lead, layout.page_size // LANES, layout.head_dim // n, LANES, n)
    return np.ascontiguousarray(np.swapaxes(x, -3, -2)).reshape(*lead, layout.page_size, layout.head_dim)


def unpack_v(block: np.ndarray, layout: Layout) -> np.ndarray:
    """Invert `pack_v`: flat block order to ``[..., page_size, head_dim]``."""
    n, lead = layout.per_lane, block.shape[:-1]
    x = block.reshape(*lead, layout.head_dim // LANES, layout.page_size // n, LANES, n)
    order = (*range(len(lead)), *(len(lead) + i for i in (1, 3, 0, 2)))
    return np.ascontiguousarray(x.transpose(order)).reshape(*lead, layout.page_size, layout.head_dim)
