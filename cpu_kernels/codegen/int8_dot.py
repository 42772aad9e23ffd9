"""Page math of int8 pages with the byte dot product (AVX-512 VNNI): 64 multiply-adds an instruction, exact integers.

Factors are 16-bit fixed point, split in two bytes, so that two dot products per line and query head replace widening:

- queries: ``q = step * (256 hi + lo)``, hi and lo signed, ``step = max|q| / 32512`` per query head. The instruction
  wants one unsigned side, so K enters as ``code + 128`` (one xor) and ``128 * sum(digit)`` is taken off beforehand;
- weights (with V's scales in them, never negative): ``w = step * (256 hi + lo)``, unsigned, ``step = max w / 65535``
  per query head and page; V enters signed as it is.

The error of a factor is at most step / 2, 2**-16 of the largest: far below that of int8 itself, and below bf16's.
"""

from __future__ import annotations

from cpu_kernels.codegen.convert import max_over_lanes, sum_over_lanes, vmax
from cpu_kernels.codegen.emit import Function
from cpu_kernels.codegen.frame import Frame, blocks_of
from cpu_kernels.codegen.lines import Ahead, Edge, column_source, tiles_of
from cpu_kernels.codegen.tiles import V16F, V16I
from cpu_kernels.codegen.values import F32, I8, I32, I64, Value, Var, vec
from cpu_kernels.layout import LANES

FLIP = -0x7F7F7F80  # 0x80808080: adds 128 to four signed bytes
QUERY_RANGE, WEIGHT_RANGE = 32512.0, 65535.0
MAX_GROUP = 8  # two accumulators a query head


def dot(acc: Value, unsigned: Value, signed: Value) -> Value:
    """Add the products of four unsigned and four signed bytes to each 32-bit lane."""
    bytes64 = vec(64, I8)
    return acc.fn.call(V16I, "llvm.x86.avx512.vpdpbusd.512", acc, unsigned.bits(bytes64), signed.bits(bytes64))


class Int8Dot:
    """Page math by byte dot products; the digits of a row lie as ``[hi row][lo row]``."""

    fetches_inside = False

    def __init__(self, k: Frame) -> None:
        f = k.f
        self.query_row, self.weight_row = 2 * k.dim, 2 * k.page
        # Behind the digits of a query head: its step, then the start values of the two accumulators.
        self.query_bytes = k.group * (self.query_row + 64)
        self.weight_bytes = k.group * self.weight_row
        self.p, self.steps = f.buffer(self.weight_bytes), f.buffer(-(-k.group * 4 // 64) * 64)
        self.blocks = blocks_of(k.group, MAX_GROUP)
        self.cache_level = k.tuning.cache_level
        self.fetch_every = k.tuning.fetch_light if k.group <= 2 else k.tuning.fetch_heavy

    def begin(self, k: Frame) -> None:
        pass

    def end(self, k: Frame) -> None:
        pass

    # ------------------------------------------------------------------ factors
    def store_query(self, k: Frame, g: Value, row: Value) -> None:
        f = k.f
        digits = k.q.at(g * (self.query_row + 64))
        peak, odd = f.var(V16F, 0.0), f.var(V16F, 0.0)
        with f.loop(0, k.dim, LANES) as d:
            x = f.call(V16F, "llvm.fabs.v16f32", f.load(V16F, row, d * 4))
            peak.set(vmax(x, peak.get()))
            odd.set(odd.get() + (x - x))  # 0, or NaN for what is not finite: then the step is NaN, and so is the row
        top = max_over_lanes(peak.get())
        inverse = (top > 0.0).select(QUERY_RANGE / top, 0.0).splat(LANES)
        sums = [f.var(V16I, 0), f.var(V16I, 0)]
        with f.loop(0, k.dim, LANES) as d:
            whole = rounded(f, f.load(V16F, row, d * 4) * inverse)
            high = (whole + 128).ashr(8)
            for number, digit in enumerate((high, whole - (high << 8))):
                f.store(digit.cast("trunc", vec(LANES, I8)), digits, d + number * k.dim)
                sums[number].set(sums[number].get() + digit)
        f.store(top / QUERY_RANGE + sum_over_lanes(odd.get()), digits, self.query_row)
        for number, total in enumerate(sums):
            start = f.call(I32, "llvm.vector.reduce.add.v16i32", total.get()) * -128
            f.store(start, digits, self.query_row + 4 + 4 * number)

    def store_weights(self, k: Frame, g: Value, weights: list[Value]) -> None:
        f = k.f
        top = max_over_lanes(*weights)
        inverse = (top > 0.0).select(WEIGHT_RANGE / top, 0.0).splat(LANES)
        f.store(top / WEIGHT_RANGE, self.steps, g * 4)
        for t, e in enumerate(weights):
            whole = rounded(f, e * inverse)
            for number, digit in enumerate((whole >> 8, whole & 255)):
                where = self.p.at(g * self.weight_row + (number * k.page + t * LANES))
                f.store(digit.cast("trunc", vec(LANES, I8)), where)

    # ------------------------------------------------------------------ products
    def scores(self, k: Frame, here: Value, ahead: Value | None, edge: Edge | None) -> None:
        f = k.f
        t0, t1 = tiles_of(k, edge)
        for number, (g0, count) in enumerate(self.blocks):
            queries = k.q.at(g0 * (self.query_row + 64))
            with f.loop(t0, t1) as t:
                acc = [self._starts(f, queries, g) for g in range(count)]
                with f.loop(0, k.dim // 4, 4) as i:
                    at = t * k.tile_bytes + i * 64
                    for u in range(4):
                        self._fetch(f, ahead if number == 0 else None, at, u)
                        line = f.load(V16I, here.at(at + u * 64)) ^ FLIP
                        for g, pair in enumerate(acc):
                            for part, var in enumerate(pair):
                                word = f.load(I32, queries.at(i * 4), g * (self.query_row + 64) + part * k.dim + u * 4)
                                var.set(dot(var.get(), line, word.splat(LANES)))
                scale = f.load(V16F, k.scales, t * 64)
                for g, pair in enumerate(acc):
                    step = f.load(F32, queries, g * (self.query_row + 64) + self.query_row)
                    f.store(joined(pair) * (scale * step.splat(LANES)), k.s, t * 64 + (g0 + g) * k.page * 4)

    def _starts(self, f: Function, queries: Value, g: int) -> list[Var]:
        at = g * (self.query_row + 64) + self.query_row + 4
        return [f.var(V16I, f.load(I32, queries, at + 4 * part).splat(LANES)) for part in range(2)]

    def _fetch(self, f: Function, ahead: Value | None, at: Value, u: int) -> None:
        if ahead is not None and self.fetch_every and u * 64 % self.fetch_every == 0:
            f.prefetch(ahead.at(at + u * 64), self.cache_level)

    def values(self, k: Frame, here: Value, ahead: Ahead | None, edge: Edge | None) -> None:
        f = k.f
        r0, r1 = f.const(I64, 0), f.const(I64, k.page // 4)
        if edge is not None:
            r0, r1 = edge[0] // 4, (edge[1] + 3) // 4
        values, unroll = here.at(k.layout.k_bytes), 4 if edge is None else 1
        for number, (g0, count) in enumerate(self.blocks):
            weights = self.p.at(g0 * self.weight_row)
            with f.loop(0, k.chunks) as c:
                acc = [[f.var(V16I, 0), f.var(V16I, 0)] for _ in range(count)]
                source = column_source(k, ahead if number == 0 else None, c)
                with f.loop(r0, r1, unroll) as r:
                    at = c * k.column_bytes + r * 64
                    for u in range(unroll):
                        self._fetch(f, source, at, u)
                        line = f.load(V16I, values.at(at + u * 64))
                        for g, pair in enumerate(acc):
                            for part, var in enumerate(pair):
                                word = f.load(I32, weights.at(r * 4), g * self.weight_row + part * k.page + u * 4)
                                var.set(dot(var.get(), word.splat(LANES), line))
                for g, pair in enumerate(acc):
                    step = f.load(F32, self.steps, (g0 + g) * 4).splat(LANES)
                    state = k.o.at(c * 64 + (g0 + g) * k.dim * 4)
                    f.store(f.load(V16F, state) + joined(pair) * step, state)


def rounded(f: Function, x: Value) -> Value:
    """Round float lanes to the nearest integers."""
    return f.call(V16F, "llvm.rint.v16f32", x).cast("fptosi", V16I)


def joined(pair: list[Var]) -> Value:
    """``256 hi + lo`` as float lanes; it fits 32 bits up to head_dim 512."""
    return ((pair[0].get() << 8) + pair[1].get()).cast("sitofp", V16F)
