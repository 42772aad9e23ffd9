"""What the parts of the decode kernel share while it is being built: sizes, job words, and where the state lies."""

from __future__ import annotations

from cpu_kernels.codegen.convert import LOG2E
from cpu_kernels.codegen.emit import Function
from cpu_kernels.codegen.fields import Item, Job
from cpu_kernels.codegen.tiles import V16I
from cpu_kernels.codegen.values import F32, I32, I64, PTR, Value, Var
from cpu_kernels.layout import LANES, Layout
from cpu_kernels.tuning import Tuning

MINUS_INF = float("-inf")


def blocks_of(count: int, limit: int) -> list[tuple[int, int]]:
    """Cut `count` things into (first, size) blocks of at most `limit`, as even as possible."""
    parts = -(-count // limit)
    edges = [count * i // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in zip(edges, edges[1:], strict=False)]


def total_of(parts: list[Var]) -> Value:
    """Add up partial accumulators in a fixed order."""
    total = parts[0].get()
    for other in parts[1:]:
        total = total + other.get()
    return total


class Frame:
    """The function under construction and the addresses that its parts agree on.

    `q`, `o`, `m`, `l` point to the state of the KV head in hand: queries as the page math wants them, float32 outputs
    ``[group][head_dim]``, running maxima ``[group]``, running sums ``[group][16]`` that are added up at the end. `s`
    and `p` point to one page's scores and weights.
    """

    q: Value
    o: Value
    m: Value
    l: Value  # noqa: E741
    head: Value
    seq: Value
    seq_len: Value
    start: Value  # first position of the page in hand
    scales: Value  # K scales of the page block in hand, V scales behind them (int8)

    def __init__(self, f: Function, job: Value, layout: Layout, level: str, group: int, tuning: Tuning) -> None:
        self.f, self.job, self.layout, self.level, self.group = f, job, layout, level, group
        self.tuning = tuning
        self.dim, self.page, self.chunks = layout.head_dim, layout.page_size, layout.head_dim // LANES
        self.tile_bytes = LANES * self.dim * layout.element_bytes
        self.column_bytes = self.page // layout.per_lane * layout.line_bytes
        self.items, self.table, self.base = (self.pointer(w) for w in (Job.ITEMS, Job.TABLE, Job.BASE))
        self.heads, self.page_bytes = self.word(Job.NUM_KV_HEADS), self.word(Job.PAGE_BYTES)
        self.num_units, self.table_stride = self.word(Job.NUM_UNITS), self.word(Job.TABLE_STRIDE)
        self.unit_heads, self.units_per_item = self.word(Job.UNIT_HEADS), self.word(Job.UNITS_PER_ITEM)
        self.sm_scale = f.load(F32, job, int(Job.SM_SCALE) * 8)
        self.soft_cap = f.load(F32, job, int(Job.SOFT_CAP) * 8)
        self.alibi, self.sinks = self.word(Job.ALIBI), self.word(Job.SINKS)
        self.alibi_row, self.sinks_row = self.word(Job.ALIBI_ROW), self.word(Job.SINKS_ROW)
        self.shaped = self.soft_cap.ne(0.0) | self.alibi.ne(0)
        # Shaped scores are left in base 2 already by `softmax.shape_scores`.
        self.scale2 = self.shaped.select(f.const(F32, 1.0), self.sm_scale * LOG2E)
        self.s = f.buffer(group * self.page * 4)

    def word(self, field: Job) -> Value:
        return self.f.load(I64, self.job, int(field) * 8)

    def pointer(self, field: Job) -> Value:
        return self.f.load(PTR, self.job, int(field) * 8)

    def item(self, item: Value, field: Item) -> Value:
        return self.f.load(I64, item, int(field) * 8)

    def block(self, seq: Value, page: Value, head: Value) -> Value:
        """Address of KV head `head` in the page that the table names."""
        at = self.table.at(seq * self.table_stride + page * 4)
        number = self.f.load(I32, at).cast("sext", I64)
        return self.base.at(number * self.page_bytes + head * self.layout.head_bytes)

    def iota(self) -> Value:
        """Lane numbers 0..15."""
        return Value(self.f, V16I, "<" + ", ".join(f"i32 {i}" for i in range(LANES)) + ">")

    def prefetch_range(self, where: Value, num_bytes: int) -> None:
        with self.f.loop(0, num_bytes, 64) as at:
            self.f.prefetch(where.at(at), self.tuning.cache_level)
