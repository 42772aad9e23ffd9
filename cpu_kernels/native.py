"""The native back end: division of the work into items and chunks, job descriptors, workspaces."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from cpu_kernels import handed, jit
from cpu_kernels import isa as isa_levels
from cpu_kernels.codegen.decode import build_decode
from cpu_kernels.codegen.fields import ITEM_WORDS, JOB_WORDS, MAX_NODES, MEMBER_WORDS, TOGETHER, Item, Job
from cpu_kernels.common import Common, common_beginnings, rows_at_once
from cpu_kernels.layout import LANES, Layout
from cpu_kernels.plan import DecodeInputs
from cpu_kernels.tuning import Tuning, current

MIN_CHUNK_BYTES = 32 << 10
CHUNKS_PER_JOB = 16
_HALF = struct.Struct(f"{JOB_WORDS - Job.KERNEL}q")
_CLAIM = struct.Struct(f"{MAX_NODES}q")
_BASE, _SPACE = struct.Struct("q"), struct.Struct("2q")
_HALF_AT, _BASE_AT, _SPACE_AT = 8 * int(Job.KERNEL), 8 * int(Job.BASE), 8 * int(Job.PARTIALS)
_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@cache
def kernel_address(layout: Layout, level: str, group: int, tuning: Tuning, rows: int = 1) -> int:
    """Compile (or load) the decode kernel and return its address; it stays loaded for the life of the process."""
    ir = build_decode(layout, level, group, tuning, rows=rows)
    return jit.load(ir, ("decode",), jit.target_of(level, layout.kind.extras(level))).addresses["decode"]


def work_items(inputs: DecodeInputs, common: Sequence[Common] = ()) -> tuple[np.ndarray, int]:
    """Divide the rows into items of at most one split each, behind what they have in common with others.

    Returns
    -------
    items : int64 ``[num_items, 8]``
        See `fields.Item`.
    num_partials : int
        Slots of partial results that rows of several splits need.
    """
    first, last = inputs.reach.first, inputs.reach.last
    split = inputs.split_tokens
    before = np.zeros(len(first), np.int64)  # splits that others bring
    if common:
        first = first.copy()
        for c in common:
            first[c.rows], before[c.rows] = c.tokens, -(-c.tokens // split)
    head, tail = first // split, -(-last // split)
    own = np.maximum(tail - head, 1)
    row = np.repeat(np.arange(len(own)), own)
    index = np.arange(len(row)) - np.repeat(np.cumsum(own) - own, own)
    count = own + before
    partials = np.where(count > 1, count, 0)
    items = np.empty((len(row), ITEM_WORDS), np.int64)
    items[:, Item.SEQ], items[:, Item.SPLIT] = row, before[row] + index
    items[:, Item.NUM_SPLITS], items[:, Item.PARTIAL] = count[row], (np.cumsum(partials) - partials)[row]
    start = (head[row] + index) * split
    items[:, Item.FIRST] = np.maximum(start, first[row])
    items[:, Item.LAST] = np.minimum(start + split, last[row])
    items[:, Item.APPEND_SLOT] = np.where(index == own[row] - 1, inputs.slots[row], -1)
    items[:, Item.SEQ_LEN] = inputs.reach.query[row] + 1
    return items, int(partials.sum())


def items_together(
    inputs: DecodeInputs, common: Sequence[Common], own: np.ndarray, rows_at_once: int
) -> tuple[np.ndarray, np.ndarray]:
    """Items of what rows have in common, split by split, and the rows that they bring together: see `fields.Member`.

    `own` are the rows' own items, in order.
    """
    first_own = np.searchsorted(own[:, Item.SEQ], np.arange(inputs.num_seqs))
    items: list[tuple[int, ...]] = []
    members: list[np.ndarray] = []
    split, at = inputs.split_tokens, 0
    for c in common:
        members.append(np.stack([c.rows, *own[first_own[c.rows]][:, [Item.PARTIAL, Item.NUM_SPLITS]].T], axis=1))
        for number, start in enumerate(range(0, c.tokens, split)):
            for r in range(0, len(c.rows), rows_at_once):
                items.append((
                    int(c.rows[r]), start, min(start + split, c.tokens), number, min(rows_at_once, len(c.rows) - r),
                    at + r, TOGETHER, 1,
                ))  # fmt: skip
        at += len(c.rows)
    return np.array(items, np.int64), np.ascontiguousarray(np.concatenate(members), np.int64)


def heads_per_unit(items: np.ndarray, heads: int, token_bytes: int, group: int, tuning: Tuning) -> int:
    """Choose how many KV heads a unit walks through page by page.

    All heads of a page are one contiguous run of memory, which the processor's own prefetchers like best; but the
    running outputs of many heads times a large group no longer stay in the first-level cache, so that from some group
    on one head at a time is faster (`docs/performance.md`). Fewer heads are also taken when there would be too few
    units to share out. The result of a row does not depend on the choice.
    """
    if group > tuning.run_group or not len(items):
        return 1
    tokens = np.maximum(items[:, Item.LAST] - items[:, Item.FIRST], 1)
    total, largest = (int(x) * heads * token_bytes for x in (tokens.sum(), tokens.max()))
    parts = -(-largest * CHUNKS_PER_JOB // max(total, CHUNKS_PER_JOB * MIN_CHUNK_BYTES))
    return min(tuning.run_heads, -(-heads // min(heads, parts)))


def chunk_edges(items: np.ndarray, heads: int, token_bytes: int, chunk_bytes: int) -> np.ndarray:
    """Cut the units into contiguous chunks of about equal bytes: int64 unit numbers, both ends included."""
    # An item costs something even when it has no key, and computes for each of its rows.
    rows = np.where(items[:, Item.APPEND_SLOT] == TOGETHER, items[:, Item.NUM_SPLITS], 1)
    cost = np.repeat(np.maximum(items[:, Item.LAST] - items[:, Item.FIRST], 1) * rows * token_bytes, heads)
    done = np.cumsum(cost)
    if not len(done):
        return np.zeros(2, np.int64)  # one empty chunk: a job without work ends like any other
    size = min(chunk_bytes, max(MIN_CHUNK_BYTES, int(done[-1]) // CHUNKS_PER_JOB))
    marks = np.arange(size, int(done[-1]), size)
    edges = np.concatenate(([0], np.searchsorted(done, marks, side="left") + 1, [len(done)]))
    return np.unique(np.minimum(edges, len(done))).astype(np.int64)


def by_node(items: np.ndarray, inputs: DecodeInputs) -> tuple[np.ndarray, list[int]]:
    """Order items by the NUMA node of their first page; returns them and how many each node has."""
    nodes = inputs.pages.page_nodes
    if nodes is None or not len(items) or not inputs.block_table.shape[1]:
        return items, [len(items)]
    column = np.minimum(items[:, Item.FIRST] // inputs.pages.page_size, inputs.block_table.shape[1] - 1)
    page = inputs.block_table[items[:, Item.SEQ], column]
    empty = items[:, Item.FIRST] >= items[:, Item.LAST]
    node = np.where(empty, 0, nodes[np.where(empty, 0, page)]) % MAX_NODES
    return items[np.argsort(node, kind="stable")], np.bincount(node, minlength=MAX_NODES).tolist()


def node_edges(
    items: np.ndarray, counts: list[int], heads: int, token_bytes: int, chunk_bytes: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    """`chunk_edges` of each node's items in turn, and where each node's chunks end."""
    if len(counts) == 1:
        edges = chunk_edges(items, heads, token_bytes, chunk_bytes)
        return edges, (len(edges) - 1,) * MAX_NODES
    parts, ends, first = [np.zeros(1, np.int64)], [], 0
    for count in counts:
        if count:
            cut = chunk_edges(items[first : first + count], heads, token_bytes, chunk_bytes)
            parts.append(cut[1:] + first * heads)
            first += count
        ends.append(sum(map(len, parts)) - 1)
    return np.concatenate(parts), tuple(ends)


def nothing_to_claim(chunk_ends: Sequence[int]) -> bytes:
    """A job's claim words with all chunks taken, as they are until it is pushed."""
    return _CLAIM.pack(*(end << 32 | end for end in chunk_ends))


class Workspace:
    """Partial results and finish counters of one run in flight."""

    __slots__ = ("partials", "counters", "partials_at", "counters_at", "partial_bytes")

    def __init__(self, partial_bytes: int, num_counters: int) -> None:
        self.partial_bytes = partial_bytes
        self.partials = np.empty(partial_bytes // 4 + 16, np.float32)
        self.counters = np.zeros(num_counters, np.int64)
        self.partials_at, self.counters_at = self.partials.ctypes.data, self.counters.ctypes.data


class NativeDecode:
    """A native decode step: the work table and a descriptor template that `prepare` completes per run."""

    def __init__(
        self, inputs: DecodeInputs, level: str, kernel: int | None = None, tuning: Tuning | None = None
    ) -> None:
        """`kernel` is the address of a function that is called as the generated one, which it replaces."""
        self.inputs, self.level = inputs, level
        tuning = tuning or current()[0]
        pages = inputs.pages
        layout = pages.layout
        if kernel is None and layout.order != "tiles":
            raise ValueError(f"backend 'native' reads pages of layout 'tiles', these are {layout.order!r}")
        common = common_beginnings(inputs) if inputs.read_once and kernel is None else []
        rows = rows_at_once(inputs.group) if common else 1
        self.kernel = kernel_address(layout, level, inputs.group, tuning, rows) if kernel is None else kernel
        items, num_partials = work_items(inputs, common)
        self.members = np.empty((0, MEMBER_WORDS), np.int64)
        if common:
            together, self.members = items_together(inputs, common, items, rows)
            items = np.concatenate([together, items])
        self.items, counts = by_node(items, inputs)
        token_bytes = layout.head_bytes // layout.page_size
        self.unit_heads = heads_per_unit(self.items, pages.num_kv_heads, token_bytes, inputs.group * rows, tuning)
        self.units_per_item = -(-pages.num_kv_heads // self.unit_heads)
        self.edges, self.chunk_ends = node_edges(
            self.items, counts, self.units_per_item, self.unit_heads * token_bytes, tuning.chunk_bytes
        )
        self.claims = nothing_to_claim(self.chunk_ends)
        self.num_chunks, self.num_units = len(self.edges) - 1, len(self.items) * self.units_per_item
        self._partial_bytes = num_partials * inputs.num_q_heads * (layout.head_dim + LANES) * 4
        self._num_counters = inputs.num_seqs * pages.num_kv_heads if num_partials else 0
        self._spare: list[Workspace] = []
        self._halves: dict[int, tuple[handed.Handed, bytes]] = {}  # of arrays that were handed once for many jobs
        self._call = _KERNEL(self.kernel)
        self._head, self._tail = self._make_head(), self._make_tail()

    def _make_head(self) -> tuple[int, ...]:
        """Words KERNEL to TABLE_STRIDE, the same for every run."""
        table = self.inputs.block_table
        return (self.kernel, self.edges.ctypes.data, self.items.ctypes.data, self.num_units,
                table.ctypes.data, table.strides[0])  # fmt: skip

    def _make_tail(self) -> tuple[int, ...]:
        """Words SM_SCALE to SINKS_ROW, the same for every run."""
        inputs = self.inputs
        bits = np.array([inputs.sm_scale, inputs.logits_soft_cap], np.float32).view(np.uint32).tolist()
        tables = [0 if x is None else x.ctypes.data for x in (inputs.alibi_slopes, inputs.sinks)]
        rows = [0 if x is None or x.ndim == 1 else x.strides[0] for x in (inputs.alibi_slopes, inputs.sinks)]
        spare = JOB_WORDS - Job.MEMBERS - 1
        sizes = (inputs.pages.num_kv_heads, self.unit_heads, self.units_per_item)
        return (*bits, *tables, *sizes, *rows, 0, self.members.ctypes.data, *(0,) * spare)

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
        self,
        words: memoryview,
        at: int,
        q: Any,
        out: Any,
        lse: Any,
        layer: int,
        k_new: Any,
        v_new: Any,
        workspace: Workspace,
    ) -> tuple[Any, ...]:
        """Write the kernel's half of the descriptor at byte `at`; return what must stay alive while it runs."""
        kept = self._halves.get(id(q))
        half = self._half(handed.take(self.inputs, q, out, lse, k_new, v_new)) if kept is None else kept[1]
        if kept is None and isinstance(q, handed.Handed):
            self._halves[id(q)] = q, half
        words[at + _HALF_AT : at + _HALF_AT + _HALF.size] = half
        _BASE.pack_into(words, at + _BASE_AT, self.inputs.pages.layer_address(layer))
        _SPACE.pack_into(words, at + _SPACE_AT, workspace.partials_at, workspace.counters_at)
        if self._num_counters:
            workspace.counters[:] = 0  # a cancelled run leaves counts behind
        return (self, q, out, lse, k_new, v_new, workspace)

    def _half(self, given: handed.Handed) -> bytes:
        """The kernel's half of the descriptor for these arrays, without a layer and a workspace."""
        a, b = given.q, given.out
        return _HALF.pack(
            *self._head,
            a.pointer, a.strides[0], a.strides[1], a.code, b.pointer, b.strides[0], b.strides[1], b.code,
            *_lse_words(given), 0, self.inputs.pages.page_bytes, *_new_words(given), 0, 0, *self._tail,
        )  # fmt: skip

    def fits(self, workspace: Any) -> Workspace:
        """Refuse a workspace that is too small for this plan."""
        if not isinstance(workspace, Workspace):
            raise TypeError(f"workspace is a {type(workspace).__name__}: take it from the plan's workspace()")
        need = (self._partial_bytes, self._num_counters)
        have = (workspace.partial_bytes, len(workspace.counters))
        if have[0] < need[0] or have[1] < need[1]:
            raise ValueError(
                f"workspace holds {have[0]} bytes and {have[1]} counters, this plan needs {need[0]} and {need[1]}: "
                "take one from this plan's workspace()"
            )
        return workspace

    def run(self, q: Any, out: Any, lse: Any, layer: int, k_new: Any, v_new: Any, workspace: Any) -> None:
        space = self.take() if workspace is None else self.fits(workspace)
        words = ctypes.create_string_buffer(8 * JOB_WORDS)
        alive = self.fill(memoryview(words).cast("B"), 0, q, out, lse, layer, k_new, v_new, space)
        self._call(ctypes.addressof(words), 0, self.num_units)
        del alive
        if workspace is None:
            self.give(space)


def _lse_words(given: handed.Handed) -> tuple[int, int]:
    return (0, 0) if given.lse is None else (given.lse.pointer, given.lse.strides[0])


def _new_words(given: handed.Handed) -> tuple[int, ...]:
    k, v = given.k, given.v
    if k is None or v is None:
        return (0,) * 7
    return (k.pointer, k.strides[0], k.strides[1], v.pointer, v.strides[0], v.strides[1], k.code)


def make(inputs: DecodeInputs, isa: str | None) -> NativeDecode:
    """Build the native back end on the given or the detected ISA level."""
    return NativeDecode(inputs, isa_levels.detect(override=isa).level)
