"""Tokens' K and V into pages and back, one token at a time or sixteen that fill a tile of positions.

A row is one token of one KV head, ``head_dim`` stored elements. Sixteen rows that begin at a multiple of 16 are whole
lines, so that they are moved by vectors: K by transposing blocks of 16 x 16 lane words, V by putting the elements of
``n`` rows next to each other::

    rows, 16 x head_dim elements          K: words across, positions down -> transposed -> lines of 16 positions
    row t   | d d | d d | d d | ...       V: 16 dims of n rows -> one line
"""

from __future__ import annotations

from cpu_kernels.codegen.convert import bf16_to_f32, f16_to_f32, max_over_lanes, vmax
from cpu_kernels.codegen.emit import Function, Module
from cpu_kernels.codegen.fields import Code
from cpu_kernels.codegen.tiles import V16F, element_shift, load_as_f32, store_from_f32
from cpu_kernels.codegen.values import F32, I1, I16, I32, I64, PTR, Value, vec
from cpu_kernels.layout import LANES, Layout

WIDE = ("amx_bf16", "avx512_bf16", "avx512")  # with 512-bit vectors of 16-bit lanes


class RowCodec:
    """Emits the transfers between plain rows and a page block.

    Parameters
    ----------
    f : Function
        Where the code goes; its stack buffers are taken from it once.
    layout : Layout
        The page's layout.
    level : str
        ISA level (fp16 conversions differ).
    rows : int
        Rows that are held at once: 1, or 16 for tiles.
    """

    def __init__(self, f: Function, layout: Layout, level: str, rows: int = 1) -> None:
        self.f, self.layout, self.kind, self.level = f, layout, layout.kind, level
        self.word = I32 if self.kind.per_lane * self.kind.element_bytes == 4 else I16
        self.word_bytes = self.kind.per_lane * self.kind.element_bytes
        self.words = layout.head_dim // self.kind.per_lane
        self.row_bytes = -(-self.words // LANES) * LANES * self.word_bytes  # up to whole vectors
        self._rows = f.buffer(self.row_bytes * rows)
        self._wide = f.buffer(layout.head_dim * 4) if self.kind.limit else self._rows

    # ------------------------------------------------------------------ where things lie
    def _base(self, block: Value, which: int, offset: Value) -> Value:
        """Where the tile (K) or the line of the first column (V) of a token begins."""
        if which == 0:
            return block.at((offset // LANES) * (self.words * LANES * self.word_bytes))
        return block.at((offset // self.layout.per_lane) * self.layout.line_bytes + self.layout.k_bytes)

    @property
    def _column_bytes(self) -> int:
        return self.layout.page_size // self.layout.per_lane * self.layout.line_bytes

    def _scale_at(self, block: Value, offset: Value, which: int) -> Value:
        return block.at(offset * 4 + (2 * self.layout.k_bytes + which * 4 * self.layout.page_size))

    # ------------------------------------------------------------------ conversion of a row
    def _narrow(self, source: Value, code: Value, row: Value, scale_at: Value) -> None:
        """Convert the plain row at `source` (run-time type `code`) to stored elements at `row`, and store its scale."""
        f, peaks = self.f, self.kind.short_peaks if self.level in WIDE else {}
        done = f.var(I1, 0)
        for short, (least, most) in peaks.items():
            with f.when(code.eq(int(short))):
                done.set(self._narrow_short(source, short, row, scale_at, least, most))
        with f.when(done.get().eq(0)):
            self._narrow_any(source, code, row, scale_at)

    def _narrow_short(self, source: Value, code: Code, row: Value, scale_at: Value, least: int, most: int) -> Value:
        """Convert a row by 16-bit arithmetic if its largest magnitude lies in a range, and its fp16 are normal.

        Returns whether it did.
        """
        f, kind, dim = self.f, self.kind, self.layout.head_dim
        lanes = 2 * LANES if dim % (2 * LANES) == 0 else LANES
        bits = vec(lanes, I16)
        peaks, lows = f.var(bits, 0), f.var(bits, 0x7FFF)
        with f.loop(0, dim, lanes) as d:
            size = f.load(bits, source, d * 2) & 0x7FFF
            peaks.set(f.call(bits, f"llvm.umax.v{lanes}i16", size, peaks.get()))
            if code is Code.FP16:
                lows.set(f.call(bits, f"llvm.umin.v{lanes}i16", size, lows.get()))
        peak = f.call(I16, f"llvm.vector.reduce.umax.v{lanes}i16", peaks.get())
        fits = (peak >= least) & (peak <= most)
        if code is Code.FP16:
            fits = fits & (f.call(I16, f"llvm.vector.reduce.umin.v{lanes}i16", lows.get()) >= 0x400)
        with f.when(fits):
            one = peak.bits(vec(1, I16))
            scale = kind.scale((f16_to_f32(one, self.level) if code is Code.FP16 else bf16_to_f32(one)).lane(0))
            f.store(scale, scale_at)
            with f.loop(0, dim, lanes) as d:
                f.store(kind.narrow_short(f.load(bits, source, d * 2), code, scale), row, d * kind.element_bytes)
        return fits

    def _narrow_any(self, source: Value, code: Value, row: Value, scale_at: Value) -> None:
        f, kind, dim, shift = self.f, self.kind, self.layout.head_dim, element_shift(code)
        factor = None
        if kind.limit:
            peak = f.var(V16F, 0.0)
            with f.loop(0, dim, LANES) as d:
                x = load_as_f32(f, source.at(d << shift), code, LANES, self.level)
                f.store(x, self._wide, d * 4)
                peak.set(vmax(f.call(V16F, "llvm.fabs.v16f32", x), peak.get()))  # a NaN never counts
            top = max_over_lanes(peak.get())
            scale = kind.scale(top)
            f.store(scale, scale_at)
            factor = kind.factor(top, scale)
        if kind.stored_as is None:
            self._narrow_row(source, code, row, factor)
            return
        with f.either(code.eq(int(kind.stored_as))) as same:
            with f.loop(0, dim, LANES) as d:
                x = f.load(vec(LANES, kind.kind), source, d * kind.element_bytes)
                f.store(kind.quiet(x), row, d * kind.element_bytes)
            same.otherwise()
            self._narrow_row(source, code, row, factor)

    def _narrow_row(self, source: Value, code: Value, row: Value, factor: Value | None) -> None:
        f, kind, shift, dim = self.f, self.kind, element_shift(code), self.layout.head_dim
        if kind.limit:
            with f.loop(0, dim, LANES) as d:
                x = f.load(V16F, self._wide, d * 4)
                f.store(kind.narrow(x, factor, self.level), row, d * kind.element_bytes)
            return
        with f.either(code.eq(int(Code.FP16))) as half:
            with f.loop(0, dim, LANES) as d:
                x = f16_to_f32(f.load(vec(LANES, I16), source, d * 2), self.level)
                f.store(kind.narrow_fp16(x, self.level), row, d * kind.element_bytes)
            half.otherwise()
            with f.loop(0, dim, LANES) as d:
                x = load_as_f32(f, source.at(d << shift), code, LANES, self.level)
                f.store(kind.narrow(x, factor, self.level), row, d * kind.element_bytes)

    def _widen(self, row: Value, scale_at: Value, target: Value, code: Value) -> None:
        f, kind, shift = self.f, self.kind, element_shift(code)
        scale = f.load(F32, scale_at).splat(LANES) if kind.limit else None
        with f.loop(0, self.layout.head_dim, LANES) as d:
            x = kind.widen(f.load(vec(LANES, kind.kind), row, d * kind.element_bytes), self.level)
            store_from_f32(f, x if scale is None else x * scale, target.at(d << shift), code, LANES, self.level)

    # ------------------------------------------------------------------ one token
    def write(self, block: Value, offset: Value, k: Value, v: Value, code: Value) -> None:
        """Write the plain rows at `k` and `v` as token `offset`."""
        self._one(block, offset, (k, v), code, True)

    def read(self, block: Value, offset: Value, k: Value, v: Value, code: Value) -> None:
        """Write token `offset` of a page to the plain rows at `k` and `v`."""
        self._one(block, offset, (k, v), code, False)

    def _one(self, block: Value, offset: Value, rows: tuple[Value, Value], code: Value, write: bool) -> None:
        f, row, n, size = self.f, self._rows, self.layout.per_lane, self.kind.element_bytes
        for which, plain in enumerate(rows):
            scale_at = self._scale_at(block, offset, which)
            if write:
                self._narrow_any(plain, code, row, scale_at)
            if which == 0:
                base = self._base(block, 0, offset).at((offset % LANES) * self.word_bytes)
                with f.loop(0, self.words) as w:
                    there = base.at(w * (LANES * self.word_bytes))
                    self._copy(self.word, row.at(w * self.word_bytes), there, write)
            else:
                base = self._base(block, 1, offset).at((offset % n) * size)
                with f.loop(0, self.layout.head_dim, LANES) as d:
                    for i in range(LANES):
                        there = base.at((d // LANES) * self._column_bytes + i * n * size)
                        self._copy(self.kind.kind, row.at((d + i) * size), there, write)
            if not write:
                self._widen(row, scale_at, plain, code)

    def _copy(self, kind: str, here: Value, there: Value, write: bool) -> None:
        source, target = (here, there) if write else (there, here)
        self.f.store(self.f.load(kind, source), target)

    # ------------------------------------------------------------------ sixteen tokens
    def tile(
        self, block: Value, offset: Value, rows: tuple[Value, Value], strides: tuple[Value, Value], code: Value,
        write: bool,
    ) -> None:  # fmt: skip
        """Move 16 tokens from `offset`, a multiple of 16, between a page and plain rows that lie `strides` apart."""
        f, row_bytes = self.f, plain_row_bytes(self.layout, code)
        for which, (plain, stride) in enumerate(zip(rows, strides, strict=True)):
            base = self._base(block, which, offset)
            if not write:
                (self._lines_of_k if which == 0 else self._lines_of_v)(base, False)
            with f.loop(0, LANES) as t:
                row, scale_at = self._rows.at(t * self.row_bytes), self._scale_at(block, offset + t, which)
                if write:
                    # Rows are short runs far apart, which processors do not foresee: fetch those of the next tile.
                    with f.loop(0, row_bytes, 64) as at:
                        f.prefetch(plain.at((t + LANES) * stride + at), 2)
                    self._narrow(plain.at(t * stride), code, row, scale_at)
                else:
                    self._widen(row, scale_at, plain.at(t * stride), code)
            if write:
                (self._lines_of_k if which == 0 else self._lines_of_v)(base, True)

    def _lines_of_k(self, base: Value, write: bool) -> None:
        whole = self.words // LANES * LANES
        with self.f.loop(0, whole, LANES) as w:
            self._square(base, w, LANES, write)
        if self.words > whole:
            self._square(base, self.f.const(I64, whole), self.words - whole, write)

    def _square(self, base: Value, w: Value, count: int, write: bool) -> None:
        """Transpose the words `w` .. `w` + `count` of 16 rows."""
        f, kind, line = self.f, vec(LANES, self.word), LANES * self.word_bytes
        rows = [self._rows.at(w * self.word_bytes + t * self.row_bytes) for t in range(LANES)]
        lines = [base.at(w * line + i * line) for i in range(count)]
        sources, targets = (rows, lines) if write else (lines, rows)
        loaded = [f.load(kind, x) for x in sources]
        loaded += [f.const(kind, 0)] * (LANES - len(loaded))
        for x, where in zip(transposed(loaded), targets, strict=False):
            f.store(x, where)

    def _lines_of_v(self, base: Value, write: bool) -> None:
        f, n, size = self.f, self.layout.per_lane, self.kind.element_bytes
        whole, part, bits = vec(LANES, self.word), vec(LANES, f"i{8 * size}"), 8 * size
        with f.loop(0, self.layout.head_dim // LANES) as c:
            for r in range(LANES // n):
                line = base.at(c * self._column_bytes + r * self.layout.line_bytes)
                rows = [self._rows.at(c * (LANES * size) + (r * n + j) * self.row_bytes) for j in range(n)]
                if n == 1:
                    self._copy(whole, rows[0], line, write)
                elif write:
                    parts = [f.load(part, x).cast("zext", whole) << (j * bits) for j, x in enumerate(rows)]
                    for x in parts[1:]:
                        parts[0] = parts[0] | x
                    f.store(parts[0], line)
                else:
                    x = f.load(whole, line)
                    for j, where in enumerate(rows):
                        f.store((x >> (j * bits)).cast("trunc", part), where)


def plain_row_bytes(layout: Layout, code: Value) -> Value:
    """Bytes of a plain row of run-time type `code`."""
    return code.fn.const(I64, layout.head_dim) << element_shift(code)


def transposed(rows: list[Value]) -> list[Value]:
    """Transpose 16 vectors of 16 lanes, by exchanging halves of pairs at distances 8, 4, 2, 1."""
    x, f, kind = list(rows), rows[0].fn, rows[0].kind
    for step in (8, 4, 2, 1):
        low = [j if not j & step else LANES + j - step for j in range(LANES)]
        high = [j + step if not j & step else LANES + j for j in range(LANES)]
        for i in range(LANES):
            if not i & step:
                pair = x[i], x[i + step]
                x[i], x[i + step] = (
                    f.let(kind, f"shufflevector {kind} {pair[0].name}, {kind} {pair[1].name}, {vec(LANES, I32)} "
                          f"<{', '.join(f'i32 {j}' for j in order)}>")
                    for order in (low, high)
                )  # fmt: skip
    return x


def build_moves(layout: Layout, level: str) -> str:
    """Return IR of ``append`` and ``gather`` for one layout.

    ``append(base, page_bytes, heads, slots, n, k, k_row, k_head, k_page, v, v_row, v_head, v_page, period, code)``
    writes row i to slot ``slots[i]`` (skipped when negative); ``gather`` reads token i from page
    ``slots[i / page_size]``. Row i of a head lies at ``(i / period) * k_page + (i % period) * k_row + head * k_head``
    bytes.
    """
    module = Module()
    args = (PTR, I64, I64, PTR, I64, PTR, I64, I64, I64, PTR, I64, I64, I64, I64, I64)
    for name in ("append", "gather"):
        f = module.function(name, args)
        base, page_bytes, heads, slots, n, k, k_row, k_head, k_page, v, v_row, v_head, v_page, period, code = f.args
        with f.default_floats():
            codec = RowCodec(f, layout, level, LANES)
            i = f.var(I64, 0)
            with f.forever() as done:
                now = i.get()
                with f.when(now >= n):
                    f.leave(done)
                slot, whole = _slot_of(f, name, slots, now, n, layout)
                turn, inside = now // period, now % period
                rows = k.at(turn * k_page + inside * k_row), v.at(turn * v_page + inside * v_row)
                page, offset = base.at((slot // layout.page_size) * page_bytes), slot % layout.page_size
                with f.when(slot >= 0):
                    with f.loop(0, heads) as h:
                        block, plain = page.at(h * layout.head_bytes), (rows[0].at(h * k_head), rows[1].at(h * v_head))
                        with f.either(whole) as tile:
                            codec.tile(block, offset, plain, (k_row, v_row), code, name == "append")
                            tile.otherwise()
                            (codec.write if name == "append" else codec.read)(block, offset, *plain, code)
                i.set(now + whole.select(f.const(I64, LANES), 1))
    return module.text()


def _slot_of(f: Function, name: str, slots: Value, i: Value, n: Value, layout: Layout) -> tuple[Value, Value]:
    """Return the slot of row `i`, and whether 16 rows from it on fill a tile."""
    room = i + LANES <= n
    if name == "gather":
        page = f.load(I64, slots, (i // layout.page_size) * 8)
        return page * layout.page_size + i % layout.page_size, room & (i % LANES).eq(0)
    slot, kind = f.load(I64, slots, i * 8), vec(LANES, I64)
    whole = f.var(I1, 0)
    with f.when(room & (slot >= 0) & (slot % LANES).eq(0)):
        steps = Value(f, kind, "<" + ", ".join(f"i64 {j}" for j in range(LANES)) + ">")
        same = f.load(kind, slots, i * 8).eq(slot.splat(LANES) + steps)
        whole.set(f.call(I1, f"llvm.vector.reduce.and.v{LANES}i1", same))
    return slot, whole.get()
