"""The decode attention kernel of one (layout, level, group): IR for ``decode(job, first_unit, last_unit)``.

A unit is one work item (sequence, split) and a few KV heads. Memory is read once, in ascending order::

    page j    head 0: K lines  softmax  V lines | head 1: K lines  softmax  V lines | ...        then page j+1
                       |                 |
              fetches  V of head 0       K of head 1 (after the last head: K of the next page, then of the next unit)

Every line meets all query heads of the group, so the pace is even. One prefetch into L2 per line, half a block ahead,
is spread over the multiply loops: prefetches that come faster than memory delivers are dropped by the processor, and a
line that was not fetched stalls the arithmetic. One softmax update serves a whole page. A sequence of one split is
normalised and written at once; of several, the last finisher of (sequence, head) merges the partial results in the
order of the splits, so the result does not depend on who computed what.
"""

from __future__ import annotations

from cpu_kernels.codegen import results, softmax
from cpu_kernels.codegen.amx import AmxMath, EmulatedTiles, HardwareTiles
from cpu_kernels.codegen.emit import Module
from cpu_kernels.codegen.fields import ITEM_WORDS, MEMBER_WORDS, TOGETHER, Item, Job, Member
from cpu_kernels.codegen.frame import MINUS_INF, Frame
from cpu_kernels.codegen.int8_dot import Int8Dot
from cpu_kernels.codegen.lines import Ahead, Edge, LineMath, PageMath
from cpu_kernels.codegen.rows import RowCodec
from cpu_kernels.codegen.tiles import V16F, DotTiles, WideTiles, element_shift, load_as_f32
from cpu_kernels.codegen.values import F32, I64, PTR, Value, Var
from cpu_kernels.layout import LANES, Layout
from cpu_kernels.tuning import TABLE, Tuning


def page_math(k: Frame, emulate_amx: bool = False) -> PageMath:
    """Choose the page math of a level: its best instructions for the dtype."""
    kind = k.layout.kind
    if kind.multiplies_pairs(k.level, kind.extras(k.level)):
        tiles = DotTiles(k.layout, k.level)
        if k.level == "amx_bf16" or emulate_amx:
            return AmxMath(k, tiles, EmulatedTiles(k.f) if emulate_amx else HardwareTiles())
        return LineMath(k, tiles)
    if kind.bytes_dot and k.level in ("avx512_bf16", "amx_bf16"):  # both have VNNI
        return Int8Dot(k)
    return LineMath(k, WideTiles(k.layout, k.level))


class DecodeKernel:
    """Builds the kernel; the methods follow the order of the computation.

    With `rows` above 1 its items bring up to so many rows together (`fields.TOGETHER`): their queries are one group.
    """

    def __init__(
        self, layout: Layout, level: str, group: int, tuning: Tuning, emulate_amx: bool, rows: int = 1
    ) -> None:
        self.layout, self.level, self.tuning, self.emulate_amx = layout, level, tuning, emulate_amx
        self.rows, self.row_group, self.group = rows, group, group * rows

    def build(self, module: Module, name: str) -> None:
        f = module.function(name, (PTR, I64, I64))
        job, first, last = f.args
        with f.default_floats():
            self.k = k = Frame(f, job, self.layout, self.level, self.group, self.tuning)
            self.math = page_math(k, self.emulate_amx)
            self._take_state()
            self.math.begin(k)
            with f.loop(first, last) as unit:
                self._unit(unit)
            self.math.end(k)

    def _take_state(self) -> None:
        k, f = self.k, self.k.f
        self.q_bytes = -(-self.math.query_bytes // 64) * 64
        self.o_bytes, self.l_bytes = self.group * k.dim * 4, self.group * 64
        self.m_bytes = -(-self.group * 4 // 64) * 64
        sizes = (self.q_bytes, self.o_bytes, self.m_bytes, self.l_bytes)
        self.q_all, self.o_all, self.m_all, self.l_all = (f.dynamic_buffer(k.unit_heads * n) for n in sizes)
        self.row = f.buffer(k.dim * 4)
        self.codec = RowCodec(f, self.layout, self.level)

    # ------------------------------------------------------------------ one unit
    def _item_of(self, unit: Value) -> tuple[Value, Value]:
        """Return the address of a unit's item and the unit's first KV head."""
        k = self.k
        item = k.items.at((unit // k.units_per_item) * (ITEM_WORDS * 8))
        return item, (unit % k.units_per_item) * k.unit_heads

    def _unit(self, unit: Value) -> None:
        k, f = self.k, self.k.f
        item, h0 = self._item_of(unit)
        stop = h0 + k.unit_heads
        h1 = (stop < k.heads).select(stop, k.heads)
        k.seq, k.seq_len = k.item(item, Item.SEQ), k.item(item, Item.SEQ_LEN)
        first, last = k.item(item, Item.FIRST), k.item(item, Item.LAST)
        following = self._first_block_of(unit + 1)
        with f.loop(h0, h1) as head:
            self._use_head(head, h0)
            self._append(item)
            self._reset(item)
        end = (last + (k.page - 1)) // k.page
        with f.loop(first // k.page, end) as page:
            beyond = f.var(PTR, following)
            with f.when(page + 1 < end):
                beyond.set(k.block(k.seq, page + 1, h0))
            late = self._late_source(page, end, last, following, h0)
            run = k.block(k.seq, page, h0)
            with f.loop(h0, h1) as head:
                self._use_head(head, h0)
                here = run.at((head - h0) * k.layout.head_bytes)
                inside = head + 1 < h1
                next_block = here.at(k.layout.head_bytes)
                ahead = inside.select(next_block, beyond.get()), inside.select(next_block, late.get())
                self._page(page * k.page, here, ahead, (first, last))
        with f.loop(h0, h1) as head:
            self._use_head(head, h0)
            if self.rows == 1:
                results.finish(k, item)
            else:
                self._finish_rows(item)

    def _late_source(self, page: Value, end: Value, last: Value, following: Value, h0: Value) -> Var:
        """Where the second half of a page's V fetches from: the next page, or what follows if that half is not needed.

        A last page with no more than half of its positions in use needs the first half of its K only (its tiles lie one
        after the other); the second half of the following unit's K is fetched in its stead, and the first half of that
        during the last page itself.
        """
        k, f = self.k, self.k.f
        late = f.var(PTR, following)
        spare = (page + 2).eq(end) & (end * k.page - last >= k.page // 2)
        with f.when((page + 1 < end) & spare.eq(0)):
            late.set(k.block(k.seq, page + 1, h0))
        return late

    def _use_head(self, head: Value, h0: Value) -> None:
        """Point q, o, m and l at the state of one KV head."""
        k, number = self.k, head - h0
        k.head = head
        k.q, k.o = self.q_all.at(number * self.q_bytes), self.o_all.at(number * self.o_bytes)
        k.m, k.l = self.m_all.at(number * self.m_bytes), self.l_all.at(number * self.l_bytes)

    def _first_block_of(self, unit: Value) -> Value:
        """Where the next unit will read first; its pages may be none, then anywhere."""
        k, f = self.k, self.k.f
        where = f.var(PTR, k.base)
        with f.when(unit < k.num_units):
            item, head = self._item_of(unit)
            first = k.item(item, Item.FIRST)
            with f.when(first < k.item(item, Item.LAST)):
                where.set(k.block(k.item(item, Item.SEQ), first // k.page, head))
        return where.get()

    def _append(self, item: Value) -> None:
        k, f = self.k, self.k.f
        if self.rows > 1:
            return
        slot = k.item(item, Item.APPEND_SLOT)
        with f.when((slot >= 0) & k.word(Job.K_NEW).ne(0)):
            block = k.base.at((slot // k.page) * k.page_bytes + k.head * k.layout.head_bytes)
            rows = [
                k.pointer(source).at(k.seq * k.word(row) + k.head * k.word(head))
                for source, row, head in (
                    (Job.K_NEW, Job.K_NEW_ROW, Job.K_NEW_HEAD),
                    (Job.V_NEW, Job.V_NEW_ROW, Job.V_NEW_HEAD),
                )
            ]
            self.codec.write(block, slot % k.page, rows[0], rows[1], k.word(Job.NEW_CODE))

    def _reset(self, item: Value) -> None:
        """Zero the running state and take in the queries of the group."""
        f = self.k.f
        if self.rows == 1:
            self._take_queries(self.k.seq, f.const(I64, 0))
            return
        count = self.k.item(item, Item.NUM_SPLITS)
        with f.loop(0, self.rows) as r:  # of fewer rows, the first stands for those that are not there
            member = self._member(item, (r < count).select(r, 0))
            self._take_queries(f.load(I64, member, Member.SEQ * 8), r * self.row_group)

    def _member(self, item: Value, r: Value) -> Value:
        return self.k.pointer(Job.MEMBERS).at((self.k.item(item, Item.PARTIAL) + r) * (MEMBER_WORDS * 8))

    def _finish_rows(self, item: Value) -> None:
        """Save each row's part of the item; a row that has all its parts is merged."""
        k, f, size = self.k, self.k.f, self.row_group
        o, m, l = k.o, k.m, k.l  # noqa: E741
        with f.loop(0, k.item(item, Item.NUM_SPLITS)) as r:
            member = self._member(item, r)
            k.seq = f.load(I64, member, Member.SEQ * 8)
            k.group, k.o = size, o.at(r * (size * k.dim * 4))
            k.m, k.l = m.at(r * (size * 4)), l.at(r * (size * 64))
            first, splits = (f.load(I64, member, word * 8) for word in (Member.PARTIAL, Member.NUM_SPLITS))
            results.finish_part(k, first, k.item(item, Item.SPLIT), splits)
        k.group = self.group

    def _take_queries(self, seq: Value, first: Value) -> None:
        """The queries of row `seq` become those from `first` on of the group."""
        k, f = self.k, self.k.f
        q_head, code = k.word(Job.Q_HEAD), k.word(Job.Q_CODE)
        rows = k.pointer(Job.Q).at(seq * k.word(Job.Q_ROW) + k.head * (q_head * self.row_group))
        shift = element_shift(code)
        with f.loop(0, self.row_group) as turn:
            source = rows.at(turn * q_head)
            g = first + turn
            with f.loop(0, k.dim, LANES) as d:
                f.store(load_as_f32(f, source.at(d << shift), code, LANES, self.level), self.row, d * 4)
                f.store(f.const(V16F, 0.0), k.o, (g * k.dim + d) * 4)
            self.math.store_query(k, g, self.row)
            f.store(f.const(F32, MINUS_INF), k.m, g * 4)
            f.store(f.const(V16F, 0.0), k.l, g * 64)

    def _page(self, start: Value, here: Value, ahead: Ahead, span: tuple[Value, Value]) -> None:
        """One page of one KV head; pages that hold masked positions take a path of their own."""
        k, f = self.k, self.k.f
        first, last = span
        low, high = first - start, last - start
        low, high = (low > 0).select(low, 0), (high < k.page).select(high, k.page)
        k.start, k.scales = start, here.at(2 * k.layout.k_bytes)
        half = k.layout.k_bytes
        near = half >= (k.tuning.near_bytes if k.layout.element_bytes > 1 else k.tuning.near_narrow)
        with f.either(low.eq(0) & high.eq(k.page)) as whole:
            self.math.scores(k, here, here.at(half) if near else ahead[0], None)
            softmax.update(k, self.math, None)
            self.math.values(k, here, ahead if near else (ahead[0].at(half), ahead[0].at(half)), None)
            whole.otherwise()
            edge = (low, high)
            if self.math.fetches_inside:
                with f.either((high - low) * 2 >= k.page) as most:
                    self.math.scores(k, here, here.at(half) if near else ahead[0], edge)
                    softmax.update(k, self.math, edge)
                    self.math.values(k, here, ahead if near else (ahead[0].at(half), ahead[0].at(half)), edge)
                    most.otherwise()
                    self._part_of_page(start, here, ahead, first, edge, near)
            else:
                self._part_of_page(start, here, ahead, first, edge, near)

    def _part_of_page(self, start: Value, here: Value, ahead: Ahead, first: Value, edge: Edge, near: bool) -> None:
        """A page of which little is allowed, with its fetches beforehand."""
        k, f, half, high = self.k, self.k.f, self.k.layout.k_bytes, edge[1]
        if near:
            self._fetch_rows(here.at(half), edge)
            k.prefetch_range(ahead[0], half // 2)
        else:
            k.prefetch_range(ahead[0], half)
        self.math.scores(k, here, None, edge)
        if near:
            # The second half came with the page before, if there was one and this page is at most half used.
            with f.when((high > k.page // 2) | (start <= first)):
                k.prefetch_range(ahead[0].at(half // 2), half // 2)
        else:
            k.prefetch_range(ahead[0].at(half), half)
        softmax.update(k, self.math, edge)
        self.math.values(k, here, None, edge)

    def _fetch_rows(self, values: Value, edge: tuple[Value, Value]) -> None:
        """Fetch the rows of V that hold allowed positions."""
        k, f, n = self.k, self.k.f, self.k.layout.per_lane
        line = k.layout.line_bytes
        with f.loop(0, k.chunks) as c:
            with f.loop(edge[0] // n * line, (edge[1] + (n - 1)) // n * line, 64) as at:
                f.prefetch(values.at(c * k.column_bytes + at), k.tuning.cache_level)


def build_decode(
    layout: Layout, level: str, group: int, tuning: Tuning = TABLE, *, rows: int = 1, emulate_amx: bool = False
) -> str:
    """Return the IR of the decode kernel of `group` query heads per KV head.

    Parameters
    ----------
    layout : Layout
        Dtype, head dim and page size.
    level : str
        ISA level, see `cpu_kernels.isa`.
    group : int
        Query heads per KV head.
    tuning : Tuning
        How far ahead and how densely memory is fetched; the results do not depend on it.
    rows : int
        Above 1, items that bring up to so many rows together are understood besides.
    emulate_amx : bool
        Use the AMX algorithm with emulated tiles (bf16 on level ``avx512_bf16``; for tests).
    """
    module = Module()
    if rows == 1:
        DecodeKernel(layout, level, group, tuning, emulate_amx).build(module, "decode")
        return module.text()
    DecodeKernel(layout, level, group, tuning, emulate_amx).build(module, "one_row")
    DecodeKernel(layout, level, group, tuning, emulate_amx, rows).build(module, "many_rows")
    f = module.function("decode", (PTR, I64, I64))
    job, first, last = f.args
    items, per_item = f.load(PTR, job, Job.ITEMS * 8), f.load(I64, job, Job.UNITS_PER_ITEM * 8)
    with f.loop(first, last) as unit:
        slot = f.load(I64, items.at((unit // per_item) * (ITEM_WORDS * 8)), Item.APPEND_SLOT * 8)
        with f.either(slot.eq(TOGETHER)) as together:
            f.call("void", "many_rows", job, unit, unit + 1)
            together.otherwise()
            f.call("void", "one_row", job, unit, unit + 1)
    return module.text()
