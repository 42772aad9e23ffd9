"""The decode attention kernel of one (layout, level, group): IR for ``decode(job, first_unit, last_unit)``.

A unit is one work item (sequence, split) and a few KV heads. Memory is read once, in ascending order::

    page j    head 0: K lines  softmax  V lines | head 1: K lines  softmax  V lines | ...        then page j+1
                       |                 |
              fetches  V of head 0       K of head 1 (after the last head: K of the next page, then of the next unit)

Every line meets all query heads of the group, so the pace is even. One prefetch into L2 per line, half a block ahead, is
spread over the multiply loops: prefetches that come faster than memory delivers are dropped by the processor, and a
line that was not fetched stalls the arithmetic. One softmax update serves a whole page. A sequence of one split is normalised and written at once; of several,
the last finisher of (sequence, head) merges the partial results in the order of the splits, so the result does not
depend on who computed what.
"""

from __future__ import annotations

from cpu_kernels.codegen.convert import LN2, LOG2E, exp2, fma, log2, tanh, vmax
from cpu_kernels.codegen.emit import F32, I32, I64, PTR, Module, Value, Var
from cpu_kernels.codegen.fields import ITEM_WORDS, Item, Job
from cpu_kernels.codegen.rows import RowCodec
from cpu_kernels.codegen.tiles import V16F, V16I, element_shift, load_as_f32, store_from_f32, tiles_for
from cpu_kernels.layout import LANES, Layout

MINUS_INF = float("-inf")
L2 = 2  # prefetch locality: into L2; L1 gains nothing and is too small for a page


def blocks_of(group: int, limit: int) -> list[tuple[int, int]]:
    """Cut `group` query heads into (first, count) blocks of at most `limit`, as even as possible."""
    parts = -(-group // limit)
    edges = [group * i // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in zip(edges, edges[1:], strict=False)]


def _sum(parts: list[Var]) -> Value:
    total = parts[0].get()
    for other in parts[1:]:
        total = total + other.get()
    return total


class DecodeKernel:
    """Builds the kernel; the methods follow the order of the computation."""

    def __init__(self, layout: Layout, level: str, group: int) -> None:
        self.layout, self.level, self.group = layout, level, group
        self.tiles = tiles_for(layout, level)
        self.dim, self.page = layout.head_dim, layout.page_size
        self.chunks = self.dim // LANES
        self.lines_per_tile = self.dim // layout.per_lane
        self.tile_bytes = LANES * self.dim * layout.element_bytes
        self.column_bytes = layout.page_size // layout.per_lane * layout.line_bytes
        self.blocks = blocks_of(group, self.tiles.max_group)
        # With little arithmetic per line the processor runs far ahead by itself, and fetching every second line leaves
        # room for that; with much, each line has to be fetched (docs/performance.md has the figures).
        light = group * self.tiles.words_per_line * (64 // layout.line_bytes) <= 3
        self.fetch_every = 128 if light else 64
        self.partial_bytes = (self.dim + LANES) * 4

    def build(self) -> str:
        module = Module()
        self.f = f = module.function("decode", (PTR, I64, I64))
        self.job, first, last = f.args
        self._load_job()
        self._take_buffers()
        with f.loop(first, last) as unit:
            self._unit(unit)
        return module.text()

    # ------------------------------------------------------------------ set-up
    def _word(self, field: Job) -> Value:
        return self.f.load(I64, self.job, int(field) * 8)

    def _pointer(self, field: Job) -> Value:
        return self.f.load(PTR, self.job, int(field) * 8)

    def _load_job(self) -> None:
        self.items, self.table, self.base = (self._pointer(w) for w in (Job.ITEMS, Job.TABLE, Job.BASE))
        self.heads, self.page_bytes = self._word(Job.NUM_KV_HEADS), self._word(Job.PAGE_BYTES)
        self.num_units, self.table_stride = self._word(Job.NUM_UNITS), self._word(Job.TABLE_STRIDE)
        self.unit_heads, self.units_per_item = self._word(Job.UNIT_HEADS), self._word(Job.UNITS_PER_ITEM)
        self.sm_scale = self.f.load(F32, self.job, int(Job.SM_SCALE) * 8)
        self.soft_cap = self.f.load(F32, self.job, int(Job.SOFT_CAP) * 8)
        self.alibi, self.sinks = self._word(Job.ALIBI), self._word(Job.SINKS)
        self.shaped = self.soft_cap.ne(0.0) | self.alibi.ne(0)
        # Shaped scores come out of `_shape_scores` in base 2 already.
        self.scale2 = self.shaped.select(self.f.const(F32, 1.0), self.sm_scale * LOG2E)

    def _take_buffers(self) -> None:
        f, group, size = self.f, self.group, self.tiles.weight_bytes
        self.q_bytes, self.o_bytes = group * self.dim * size, group * self.dim * 4
        self.m_bytes = -(-group * 4 // 64) * 64
        self.q_all, self.o_all = (f.dynamic_buffer(self.unit_heads * n) for n in (self.q_bytes, self.o_bytes))
        self.m_all, self.l_all = (f.dynamic_buffer(self.unit_heads * self.m_bytes) for _ in range(2))
        self.s, self.p = f.buffer(group * self.page * 4), f.buffer(group * self.page * size)
        self.codec = RowCodec(f, self.layout, self.level)

    def _item(self, item: Value, field: Item) -> Value:
        return self.f.load(I64, item, int(field) * 8)

    def _item_of(self, unit: Value) -> tuple[Value, Value]:
        """Return the address of a unit's item and the unit's first KV head."""
        item = self.items.at((unit // self.units_per_item) * (ITEM_WORDS * 8))
        return item, (unit % self.units_per_item) * self.unit_heads

    def _block(self, seq: Value, page: Value, head: Value) -> Value:
        """Address of KV head `head` in the page that the table names."""
        at = self.table.at(seq * self.table_stride + page * 4)
        number = self.f.load(I32, at).cast("sext", I64)
        return self.base.at(number * self.page_bytes + head * self.layout.head_bytes)

    def _iota(self) -> Value:
        lanes = ", ".join(f"i32 {i}" for i in range(LANES))
        return Value(self.f, V16I, f"<{lanes}>")

    # ------------------------------------------------------------------ one unit
    def _unit(self, unit: Value) -> None:
        f = self.f
        item, h0 = self._item_of(unit)
        stop = h0 + self.unit_heads
        h1 = (stop < self.heads).select(stop, self.heads)
        self.seq = self._item(item, Item.SEQ)
        self.first, self.last = self._item(item, Item.FIRST), self._item(item, Item.LAST)
        self.seq_len = self._item(item, Item.SEQ_LEN)
        following = self._first_block_of(unit + 1)
        with f.loop(h0, h1) as head:
            self._use_head(head, h0)
            self._append(item)
            self._reset()
        end = (self.last + (self.page - 1)) // self.page
        with f.loop(self.first // self.page, end) as page:
            beyond = f.var(PTR, following)
            with f.when(page + 1 < end):
                beyond.set(self._block(self.seq, page + 1, h0))
            run = self._block(self.seq, page, h0)
            with f.loop(h0, h1) as head:
                self._use_head(head, h0)
                here = run.at((head - h0) * self.layout.head_bytes)
                ahead = (head + 1 < h1).select(here.at(self.layout.head_bytes), beyond.get())
                self._page(page * self.page, here, ahead)
        with f.loop(h0, h1) as head:
            self._use_head(head, h0)
            self._finish(item)

    def _use_head(self, head: Value, h0: Value) -> None:
        """Point q, o, m and l at the state of one KV head."""
        self.head, number = head, head - h0
        self.q, self.o = self.q_all.at(number * self.q_bytes), self.o_all.at(number * self.o_bytes)
        self.m, self.l = self.m_all.at(number * self.m_bytes), self.l_all.at(number * self.m_bytes)

    def _first_block_of(self, unit: Value) -> Value:
        """Where the next unit will read first; its pages may be none, then anywhere."""
        f = self.f
        where = f.var(PTR, self.base)
        with f.when(unit < self.num_units):
            item, head = self._item_of(unit)
            first = self._item(item, Item.FIRST)
            with f.when(first < self._item(item, Item.LAST)):
                where.set(self._block(self._item(item, Item.SEQ), first // self.page, head))
        return where.get()

    def _append(self, item: Value) -> None:
        f, slot = self.f, self._item(item, Item.APPEND_SLOT)
        k_new = self._pointer(Job.K_NEW)
        with f.when((slot >= 0) & self._word(Job.K_NEW).ne(0)):
            block = self.base.at((slot // self.page) * self.page_bytes + self.head * self.layout.head_bytes)
            k = k_new.at(self.seq * self._word(Job.K_NEW_ROW) + self.head * self._word(Job.K_NEW_HEAD))
            v = self._pointer(Job.V_NEW).at(
                self.seq * self._word(Job.V_NEW_ROW) + self.head * self._word(Job.V_NEW_HEAD)
            )
            self.codec.write(block, slot % self.page, k, v, self._word(Job.NEW_CODE))

    def _reset(self) -> None:
        """Zero the running state and bring the queries of the group into the form the tiles read."""
        f, size = self.f, self.tiles.weight_bytes
        zero = f.const(V16F, 0.0)
        q_head, code = self._word(Job.Q_HEAD), self._word(Job.Q_CODE)
        rows = self._pointer(Job.Q).at(self.seq * self._word(Job.Q_ROW) + self.head * (q_head * self.group))
        shift = element_shift(code)
        with f.loop(0, self.group) as g:
            row = rows.at(g * q_head)
            with f.loop(0, self.dim, LANES) as d:
                x = load_as_f32(f, row.at(d << shift), code, LANES, self.level)
                self.tiles.store_weights(f, x, self.q.at((g * self.dim + d) * size))
                f.store(zero, self.o, (g * self.dim + d) * 4)
            f.store(f.const(F32, MINUS_INF), self.m, g * 4)
            f.store(f.const(F32, 0.0), self.l, g * 4)

    # ------------------------------------------------------------------ one page of one KV head
    def _page(self, start: Value, here: Value, ahead: Value) -> None:
        f, layout, n = self.f, self.layout, self.layout.per_lane
        low, high = self.first - start, self.last - start
        low, high = (low > 0).select(low, 0), (high < self.page).select(high, self.page)
        self.start, self.scales = start, here.at(2 * layout.k_bytes)
        own_values = here.at(layout.k_bytes)
        with f.either(low.eq(0) & high.eq(self.page)) as whole:
            tiles, rows = f.const(I64, self.page // LANES), f.const(I64, self.page // n)
            for number, block in enumerate(self.blocks):
                self._scores(here, f.const(I64, 0), tiles, block, own_values if number == 0 else None)
            self._softmax(None)
            for block in self.blocks:
                self._values(here, f.const(I64, 0), rows, block, None, ahead if block[0] == 0 else None)
            whole.otherwise()
            r0, r1 = low // n, (high + (n - 1)) // n
            for block in self.blocks:
                self._scores(here, low // LANES, (high + (LANES - 1)) // LANES, block, None)
            self._fetch(ahead, f.const(I64, 0), f.const(I64, layout.k_bytes))
            self._softmax((low, high))
            for block in self.blocks:
                self._values(here, r0, r1, block, (low, high), None)

    def _fetch(self, where: Value, first: Value, last: Value) -> None:
        with self.f.loop(first, last, 64) as at:
            self.f.prefetch(where.at(at), L2)

    def _scores(self, here: Value, t0: Value, t1: Value, block: tuple[int, int], ahead: Value | None) -> None:
        """s[g][16 t + lane] = q[g] . k for the tiles [t0, t1) and the query heads of `block`."""
        f, tiles, (g0, count) = self.f, self.tiles, block
        ways = max(1, min(4, 8 // count))
        unroll = 8 if self.lines_per_tile % 8 == 0 else 4
        line_bytes = self.layout.line_bytes
        q0 = self.q.at(g0 * self.dim * tiles.weight_bytes)
        with f.loop(t0, t1) as t:
            acc = [[f.var(V16F, 0.0) for _ in range(ways)] for _ in range(count)]
            with f.loop(0, self.lines_per_tile, unroll) as i:
                at = t * self.tile_bytes + i * line_bytes
                lines, query = here.at(at), q0.at(i * (tiles.words_per_line * 4))
                for u in range(unroll):
                    if ahead is not None and (u * line_bytes) % self.fetch_every == 0:
                        f.prefetch(ahead.at(at + u * line_bytes), L2)
                    self._mac_line(lines.at(u * line_bytes), query, u, self.dim, acc, None)
            for g in range(count):
                total = _sum(acc[g])
                if self.layout.dtype == "int8":
                    total = total * f.load(V16F, self.scales, t * 64)
                f.store(total, self.s, t * 64 + (g0 + g) * self.page * 4)

    def _mac_line(self, line: Value, words: Value, u: int, row: int, acc: list[list[Var]], mask: Value | None) -> None:
        """Multiply one line into the accumulators; `words` holds rows of `row` elements, one per query head."""
        f, tiles = self.f, self.tiles
        for j, factor in enumerate(tiles.factors(f, line, mask)):
            for g, ways in enumerate(acc):
                at = (u * tiles.words_per_line + j) * 4 + g * row * tiles.weight_bytes
                way = ways[(u * tiles.words_per_line + j) % len(ways)]
                way.set(tiles.mac(way.get(), factor, f.load(tiles.word_kind, words, at)))

    def _shape_scores(self) -> None:
        """Apply scale, soft cap and ALiBi in place; leaves base-2 scores."""
        f = self.f
        query = (self.seq_len - 1).cast("trunc", I32).splat(LANES)
        with f.loop(0, self.group) as g:
            slope = f.var(F32, 0.0)
            with f.when(self.alibi.ne(0)):
                table = self.alibi.cast("inttoptr", PTR)
                slope.set(f.load(F32, table, (self.head * self.group + g) * 4))
            with f.loop(0, self.page, LANES) as at:
                where = self.s.at((g * self.page + at) * 4)
                x = f.var(V16F, f.load(V16F, where) * self.sm_scale.splat(LANES))
                with f.when(self.soft_cap.ne(0.0)):
                    cap = self.soft_cap.splat(LANES)
                    x.set(tanh(x.get() / cap) * cap)
                position = self._iota() + (self.start + at).cast("trunc", I32).splat(LANES)
                bias = (position - query).cast("sitofp", V16F) * slope.get().splat(LANES)
                f.store((x.get() + bias) * LOG2E, where)

    def _softmax(self, edge: tuple[Value, Value] | None) -> None:
        """One update of (m, l, o) from the page's scores; the weights go to p. Masked weights are exactly 0."""
        f = self.f
        with f.when(self.shaped):
            self._shape_scores()
        keep = self._keep(edge)
        scale = self.scale2.splat(LANES)
        with f.loop(0, self.group) as g:
            xs = []
            for t in range(self.page // LANES):
                x = f.load(V16F, self.s, g * (self.page * 4) + t * 64) * scale
                xs.append(keep[t].select(x, MINUS_INF) if keep else x)
            base = self._new_maximum(g, xs)
            total: Value | None = None
            for t, x in enumerate(xs):
                e = exp2(x - base)
                total = e if total is None else total + e
                self._store_weight(g, t, e, keep[t] if keep else None)
            assert total is not None
            self._add_to_sum(g, total)

    def _keep(self, edge: tuple[Value, Value] | None) -> list[Value]:
        if edge is None:
            return []
        low, high = (x.cast("trunc", I32).splat(LANES) for x in edge)
        places = [self._iota() + t * LANES for t in range(self.page // LANES)]
        return [(x >= low) & (x < high) for x in places]

    def _store_weight(self, g: Value, t: int, e: Value, keep: Value | None) -> None:
        """Store 16 weights for the PV rows; in int8 they carry V's scales (which may be garbage where masked)."""
        if self.layout.dtype == "int8":
            e = e * self.f.load(V16F, self.scales, 4 * self.page + t * 64)
            e = e if keep is None else keep.select(e, 0.0)
        size = self.tiles.weight_bytes
        self.tiles.store_weights(self.f, e, self.p.at(g * (self.page * size) + t * LANES * size))

    def _new_maximum(self, g: Value, xs: list[Value]) -> Value:
        """Raise m[g] to the page's maximum, rescaling l and o when it grew; return it, safe to subtract, in lanes."""
        f = self.f
        peak = xs[0]
        for x in xs[1:]:
            peak = vmax(peak, x)
        top = f.call(F32, "llvm.vector.reduce.fmax.v16f32", peak, flags="nnan nsz")
        before = f.load(F32, self.m, g * 4)
        with f.when(top > before):
            shrink = exp2((before - top).splat(LANES))
            f.store(top, self.m, g * 4)
            f.store(f.load(F32, self.l, g * 4) * shrink.lane(0), self.l, g * 4)
            for c in range(self.chunks):
                where = self.o.at(g * (self.dim * 4) + c * 64)
                f.store(f.load(V16F, where) * shrink, where)
        now = f.load(F32, self.m, g * 4)
        # Every score so far may be -inf: subtract 0 then, so that the weights are 0 and not NaN.
        return now.eq(MINUS_INF).select(f.const(F32, 0.0), now).splat(LANES)

    def _add_to_sum(self, g: Value, total: Value) -> None:
        f = self.f
        add = f.call(F32, "llvm.vector.reduce.fadd.v16f32", f.const(F32, 0.0), total, flags="reassoc nsz")
        f.store(f.load(F32, self.l, g * 4) + add, self.l, g * 4)

    def _values(
        self,
        here: Value,
        r0: Value,
        r1: Value,
        block: tuple[int, int],
        edge: tuple[Value, Value] | None,
        ahead: Value | None,
    ) -> None:
        """o[g] += p[g] . v for the rows [r0, r1) of each chunk of 16 dims and the query heads of `block`."""
        f, tiles, (g0, count), layout = self.f, self.tiles, block, self.layout
        ways = max(1, min(4, 8 // count))
        unroll = 4 if edge is None else 1
        weights = self.p.at(g0 * self.page * tiles.weight_bytes)
        values = here.at(layout.k_bytes)
        with f.loop(0, self.chunks) as c:
            state = self.o.at(c * 64 + g0 * self.dim * 4)
            acc = [self._accumulators(state, g, ways) for g in range(count)]
            with f.loop(r0, r1, unroll) as r:
                mask = None if edge is None or layout.per_lane != 2 else self._row_mask(r, edge)
                at = c * self.column_bytes + r * layout.line_bytes
                lines, words = values.at(at), weights.at(r * (tiles.words_per_line * 4))
                for u in range(unroll):
                    if ahead is not None and (u * layout.line_bytes) % self.fetch_every == 0:
                        f.prefetch(ahead.at(at + u * layout.line_bytes), L2)
                    self._mac_line(lines.at(u * layout.line_bytes), words, u, self.page, acc, mask)
            for g in range(count):
                f.store(_sum(acc[g]), state, g * self.dim * 4)

    def _accumulators(self, state: Value, g: int, ways: int) -> list[Var]:
        f = self.f
        first = f.var(V16F, f.load(V16F, state, g * self.dim * 4))
        return [first, *(f.var(V16F, 0.0) for _ in range(ways - 1))]

    def _row_mask(self, r: Value, edge: tuple[Value, Value]) -> Value:
        """Bits of a bf16 pair that belong to allowed positions; a NaN in the other half must not meet its weight 0."""
        f, (low, high) = self.f, edge
        even = (r * 2 >= low).select(f.const(I32, 0xFFFF), 0)
        odd = (r * 2 + 1 < high).select(f.const(I32, -65536), 0)
        return (even | odd).splat(LANES)

    # ------------------------------------------------------------------ results
    def _finish(self, item: Value) -> None:
        f = self.f
        splits = self._item(item, Item.NUM_SPLITS)
        with f.either(splits.eq(1)) as alone:
            with f.loop(0, self.group) as g:
                self._write(g, f.load(F32, self.m, g * 4), f.load(F32, self.l, g * 4), self.o.at(g * (self.dim * 4)))
            alone.otherwise()
            first = self._item(item, Item.PARTIAL)
            self._save_partial(first + self._item(item, Item.SPLIT))
            counter = self._pointer(Job.COUNTERS).at((self.seq * self.heads + self.head) * 8)
            before = f.let(I64, f"atomicrmw add ptr {counter.name}, i64 1 acq_rel")
            with f.when((before + 1).eq(splits)):
                f.store(f.const(I64, 0), counter)
                with f.loop(0, self.group) as g:
                    self._merge(g, first, splits)

    def _partial(self, slot: Value, g: Value) -> Value:
        index = (slot * self.heads + self.head) * self.group + g
        return self._pointer(Job.PARTIALS).at(index * self.partial_bytes)

    def _save_partial(self, slot: Value) -> None:
        f = self.f
        with f.loop(0, self.group) as g:
            where = self._partial(slot, g)
            for c in range(self.chunks):
                f.store(f.load(V16F, self.o, g * (self.dim * 4) + c * 64), where, c * 64)
            f.store(f.load(F32, self.m, g * 4), where, self.dim * 4)
            f.store(f.load(F32, self.l, g * 4), where, self.dim * 4 + 4)

    def _merge(self, g: Value, first: Value, splits: Value) -> None:
        f = self.f
        top = f.var(F32, MINUS_INF)
        with f.loop(0, splits) as i:
            m = f.load(F32, self._partial(first + i, g), self.dim * 4)
            top.set(vmax(top.get(), m))
        base = top.get().eq(MINUS_INF).select(f.const(F32, 0.0), top.get())
        total, o = f.var(F32, 0.0), self.o
        for c in range(self.chunks):
            f.store(f.const(V16F, 0.0), o, c * 64)
        with f.loop(0, splits) as i:
            part = self._partial(first + i, g)
            weight = exp2(f.load(F32, part, self.dim * 4) - base)
            total.set(fma(f.load(F32, part, self.dim * 4 + 4), weight, total.get()))
            for c in range(self.chunks):
                wide = weight.splat(LANES)
                f.store(fma(f.load(V16F, part, c * 64), wide, f.load(V16F, o, c * 64)), o, c * 64)
        self._write(g, top.get(), total.get(), o)

    def _write(self, g: Value, m: Value, total: Value, o: Value) -> None:
        """Normalise one query head and write out and lse; an empty key set gives 0 and -inf."""
        f = self.f
        q_head = self.head * self.group + g
        empty = total.eq(0.0)
        top, mass, shrink = f.var(F32, m), f.var(F32, total), f.var(F32, 1.0)
        with f.when(self.sinks.ne(0) & empty.eq(0)):
            sink = f.load(F32, self.sinks.cast("inttoptr", PTR), q_head * 4) * LOG2E
            now = vmax(m, sink)
            shrink.set(exp2(m - now))
            mass.set(fma(total, shrink.get(), exp2(sink - now)))
            top.set(now)
        inverse = empty.select(f.const(F32, 0.0), shrink.get() / mass.get()).splat(LANES)
        code = self._word(Job.OUT_CODE)
        row = self._pointer(Job.OUT).at(self.seq * self._word(Job.OUT_ROW) + q_head * self._word(Job.OUT_HEAD))
        shift = element_shift(code)
        with f.loop(0, self.dim, LANES) as d:
            x = f.load(V16F, o, d * 4) * inverse
            store_from_f32(f, x, row.at(d << shift), code, LANES, self.level)
        with f.when(self._word(Job.LSE).ne(0)):
            value = (top.get() + log2(mass.get())) * LN2
            lse = empty.select(f.const(F32, MINUS_INF), value)
            f.store(lse, self._pointer(Job.LSE), self.seq * self._word(Job.LSE_ROW) + q_head * 4)


def build_decode(layout: Layout, level: str, group: int) -> str:
    """Return the IR of the decode kernel of `group` query heads per KV head."""
    return DecodeKernel(layout, level, group).build()
