"""Page math with AMX tiles: 16 query heads x 16 lanes x 32 bf16 multiply-adds an instruction.

A page's lines are B tiles as they lie in memory (a row of a B tile is 16 lanes of bf16 pairs)::

    scores   C[heads][16 positions] += A[heads][32 dims of q] . B[16 dim pairs][16 positions]      one per 32 dims
    values   C[heads][16 dims]      += A[heads][32 weights]   . B[16 position pairs][16 dims]      one per 32 positions

Lines of fp8 are widened to such rows first, in a small buffer that stays in the first-level cache: those of a tile
while the tile before is multiplied, so that none is loaded from what was stored just before. A remainder of 16 dims or
16 positions uses tiles of half the depth. In pages with masked positions, a tile of K that has an allowed position is
computed whole, and V in steps of 32 allowed positions; those at the ends, beside slots that may hold NaN, go through
the line math, whose weights and queries have the same form.
`HardwareTiles` emits the instructions; `EmulatedTiles` computes the same on memory with bf16 dot products, so that the
algorithm is tested on machines without AMX.
"""

from __future__ import annotations

from typing import Protocol

from cpu_kernels.codegen.emit import Function
from cpu_kernels.codegen.frame import Frame, blocks_of
from cpu_kernels.codegen.lines import Ahead, Edge, LineMath, column_source, tiles_of
from cpu_kernels.codegen.tiles import V16F, V16I, DotTiles, dot_bf16
from cpu_kernels.codegen.values import I8, I16, I32, I64, Value

MAX_ROWS = 16
C, A, B, A_HALF, B_HALF = range(5)  # tile numbers by role
TILE_BYTES = 1024
TURNS = 4  # buffers of widened lines


class TileOps(Protocol):
    """The AMX instructions that the page math needs; `count` is the number of query heads in the tiles."""

    def configure(self, f: Function, count: int) -> None: ...

    def release(self, f: Function) -> None: ...

    def load(self, f: Function, tile: int, where: Value, stride: int) -> None: ...

    def store(self, f: Function, tile: int, where: Value, stride: int) -> None: ...

    def zero(self, f: Function, tile: int) -> None: ...

    def multiply(self, f: Function, c: int, a: int, b: int) -> None: ...


def shapes(count: int) -> dict[int, tuple[int, int]]:
    """Rows and bytes per row of every tile for `count` query heads."""
    return {C: (count, 64), A: (count, 64), B: (16, 64), A_HALF: (count, 32), B_HALF: (8, 64)}


class HardwareTiles:
    """The instructions themselves, on explicit tile registers."""

    def configure(self, f: Function, count: int) -> None:
        """Write the 64-byte configuration (palette 1) and load it; tiles are per thread, so each call does it."""
        config = f.buffer(64)
        for at in range(0, 64, 8):
            f.store(f.const(I64, 0), config, at)
        f.store(f.const(I8, 1), config)
        for tile, (rows, width) in shapes(count).items():
            f.store(f.const(I16, width), config, 16 + 2 * tile)
            f.store(f.const(I8, rows), config, 48 + tile)
        f.call("void", "llvm.x86.ldtilecfg", config)

    def release(self, f: Function) -> None:
        f.call("void", "llvm.x86.tilerelease")

    def _op(self, f: Function, name: str, kinds: str, text: str) -> None:
        f.module.declare_text(name, f"declare void @{name}({kinds})")
        f.do(f"call void @{name}({text})")

    def load(self, f: Function, tile: int, where: Value, stride: int) -> None:
        text = f"i8 {tile}, ptr {where.name}, i64 {stride}"
        self._op(f, "llvm.x86.tileloadd64", "i8 immarg, ptr, i64", text)

    def store(self, f: Function, tile: int, where: Value, stride: int) -> None:
        text = f"i8 {tile}, ptr {where.name}, i64 {stride}"
        self._op(f, "llvm.x86.tilestored64", "i8 immarg, ptr, i64", text)

    def zero(self, f: Function, tile: int) -> None:
        self._op(f, "llvm.x86.tilezero", "i8 immarg", f"i8 {tile}")

    def multiply(self, f: Function, c: int, a: int, b: int) -> None:
        kinds = "i8 immarg, i8 immarg, i8 immarg"
        self._op(f, "llvm.x86.tdpbf16ps", kinds, f"i8 {c}, i8 {a}, i8 {b}")


class EmulatedTiles:
    """Tiles as 1 KiB buffers, rows of 64 bytes; for tests of the algorithm."""

    def __init__(self, f: Function) -> None:
        self.buffers = [f.buffer(TILE_BYTES) for _ in range(5)]
        self.shape: dict[int, tuple[int, int]] = {}

    def configure(self, f: Function, count: int) -> None:
        self.shape = shapes(count)

    def release(self, f: Function) -> None:
        pass

    def load(self, f: Function, tile: int, where: Value, stride: int) -> None:
        rows, width = self.shape[tile]
        for row in range(rows):
            for at in range(0, width, 4):
                f.store(f.load(I32, where, row * stride + at), self.buffers[tile], row * 64 + at)

    def store(self, f: Function, tile: int, where: Value, stride: int) -> None:
        for row in range(self.shape[tile][0]):
            f.store(f.load(V16F, self.buffers[tile], row * 64), where, row * stride)

    def zero(self, f: Function, tile: int) -> None:
        for row in range(self.shape[tile][0]):
            f.store(f.const(V16F, 0.0), self.buffers[tile], row * 64)

    def multiply(self, f: Function, c: int, a: int, b: int) -> None:
        """C[m] += sum over k of (pair A[m][k]) . (pairs B[k])."""
        depth = self.shape[b][0]
        if self.shape[a][1] != 4 * depth:
            raise ValueError(f"tile A has {self.shape[a][1]} bytes a row, tile B {depth} rows: they do not match")
        for row in range(self.shape[c][0]):
            total = f.load(V16F, self.buffers[c], row * 64)
            for k in range(depth):
                pair = f.load(I32, self.buffers[a], row * 64 + 4 * k)
                total = dot_bf16(total, f.load(V16I, self.buffers[b], k * 64), pair)
            f.store(total, self.buffers[c], row * 64)


class AmxMath(LineMath):
    """Page math on AMX tiles, on lines for V at the ends of what is allowed."""

    fetches_inside = True

    def __init__(self, k: Frame, tiles: DotTiles, ops: TileOps) -> None:
        super().__init__(k, tiles)
        self.ops = ops
        self.rows = blocks_of(k.group, MAX_ROWS)
        self.wide_bytes = max(k.dim, k.page) * 32
        self.wide = k.f.buffer(TURNS * self.wide_bytes) if tiles.words_per_line > 1 else None

    def begin(self, k: Frame) -> None:
        if len(self.rows) == 1:
            self.ops.configure(k.f, k.group)

    def end(self, k: Frame) -> None:
        self.ops.release(k.f)

    def _use(self, k: Frame, count: int) -> None:
        """Groups above 16 heads are cut into blocks; their sizes may differ, so each block configures its own."""
        if len(self.rows) > 1:
            self.ops.configure(k.f, count)

    def scores(self, k: Frame, here: Value, ahead: Value | None, edge: Edge | None) -> None:
        f, ops = k.f, self.ops
        t0, t1 = tiles_of(k, edge)
        for number, (g0, count) in enumerate(self.rows):
            self._use(k, count)
            queries = k.q.at(g0 * k.dim * 2)
            with f.loop(t0, t1) as t:
                ops.zero(f, C)
                at = t * k.tile_bytes
                source = None if ahead is None or number else ahead.at(at)
                self._multiply(k, queries, here.at(at), k.dim, source, t, k.dim * 2)
                ops.store(f, C, k.s.at(t * 64 + g0 * k.page * 4), k.page * 4)
                if k.layout.kind.limit:
                    scale = f.load(V16F, k.scales, t * 64)
                    for g in range(g0, g0 + count):
                        where = k.s.at(t * 64 + g * k.page * 4)
                        f.store(f.load(V16F, where) * scale, where)

    def _multiply(
        self, k: Frame, factors: Value, lines: Value, depth: int, ahead: Value | None, turn: Value, stride: int
    ) -> None:
        """C += rows of `depth` factors, `stride` bytes apart, times as many dims or positions of 16 lanes."""
        pieces = [(first, min(32, depth - first)) for first in range(0, depth, 32)]
        rows = lines if self.wide is None else self.wide.at((turn % TURNS) * self.wide_bytes)
        if self.wide is not None:
            self._widen(k, lines, rows, pieces[0], ahead)
        for number, (first, count) in enumerate(pieces):
            if self.wide is None:
                self._fetch(k, ahead, first, count, k.tuning.fetch_tiles)
            elif number + 1 < len(pieces):
                self._widen(k, lines, rows, pieces[number + 1], ahead)
            a, b = (A, B) if count == 32 else (A_HALF, B_HALF)
            self.ops.load(k.f, a, factors.at(first * 2), stride)
            self.ops.load(k.f, b, rows.at(first * 32), 64)
            self.ops.multiply(k.f, C, a, b)

    def _widen(self, k: Frame, lines: Value, rows: Value, piece: tuple[int, int], ahead: Value | None) -> None:
        """Store the lines of `piece` dims or positions as rows of a B tile, which is heavy arithmetic per line."""
        f, (first, count), size = k.f, piece, k.layout.line_bytes
        at = first * 32
        for line in range(first // k.layout.per_lane, (first + count) // k.layout.per_lane):
            self._fetch(k, ahead, line * k.layout.per_lane, k.layout.per_lane, k.tuning.fetch_heavy)
            for row in self.tiles.factors(f, lines.at(line * size)):
                f.store(row, rows, at)
                at += 64

    def _fetch(self, k: Frame, ahead: Value | None, first: int, depth: int, every: int) -> None:
        """Fetch the lines of `depth` dims or positions from `first` on."""
        size = k.tile_bytes // k.dim  # bytes of 16 lanes of one element
        if ahead is not None and every:
            for byte in range(first * size, (first + depth) * size, 64):
                if byte % every == 0:
                    k.f.prefetch(ahead.at(byte), k.tuning.cache_level)

    def values(self, k: Frame, here: Value, ahead: Ahead | None, edge: Edge | None) -> None:
        if edge is not None:
            self._values_inside(k, here.at(k.layout.k_bytes), ahead, edge)
            return
        f, ops, values = k.f, self.ops, here.at(k.layout.k_bytes)
        for number, (g0, count) in enumerate(self.rows):
            self._use(k, count)
            weights = self.p.at(g0 * k.page * 2)
            with f.loop(0, k.chunks) as c:
                state = k.o.at(c * 64 + g0 * k.dim * 4)
                ops.load(f, C, state, k.dim * 4)
                at, source = c * k.column_bytes, column_source(k, ahead if number == 0 else None, c)
                source = None if source is None else source.at(at)
                self._multiply(k, weights, values.at(at), k.page, source, c, k.page * 2)
                ops.store(f, C, state, k.dim * 4)

    def _values_inside(self, k: Frame, values: Value, ahead: Ahead | None, edge: Edge) -> None:
        """Steps of 32 positions between `edge` by tiles, what is left before and behind them by lines."""
        f, ops, n, (low, high) = k.f, self.ops, k.layout.per_lane, edge
        first, last = (low + 31) // 32 * 32, high // 32 * 32
        some = first < last
        first, last = some.select(first, high), some.select(last, high)
        with f.when(some):
            for number, (g0, count) in enumerate(self.rows):
                self._use(k, count)
                with f.loop(0, k.chunks) as c:
                    state = k.o.at(c * 64 + g0 * k.dim * 4)
                    ops.load(f, C, state, k.dim * 4)
                    source = column_source(k, ahead if number == 0 else None, c)
                    with f.loop(first, last, 32) as row:
                        at = c * k.column_bytes + row * (k.column_bytes // k.page)
                        weights, beyond = (
                            self.p.at(row * 2 + g0 * k.page * 2),
                            None if source is None else source.at(at),
                        )
                        self._multiply(k, weights, values.at(at), 32, beyond, row // 32 + c, k.page * 2)
                    ops.store(f, C, state, k.dim * 4)
        with f.loop(0, 2) as behind:
            start, stop = behind.eq(0).select(low, last), behind.eq(0).select(first, high)
            with f.when(start < stop):
                for block in self.blocks:
                    self._block_values(k, values, None, start // n, (stop + (n - 1)) // n, block, edge)
