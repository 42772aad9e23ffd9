"""`KVPages`: a pool of KV pages in the packed layout, and the transfers in and out of it."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from cpu_kernels import isa, jit, plain, topology
from cpu_kernels.arrays import View, integers, refuse_inside, refuse_overlap, whole
from cpu_kernels.codegen.rows import build_moves
from cpu_kernels.dtypes import kind_of
from cpu_kernels.layout import Layout
from cpu_kernels.memory import allocate, give_back, touched_by

_MOVE = ctypes.CFUNCTYPE(
    None,
    *(
        [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        + [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64] * 2
        + [ctypes.c_int64, ctypes.c_int64]
    ),
)


class KVPages:
    """Paged K and V of all layers in one allocation.

    Parameters
    ----------
    num_pages, num_kv_heads, head_dim : int
        Shape of one layer's pool. `head_dim` is a multiple of 16 up to 512.
    page_size : int
        Tokens a page: 16, 32, 64 or 128.
    dtype : str
        ``bf16``, ``fp32``, ``fp16``, or ``int8`` and ``fp8`` (a scale per token and head, kept inside the page).
    num_layers : int
        Layers that share page numbers: page p of layer l is its own memory.
    huge_pages : bool
        Ask for 2 MiB pages.
    cpus : tuple of int, optional
        CPUs that touch the memory first, in parallel, each its part (NUMA-local placement); default: those of the
        default workers.
    touch : bool
        Commit the memory now (default). Otherwise on first write.
    layout : str
        ``tiles``, which the native kernels read; ``plain``: K and V are arrays ``[num_pages, num_kv_heads, page_size,
        head_dim]`` (`plain`), for kernels in numba, torch and IPEX; ``plain_bounds``: with minima and maxima of each
        page's keys besides.

    Attributes
    ----------
    nbytes : int
        Bytes of the pool, scales included.
    page_bytes, layer_bytes : int
        Bytes of one page of one layer, and of one layer.
    page_nodes : ndarray of int64 ``[num_pages]`` or None
        Which NUMA node (its place in `topology.Topology.numa`) holds a page, in every layer; None where all are alike.
        A sequence whose pages lie on one node is computed there, as far as that node's workers get to it.
    buffer : ndarray of uint8 ``[num_layers, num_pages, num_kv_heads, layout.head_bytes]``
        The memory itself; see `cpu_kernels.layout` for the order inside.

    Raises
    ------
    ValueError
        For an unsupported shape or dtype.
    MemoryError
        If the pool does not fit the available memory.
    """

    def __init__(
        self,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int = 32,
        dtype: str = "bf16",
        num_layers: int = 1,
        *,
        huge_pages: bool = True,
        cpus: tuple[int, ...] | None = None,
        touch: bool = True,
        layout: str = "tiles",
    ) -> None:
        for name, n in (("num_pages", num_pages), ("num_kv_heads", num_kv_heads), ("num_layers", num_layers)):
            if whole(name, n) < 1:
                raise ValueError(f"{name} must be at least 1, got {n}")
        self.layout = Layout(dtype, head_dim, page_size, layout)
        self.num_pages, self.num_kv_heads, self.num_layers = num_pages, num_kv_heads, num_layers
        self.page_bytes = num_kv_heads * self.layout.head_bytes
        self.layer_bytes = num_pages * self.page_bytes
        self.nbytes = num_layers * self.layer_bytes
        what = f"a KV pool of {num_pages} pages x {self.page_bytes} bytes x {num_layers} layers"
        here = topology.read()
        if cpus is None:
            cpus = topology.worker_cpus(here)
        memory = allocate(self.nbytes, what, huge_pages=huge_pages, cpus=cpus, touch=touch, pieces=num_layers)
        placed = touch and touched_by(self.nbytes, cpus)
        self.page_nodes = _nodes_of_pages(here, cpus, num_pages) if placed else None
        self.buffer = memory.reshape(num_layers, num_pages, num_kv_heads, self.layout.head_bytes)
        self._base = self.buffer.ctypes.data

    @property
    def dtype(self) -> str:
        return self.layout.dtype

    @property
    def head_dim(self) -> int:
        return self.layout.head_dim

    @property
    def page_size(self) -> int:
        return self.layout.page_size

    def plain(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V of plain pages, ``[num_pages, num_kv_heads, page_size, head_dim]`` each as stored, not copied."""
        return plain.views(self, layer_of(layer, self.num_layers))

    def release(self) -> None:
        """Give the memory back to the system now, whoever still refers to this pool: its pages read as zeros then."""
        give_back(self.buffer)

    @property
    def memory(self) -> tuple[int, int]:
        """Address of the pool, and its bytes."""
        return self._base, self.nbytes

    def layer_address(self, layer: int) -> int:
        """Address of page 0 of `layer`."""
        return self._base + layer_of(layer, self.num_layers) * self.layer_bytes

    def __repr__(self) -> str:
        shape = f"{self.num_layers} layers x {self.num_pages} pages x {self.num_kv_heads} heads"
        order = "" if self.layout.order == "tiles" else f", {self.layout.order}"
        return f"KVPages({shape} x {self.page_size} tokens x {self.head_dim}, {self.dtype}{order}, {self.nbytes} bytes)"


def layer_of(layer: Any, num_layers: int) -> int:
    """A layer's number, or a sentence."""
    number = whole("layer", layer)
    if not 0 <= number < num_layers:
        raise ValueError(f"layer {number} is out of range: the pool has {num_layers} layers")
    return number


def _nodes_of_pages(here: topology.Topology, cpus: tuple[int, ...], num_pages: int) -> np.ndarray | None:
    """Which node's CPU touched the first byte of a page; `memory.allocate` deals equal parts to the CPUs in order."""
    nodes = np.array([here.node_index(cpu) for cpu in cpus], np.int64)
    if len(set(nodes.tolist())) < 2:
        return None
    return nodes[np.arange(num_pages) * len(cpus) // num_pages]


@cache
def _moves(layout: Layout, level: str) -> tuple[Any, Any]:
    loaded = jit.load(build_moves(layout, level), ("append", "gather"), jit.target_of(level))
    return _MOVE(loaded.addresses["append"]), _MOVE(loaded.addresses["gather"])


def _move(pages: KVPages, layer: int, which: int, index: np.ndarray, n: int, k: View, v: View) -> None:
    if pages.layout.order != "tiles":
        if which == 0:
            plain.store(pages, layer, index, k, v)
        else:
            plain.load(pages, layer, index, n, k, v)
        return
    call = _moves(pages.layout, isa.detect().level)[which]
    call(
        pages.layer_address(layer),
        pages.page_bytes,
        pages.num_kv_heads,
        index.ctypes.data,
        n,
        k.pointer,
        *_strides(k),
        v.pointer,
        *_strides(v),
        k.shape[2] if len(k.shape) == 4 else max(n, 1),
        int(k.code),
    )


def _strides(x: View) -> tuple[int, int, int]:
    """Bytes from row to row, head to head and (of whole pages) page to page."""
    if len(x.shape) == 4:  # [pages, kv_heads, page_size, head_dim]
        return x.strides[2], x.strides[1], x.strides[0]
    return x.strides[0], x.strides[1], 0


def append_kv(pages: KVPages, layer: int, k: Any, v: Any, slot_mapping: Any) -> None:
    """Write rows of K and V into the pages of one layer, without the GIL.

    Parameters
    ----------
    pages : KVPages
        Target.
    layer : int
        Layer of `pages`.
    k, v : array ``[n, num_kv_heads, head_dim]``
        fp32, bf16 or fp16, both of one dtype; rounded to nearest even.
    slot_mapping : int64 ``[n]``
        ``page * page_size + offset`` of each row, each slot at most once; -1 skips the row.

    Raises
    ------
    ValueError, TypeError
        For a wrong shape, dtype or slot.
    """
    slots = integers("slot_mapping", slot_mapping, np.int64, 1)
    shape = (len(slots), pages.num_kv_heads, pages.head_dim)
    kv, vv = _pair("k", k, "v", v, shape)
    capacity = pages.num_pages * pages.page_size
    if len(slots) and (slots.max() >= capacity or slots.min() < -1):
        row = int(np.argmax((slots >= capacity) | (slots < -1)))
        raise ValueError(f"slot_mapping[{row}] is {slots[row]}, outside -1 to {capacity - 1}")
    if named := shared_slot(slots):
        raise ValueError(named)
    for x in (kv, vv):
        refuse_inside(x, *pages.memory)
    layer_of(layer, pages.num_layers)
    if len(slots):
        _move(pages, layer, 0, slots, len(slots), kv, vv)


def shared_slot(slots: np.ndarray) -> str:
    """Say which rows would write to one slot; empty when none do (-1 is no slot)."""
    if len(slots) < 2 or (np.diff(slots) > 0).all():
        return ""
    order = np.argsort(slots, kind="stable")
    found = slots[order]
    twice = (found[1:] == found[:-1]) & (found[1:] >= 0)
    if not twice.any():
        return ""
    slot = int(found[1:][twice][0])
    rows = np.flatnonzero(slots == slot).tolist()
    return f"slot_mapping: slot {slot} is named by rows {rows}; a slot may be written once per call"


def gather_kv(pages: KVPages, layer: int, page_ids: Any, num_tokens: int, k_out: Any, v_out: Any) -> None:
    """Copy the first `num_tokens` tokens of a list of pages to plain arrays, without the GIL.

    Parameters
    ----------
    page_ids : int ``[m]``
        Pages in the order of the tokens; ``m * page_size >= num_tokens``.
    num_tokens : int
        Tokens to copy.
    k_out, v_out : array ``[num_tokens, num_kv_heads, head_dim]``
        fp32, bf16 or fp16, both of one dtype. bf16 pages to bf16 arrays is exact.

    Raises
    ------
    ValueError, TypeError
        For a wrong shape, dtype or page.
    """
    ids = integers("page_ids", page_ids, np.int64, 1)
    num_tokens = whole("num_tokens", num_tokens)
    if num_tokens < 0 or num_tokens > len(ids) * pages.page_size:
        raise ValueError(f"num_tokens {num_tokens} does not fit {len(ids)} pages of {pages.page_size} tokens")
    used = ids[: -(-num_tokens // pages.page_size)]
    _check_ids("page_ids", used, pages.num_pages)
    shape = (num_tokens, pages.num_kv_heads, pages.head_dim)
    kv, vv = _pair("k_out", k_out, "v_out", v_out, shape, results=True)
    refuse_overlap(kv, vv, in_place=False)
    for x in (kv, vv):
        refuse_inside(x, *pages.memory)
    layer_of(layer, pages.num_layers)
    if num_tokens:
        _move(pages, layer, 1, used, num_tokens, kv, vv)


def _pair(
    k_name: str, k: Any, v_name: str, v: Any, shape: tuple[int, ...], *, results: bool = False
) -> tuple[View, View]:
    kv, vv = (x.check_result(shape) if results else x.check(shape) for x in (View(k_name, k), View(v_name, v)))
    if kv.code != vv.code:
        codes = kv.code.name.lower(), vv.code.name.lower()
        raise TypeError(f"{k_name} is {codes[0]} and {v_name} is {codes[1]}; both must have one dtype")
    return kv, vv


def _check_ids(name: str, ids: np.ndarray, num_pages: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= num_pages):
        at = int(np.argmax((ids < 0) | (ids >= num_pages)))
        raise ValueError(f"{name}[{at}] is page {ids[at]}, but the pool has pages 0 to {num_pages - 1}")


def _once(name: str, ids: np.ndarray) -> None:
    if len(np.unique(ids)) != len(ids):
        raise ValueError(f"{name} names {len(ids)} pages, {len(np.unique(ids))} of them different: each once, please")


def copy_pages(src: KVPages, src_ids: Any, dst: KVPages, dst_ids: Any, layer: int | None = None) -> None:
    """Copy whole pages between two pools (of all layers when `layer` is None), bit for bit.

    Pools of one shape and dtype may lie in different orders; that goes through NumPy.

    Raises
    ------
    ValueError
        If shapes, dtypes, head or layer counts differ, or a page is out of range.
    """
    shapes = [(replace(x.layout, order="tiles"), x.num_kv_heads, x.num_layers) for x in (src, dst)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"src and dst must have one layout: {src!r} against {dst!r}")
    a, b = integers("src_ids", src_ids, np.int64, 1), integers("dst_ids", dst_ids, np.int64, 1)
    if len(a) != len(b):
        raise ValueError(f"src_ids names {len(a)} pages and dst_ids {len(b)}")
    _check_ids("src_ids", a, src.num_pages)
    _check_ids("dst_ids", b, dst.num_pages)
    _once("dst_ids", b)
    if src is dst and (again := sorted(set(a.tolist()) & set(b.tolist()))):
        raise ValueError(f"page {again[0]} is both in src_ids and in dst_ids of one pool: copy in two calls")
    for number in range(src.num_layers) if layer is None else (layer_of(layer, src.num_layers),):
        if src.layout != dst.layout:
            dst.buffer[number][b] = plain.reorder(src.buffer[number][a], src.layout, dst.layout)
            plain.refresh(dst, number, b)
            continue
        source, target = src.layer_address(number), dst.layer_address(number)
        for s, d in zip(a.tolist(), b.tolist(), strict=True):
            ctypes.memmove(target + d * dst.page_bytes, source + s * src.page_bytes, src.page_bytes)


def pack(pages: KVPages, layer: int, page_ids: Any, k: Any, v: Any) -> None:
    """Fill whole pages from plain arrays, without the GIL.

    Parameters
    ----------
    page_ids : int ``[m]``
        Each page at most once.
    k, v : array ``[m, num_kv_heads, page_size, head_dim]``
        fp32, bf16 (NumPy: uint16 bits) or fp16, both of one dtype; stored in the pages' dtype as `append_kv` does.

    Raises
    ------
    ValueError, TypeError
        For a wrong shape, dtype or page; nothing has been written then.
    """
    ids = integers("page_ids", page_ids, np.int64, 1)
    _check_ids("page_ids", ids, pages.num_pages)
    _once("page_ids", ids)
    kv, vv = _pair("k", k, "v", v, (len(ids), pages.num_kv_heads, pages.page_size, pages.head_dim))
    for x in (kv, vv):
        refuse_inside(x, *pages.memory)
    layer_of(layer, pages.num_layers)
    if len(ids):
        slots = (ids[:, None] * pages.page_size + np.arange(pages.page_size)).reshape(-1)
        _move(pages, layer, 0, slots, len(slots), kv, vv)


def unpack(pages: KVPages, layer: int, page_ids: Any) -> tuple[np.ndarray, np.ndarray]:
    """Read whole pages back as plain float32 ``[len(page_ids), num_kv_heads, page_size, head_dim]`` K and V."""
    ids = integers("page_ids", page_ids, np.int64, 1)
    _check_ids("page_ids", ids, pages.num_pages)
    layer_of(layer, pages.num_layers)
    shape = (len(ids), pages.num_kv_heads, pages.page_size, pages.head_dim)
    k, v = np.empty(shape, np.float32), np.empty(shape, np.float32)
    if len(ids):
        _move(pages, layer, 1, ids, len(ids) * pages.page_size, View("k", k), View("v", v))
    return k, v


def encode(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Convert float32 ``[..., head_dim]`` to stored elements and, where the dtype has them, scales ``[...]``."""
    kind = kind_of(dtype)
    scales = kind.scales_of(x)
    return kind.encode(x, scales), scales


def decode(stored: np.ndarray, dtype: str, scales: np.ndarray | None = None) -> np.ndarray:
    """Invert `encode` up to rounding: stored elements (and scales) to float32."""
    return kind_of(dtype).decode(stored, scales)
