"""The decode attention kernel of one (layout, level, group): IR for ``decode(job, first_unit, last_unit)``.

A unit is one work item (sequence, split) and one KV head. Its pages stream once through the query heads of the group::

    page j      QK tiles --> softmax update (one per page) --> PV rows
                 |  one prefetch per line, of the same line of page j+1, into L2
    page j+1     v   (the last page of a unit prefetches the first page of the next unit)

The prefetch inside the multiply loops is what makes the difference on one thread: it keeps a page's worth of reads
under way while the previous page is computed. A sequence of one split is normalised and written at once; of several,
the last finisher of (sequence, head) merges the partial results in the order of the splits, so the result does not
depend on who computed what.
"""

from __future__ import annotations

from cpu_kernels.codegen.convert import LN2, LOG2E, exp2, fma, log2, tanh, vmax
from cpu_kernels.codegen.emit import F32, I32, I64, PTR, Module, Value
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


class DecodeKernel:
    """Builds the kernel; the methods follow the order of the computation."""

    def __init__(self, layout: Layout, level: str, group: int) -> None:
        self.layout, self.level, self.group = layout, level, group
        self.tiles = tiles_for(layout, level)
        self.dim, self.page = layout.head_dim, layout.page_size
        self.chunks = self.dim // LANES
        self.lines_per_tile = self.dim // layout.per_lane
        self.tile_bytes = LANES * self.dim * layout.element_bytes
        self.row_bytes = self.chunks * layout.line_bytes
        self.blocks = blocks_of(group, self.tiles.max_group)
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
        self.sm_scale = self.f.load(F32, self.job, int(Job.SM_SCALE) * 8)
        self.soft_cap = self.f.load(F32, self.job, int(Job.SOFT_CAP) * 8)
        self.alibi, self.sinks = self._word(Job.ALIBI), self._word(Job.SINKS)
        self.shaped = self.soft_cap.ne(0.0) | self.alibi.ne(0)
        # Shaped scores come out of `_shape_scores` in base 2 already.
        self.scale2 = self.shaped.select(self.f.const(F32, 1.0), self.sm_scale * LOG2E)

    def _take_buffers(self) -> None:
        f, group, size = self.f, self.group, self.tiles.weight_bytes
        self.q, self.o = f.buffer(group * self.dim * size), f.buffer(group * self.dim * 4)
        self.s, self.p = f.buffer(group * self.page * 4), f.buffer(group * self.page * size)
        self.m, self.l = f.buffer(group * 4), f.buffer(group * 4)
        self.codec = RowCodec(f, self.layout, self.level)

    def _item(self, item: Value, field: Item) -> Value:
        return self.f.load(I64, item, int(field) * 8)

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
        item = self.items.at((unit // self.heads) * (ITEM_WORDS * 8))
        head = unit % self.heads
        self.seq, self.head = self._item(item, Item.SEQ), head
        self.first, self.last = self._item(item, Item.FIRST), self._item(item, Item.LAST)
        self.seq_len = self._item(item, Item.SEQ_LEN)
        following = self._first_block_of(unit + 1)
        self._append(item)
        self._reset()
        end = (self.last + (self.page - 1)) // self.page
        with f.loop(self.first // self.page, end) as page:
            here = self._block(self.seq, page, head)
            ahead = f.var(PTR, following)
            with f.when(page + 1 < end):
                ahead.set(self._block(self.seq, page + 1, head))
            self._page(page * self.page, here, ahead.get())
        self._finish(item)

    def _first_block_of(self, unit: Value) -> Value:
        """Where the next unit will read first; its pages may be none, then anywhere."""
        f = self.f
        where = f.var(PTR, self.base)
        with f.when(unit < self.num_units):
            item = self.items.at((unit // self.heads) * (ITEM_WORDS * 8))
            first = self._item(item, Item.FIRST)
            with f.when(first < self._item(item, Item.LAST)):
                where.set(self._block(self._item(item, Item.SEQ), first // self.page, unit % self.heads))
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

    # ------------------------------------------------------------------ one page
    def _page(self, start: Value, here: Value, ahead: Value) -> None:
        f = self.f
        low, high = self.first - start, self.last - start
        low, high = (low > 0).select(low, 0), (high < self.page).select(high, self.page)
        self.start, self.scales = start, here.at(2 * self.layout.k_bytes)
        with f.either(low.eq(0) & high.eq(self.page)) as whole:
            for n, block in enumerate(self.blocks):
                self._scores(here, ahead, f.const(I64, 0), f.const(I64, self.page // LANES), block, n == 0)
            self._softmax(None)
            for n, block in enumerate(self.blocks):
                self._values(here, ahead, f.const(I64, 0), f.const(I64, self.page // self.layout.per_lane), block, n == 0)
            whole.otherwise()
            self._fetch_all(ahead)
            for block in self.blocks:
                self._scores(here, None, low // LANES, (high + (LANES - 1)) // LANES, block, False)
            self._softmax((low, high))
            self._edge = (low, high)
            n = self.layout.per_lane
            for block in self.blocks:
                self._values(here, None, low // n, (high + (n - 1)) // n, block, False)

    def _fetch_all(self, ahead: Value) -> None:
        f = self.f
        with f.loop(0, 2 * self.layout.k_bytes, 256) as at:
            for line in range(4):
                f.prefetch(ahead.at(at + 64 * line), L2)

    def _scores(self, here: Value, ahead: Value | None, t0: Value, t1: Value, block: tuple[int, int], fetch: bool) -> None:
        """s[g][16 t + lane] = q[g] . k for the tiles [t0, t1) and the query heads of `block`."""
        f, tiles, (g0, count) = self.f, self.tiles, block
        whole = ahead is not None
        pair = 2 if whole and self.page // LANES >= 2 and 2 * count <= tiles.accumulators else 1
        ways = max(1, min(4, 8 // (pair * count)))
        unroll = 8 if self.lines_per_tile % 8 == 0 and count * pair <= 16 else 4
        line_bytes = self.layout.line_bytes
        q0 = self.q.at(g0 * self.dim * tiles.weight_bytes)
        with f.loop(t0, t1, pair) as t:
            acc = [[[f.var(V16F, 0.0) for _ in range(ways)] for _ in range(count)] for _ in range(pair)]
            with f.loop(0, self.lines_per_tile, unroll) as i:
                at = t * self.tile_bytes + i * line_bytes
                lines, query = here.at(at), q0.at(i * (tiles.words_per_line * 4))
                for u in range(unroll):
                    for tile in range(pair):
                        offset = tile * self.tile_bytes + u * line_bytes
                        if fetch and ahead is not None and (offset % 64 == 0):
                            f.prefetch(ahead.at(at + offset), L2)
                        self._mac_line(lines.at(offset), query, u, self.dim, acc[tile], None)
            for tile in range(pair):
                for g in range(count):
                    total = acc[tile][g][0].get()
                    for other in acc[tile][g][1:]:
                        total = total + other.get()
                    if self.layout.dtype == "int8":
                        total = total * f.load(V16F, self.scales, (t + tile) * 64)
                    f.store(total, self.s, (t + tile) * 64 + (g0 + g) * self.page * 4)

    def _mac_line(self, line: Value, words: Value, u: int, row: int, acc: list, mask: Value | None) -> None:
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

    def _values(self, here: Value, ahead: Value | None, r0: Value, r1: Value, block: tuple[int, int], fetch: bool) -> None:
        """o[g] += p[g] . v for the rows [r0, r1), a block of query heads, a few chunks of 16 dims at a time."""
        f, (g0, count) = self.f, block
        width = max(1, min(self.chunks, self.tiles.accumulators // count))
        for c0, size in blocks_of(self.chunks, width):
            ways = max(1, min(2, 8 // (count * size)))
            acc = [[self._accumulators(g0 + g, c0 + c, ways) for g in range(count)] for c in range(size)]
            unroll = 4 if ahead is not None else 1
            with f.loop(r0, r1, unroll) as r:
                self._value_rows(here, ahead if fetch else None, r, unroll, (g0, c0), acc)
            for c in range(size):
                for g in range(count):
                    total = acc[c][g][0].get()
                    for other in acc[c][g][1:]:
                        total = total + other.get()
                    f.store(total, self.o, ((g0 + g) * self.dim + (c0 + c) * LANES) * 4)

    def _accumulators(self, g: int, c: int, ways: int) -> list:
        f = self.f
        first = f.var(V16F, f.load(V16F, self.o, (g * self.dim + c * LANES) * 4))
        return [first, *(f.var(V16F, 0.0) for _ in range(ways - 1))]

    def _value_rows(self, here: Value, ahead: Value | None, r: Value, unroll: int, corner: tuple[int, int], acc: list) -> None:
        f, tiles, (g0, c0), layout = self.f, self.tiles, corner, self.layout
        at = r * self.row_bytes + layout.k_bytes
        lines = here.at(at)
        weights = self.p.at(r * (tiles.words_per_line * 4) + g0 * self.page * tiles.weight_bytes)
        mask = self._row_mask(r) if unroll == 1 and layout.per_lane == 2 else None
        for u in range(unroll):
            for c in range(len(acc)):
                offset = u * self.row_bytes + (c0 + c) * layout.line_bytes
                if ahead is not None and offset % 64 == 0:
                    f.prefetch(ahead.at(at + offset), L2)
                self._mac_line(lines.at(offset), weights, u, self.page, acc[c], mask)

    def _row_mask(self, r: Value) -> Value:
        """Bits of a bf16 pair that belong to allowed positions; a NaN in the other half must not meet its weight 0."""
        low, high = self._edge
        mask = (r * 2 >= low).select(self.f.const(I32, 0xFFFF), 0) | (r * 2 + 1 < high).select(
            self.f.const(I32, -65536), 0
        )
        return mask.splat(LANES)

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
