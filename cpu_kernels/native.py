"""The native back end: division of the work into items and chunks, job descriptors, workspaces."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from cpu_kernels import isa as isa_levels
from cpu_kernels import jit
from cpu_kernels.arrays import View
from cpu_kernels.codegen.decode import build_decode
from cpu_kernels.codegen.fields import ITEM_WORDS, JOB_WORDS, Item, Job
from cpu_kernels.layout import LANES, Layout
from cpu_kernels.plan import DecodeInputs

CHUNK_BYTES = 512 << 10
MIN_CHUNK_BYTES = 32 << 10
CHUNKS_PER_JOB = 16
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@cache
def kernel_address(layout: Layout, level: str, group: int) -> int:
    """Compile (or load) the decode kernel and return its address; it stays loaded for the life of the process."""
    ir = build_decode(layout, level, group)
    return jit.load(ir, ("decode",), jit.Target(isa_levels.target_cpu(level))).addresses["decode"]


def work_items(inputs: DecodeInputs) -> tuple[np.ndarray, int]:
    """Divide the rows into items of at most one split each.

    Returns
    -------
    items : int64 ``[num_items, 8]``
        See `fields.Item`.
    num_partials : int
        Slots of partial results that rows of several splits need.
    """
    lens, first = inputs.seq_lens.astype(np.int64), inputs.first_keys()
    split = inputs.split_tokens
    head, tail = first // split, -(-lens // split)
    count = np.maximum(tail - head, 1)
    row = np.repeat(np.arange(len(lens)), count)
    index = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    partial = np.cumsum(np.where(count > 1, count, 0)) - np.where(count > 1, count, 0)
    items = np.empty((len(row), ITEM_WORDS), np.int64)
    items[:, Item.SEQ], items[:, Item.SPLIT] = row, index
    items[:, Item.NUM_SPLITS], items[:, Item.PARTIAL] = count[row], partial[row]
    start = (head[row] + index) * split
    items[:, Item.FIRST] = np.maximum(start, first[row])
    items[:, Item.LAST] = np.minimum(start + split, lens[row])
    items[:, Item.APPEND_SLOT] = np.where(index == count[row] - 1, inputs.slots[row], -1)
    items[:, Item.SEQ_LEN] = lens[row]
    return items, int(np.where(count > 1, count, 0).sum())


def chunk_edges(items: np.ndarray, heads: int, token_bytes: int) -> np.ndarray:
    """Cut the units (item, KV head) into contiguous chunks of about equal bytes; int64 unit numbers, both ends included."""
    # An item costs something even when it has no key.
    cost = np.repeat(np.maximum(items[:, Item.LAST] - items[:, Item.FIRST], 1) * token_bytes, heads)
    done = np.cumsum(cost)
    if not len(done):
        return np.zeros(1, np.int64)
    size = min(CHUNK_BYTES, max(MIN_CHUNK_BYTES, int(done[-1]) // CHUNKS_PER_JOB))
    marks = np.arange(size, int(done[-1]), size)
    edges = np.concatenate(([0], np.searchsorted(done, marks, side="left") + 1, [len(done)]))
    return np.unique(np.minimum(edges, len(done))).astype(np.int64)


class Workspace:
    """Partial results and finish counters of one run in flight."""

    __slots__ = ("partials", "counters")

    def __init__(self, partial_bytes: int, num_counters: int) -> None:
        self.partials = np.empty(partial_bytes // 4 + 16, np.float32)
        self.counters = np.zeros(num_counters, np.int64)


class NativeDecode:
    """A native decode step: the work table and a descriptor template that `prepare` completes per run."""

    def __init__(self, inputs: DecodeInputs, level: str) -> None:
        self.inputs, self.level = inputs, level
        pages = inputs.pages
        layout = pages.layout
        self.kernel = kernel_address(layout, level, inputs.group)
        self.items, num_partials = work_items(inputs)
        self.edges = chunk_edges(self.items, pages.num_kv_heads, layout.head_bytes // layout.page_size)
        self.num_chunks, self.num_units = len(self.edges) - 1, len(self.items) * pages.num_kv_heads
        self._partial_bytes = num_partials * inputs.num_q_heads * (layout.head_dim + LANES) * 4
        self._num_counters = inputs.num_seqs * pages.num_kv_heads if num_partials else 0
        self._q_shape = (inputs.num_seqs, inputs.num_q_heads, layout.head_dim)
        self._kv_shape = (inputs.num_seqs, pages.num_kv_heads, layout.head_dim)
        self._spare: list[Workspace] = []
        self._call = _KERNEL(self.kernel)
        self._template = self._make_template()

    def _make_template(self) -> np.ndarray:
        inputs = self.inputs
        words = np.zeros(JOB_WORDS, np.int64)
        words[Job.KERNEL], words[Job.CHUNKS], words[Job.ITEMS] = self.kernel, self.edges.ctypes.data, self.items.ctypes.data
        words[Job.NUM_UNITS], words[Job.NUM_KV_HEADS] = self.num_units, inputs.pages.num_kv_heads
        words[Job.TABLE], words[Job.TABLE_STRIDE] = inputs.block_table.ctypes.data, inputs.block_table.strides[0]
        words[Job.PAGE_BYTES] = inputs.pages.page_bytes
        for field, value in ((Job.SM_SCALE, inputs.sm_scale), (Job.SOFT_CAP, inputs.logits_soft_cap)):
            words[field : field + 1].view(np.float32)[0] = value
        for field, table in ((Job.ALIBI, inputs.alibi_slopes), (Job.SINKS, inputs.sinks)):
            words[field] = 0 if table is None else table.ctypes.data
        return words

    def workspace(self) -> Workspace:
        return Workspace(self._partial_bytes, self._num_counters)

    def take(self) -> Workspace:
        """Take a workspace that no run in flight uses."""
        try:
            return self._spare.pop()
        except IndexError:
            return self.workspace()

    def give(self, workspace: Workspace) -> None:
        self._spare.append(workspace)

    def fill(
        self, words: np.ndarray, q: Any, out: Any, lse: Any, layer: int, k_new: Any, v_new: Any, workspace: Workspace
    ) -> tuple[Any, ...]:
        """Write the kernel's half of a descriptor; return what must stay alive while it runs."""
        words[Job.KERNEL :] = self._template[Job.KERNEL :]
        a, b = View("q", q).check("q", self._q_shape), View("out", out).check("out", self._q_shape)
        words[Job.Q : Job.LSE] = (a.pointer, a.strides[0], a.strides[1], a.code,
                                  b.pointer, b.strides[0], b.strides[1], b.code)  # fmt: skip
        if lse is not None:
            c = View("lse", lse).check("lse", self._q_shape[:2])
            if c.code != 0:
                raise TypeError(f"lse must be float32, got {c.code.name.lower()}")
            words[Job.LSE], words[Job.LSE_ROW] = c.pointer, c.strides[0]
        words[Job.BASE] = self.inputs.pages.layer_address(layer)
        if (k_new is None) != (v_new is None):
            raise ValueError("k_new and v_new come together; one of them is missing")
        if k_new is not None:
            k, v = View("k_new", k_new).check("k_new", self._kv_shape), View("v_new", v_new).check("v_new", self._kv_shape)
            if k.code != v.code:
                raise TypeError(f"k_new is {k.code.name.lower()} and v_new is {v.code.name.lower()}; both must agree")
            words[Job.K_NEW : Job.PARTIALS] = (k.pointer, k.strides[0], k.strides[1],
                                               v.pointer, v.strides[0], v.strides[1], k.code)  # fmt: skip
        words[Job.PARTIALS], words[Job.COUNTERS] = workspace.partials.ctypes.data, workspace.counters.ctypes.data
        workspace.counters[:] = 0  # a cancelled run leaves counts behind
        return (self, q, out, lse, k_new, v_new, workspace)

    def run(self, q: Any, out: Any, lse: Any, layer: int, k_new: Any, v_new: Any, workspace: Any) -> None:
        space = self.take() if workspace is None else workspace
        words = np.empty(JOB_WORDS, np.int64)
        alive = self.fill(words, q, out, lse, layer, k_new, v_new, space)
        self._call(words.ctypes.data, 0, self.num_units)
        del alive
        if workspace is None:
            self.give(space)


def make(inputs: DecodeInputs, isa: str | None) -> NativeDecode:
    """Build the native back end on the given or the detected ISA level."""
    return NativeDecode(inputs, isa_levels.detect(override=isa).level if isa else isa_levels.detect().level)
