"""Page math by lines: every 64-byte line of K or V is multiplied into one accumulator per query head.

`PageMath` is the tile interface of the ISA levels; `LineMath` serves all levels through `tiles`, `int8_dot` and `amx`
replace it where a level has better instructions.
"""

from __future__ import annotations

from typing import Protocol

from cpu_kernels.codegen.emit import Function
from cpu_kernels.codegen.frame import Frame, blocks_of, total_of
from cpu_kernels.codegen.tiles import V16F, Tiles
from cpu_kernels.codegen.values import I64, Value, Var
from cpu_kernels.layout import LANES

Edge = tuple[Value, Value]  # first allowed position in the page, and one past the last
Ahead = tuple[Value, Value]  # where the first half of the columns of V fetches from, and where the second half does


class PageMath(Protocol):
    """Scores and weighted values of one page of one KV head.

    Attributes
    ----------
    query_bytes, weight_bytes : int
        Buffer sizes of the group's queries and of one page's weights.
    fetches_inside : bool
        Pages with masked positions are computed at the pace of whole ones, so that fetches are spread over them.
    """

    query_bytes: int
    weight_bytes: int
    fetches_inside: bool

    def begin(self, k: Frame) -> None:
        """Emit what a kernel call needs before its first unit."""

    def end(self, k: Frame) -> None:
        """Emit what it needs after the last."""

    def store_query(self, k: Frame, g: Value, row: Value) -> None:
        """Bring a query head's float32 ``[head_dim]`` at `row` into the form that `scores` reads."""

    def scores(self, k: Frame, here: Value, ahead: Value | None, edge: Edge | None) -> None:
        """Write ``s[group][page_size] = q . k`` (dequantised) of the allowed tiles, fetching `ahead` on the way."""

    def store_weights(self, k: Frame, g: Value, weights: list[Value]) -> None:
        """Store a head's softmax weights of the page, 16 positions a vector; they carry V's scales if it has any."""

    def values(self, k: Frame, here: Value, ahead: Ahead | None, edge: Edge | None) -> None:
        """Add the weighted V of the allowed positions to ``o[group][head_dim]``, fetching `ahead` on the way."""


class LineMath:
    """Page math on `Tiles`: a line in registers, the words of the query heads spread over the lanes one by one."""

    fetches_inside = False

    def __init__(self, k: Frame, tiles: Tiles) -> None:
        self.tiles = tiles
        self.query_bytes = k.group * k.dim * tiles.weight_bytes
        self.weight_bytes = k.group * k.page * tiles.weight_bytes
        self.p = k.f.buffer(self.weight_bytes)
        self.blocks = blocks_of(k.group, tiles.max_group)
        # With little arithmetic per line the processor runs far ahead by itself, and fetching every second line leaves
        # room for that; with much, each line has to be fetched (docs/performance.md has the figures).
        light = k.group * tiles.words_per_line * (64 // k.layout.line_bytes) <= 3
        self.fetch_every = k.tuning.fetch_light if light else k.tuning.fetch_heavy

    def begin(self, k: Frame) -> None:
        pass

    def end(self, k: Frame) -> None:
        pass

    def store_query(self, k: Frame, g: Value, row: Value) -> None:
        size = self.tiles.weight_bytes
        with k.f.loop(0, k.dim, LANES) as d:
            self.tiles.store_weights(k.f, k.f.load(V16F, row, d * 4), k.q.at((g * k.dim + d) * size))

    def scores(self, k: Frame, here: Value, ahead: Value | None, edge: Edge | None) -> None:
        t0, t1 = tiles_of(k, edge)
        for number, block in enumerate(self.blocks):
            self._block_scores(k, here, ahead if number == 0 else None, t0, t1, block)

    def _block_scores(
        self, k: Frame, here: Value, ahead: Value | None, t0: Value, t1: Value, block: tuple[int, int]
    ) -> None:
        f, tiles, (g0, count) = k.f, self.tiles, block
        ways, lines = max(1, min(4, 8 // count)), k.dim // k.layout.per_lane
        unroll = 8 if lines % 8 == 0 else 4
        queries = k.q.at(g0 * k.dim * tiles.weight_bytes)
        with f.loop(t0, t1) as t:
            acc = [[f.var(V16F, 0.0) for _ in range(ways)] for _ in range(count)]
            with f.loop(0, lines, unroll) as i:
                at = t * k.tile_bytes + i * k.layout.line_bytes
                words = queries.at(i * (tiles.words_per_line * 4))
                self._walk(k, here.at(at), None if ahead is None else ahead.at(at), words, unroll, k.dim, acc, None)
            for g in range(count):
                total = total_of(acc[g])
                if k.layout.kind.limit:
                    total = total * f.load(V16F, k.scales, t * 64)
                f.store(total, k.s, t * 64 + (g0 + g) * k.page * 4)

    def _walk(
        self,
        k: Frame,
        lines: Value,
        ahead: Value | None,
        words: Value,
        count: int,
        row: int,
        acc: list[list[Var]],
        mask: Value | None,
    ) -> None:
        """Multiply `count` lines into the accumulators; `words` holds rows of `row` elements, one per query head."""
        f, tiles = k.f, self.tiles
        for u in range(count):
            offset = u * k.layout.line_bytes
            if ahead is not None and self.fetch_every and offset % self.fetch_every == 0:
                f.prefetch(ahead.at(offset), k.tuning.cache_level)
            for j, factor in enumerate(tiles.factors(f, lines.at(offset), mask)):
                number = u * tiles.words_per_line + j
                for g, ways in enumerate(acc):
                    word = f.load(tiles.word_kind, words, number * 4 + g * row * tiles.weight_bytes)
                    way = ways[number % len(ways)]
                    way.set(tiles.mac(way.get(), factor, word))

    def store_weights(self, k: Frame, g: Value, weights: list[Value]) -> None:
        size = self.tiles.weight_bytes
        for t, e in enumerate(weights):
            self.tiles.store_weights(k.f, e, self.p.at(g * (k.page * size) + t * LANES * size))

    def values(self, k: Frame, here: Value, ahead: Ahead | None, edge: Edge | None) -> None:
        f, n = k.f, k.layout.per_lane
        r0, r1 = f.const(I64, 0), f.const(I64, k.page // n)
        if edge is not None:
            r0, r1 = edge[0] // n, (edge[1] + (n - 1)) // n
        for number, block in enumerate(self.blocks):
            self._block_values(k, here.at(k.layout.k_bytes), ahead if number == 0 else None, r0, r1, block, edge)

    def _block_values(
        self,
        k: Frame,
        values: Value,
        ahead: Ahead | None,
        r0: Value,
        r1: Value,
        block: tuple[int, int],
        edge: Edge | None,
    ) -> None:
        f, tiles, (g0, count) = k.f, self.tiles, block
        ways, unroll = max(1, min(4, 8 // count)), 4 if edge is None else 1
        weights = self.p.at(g0 * k.page * tiles.weight_bytes)
        with f.loop(0, k.chunks) as c:
            state = k.o.at(c * 64 + g0 * k.dim * 4)
            acc = [_resumed(f, state, g * k.dim * 4, ways) for g in range(count)]
            source = column_source(k, ahead, c)
            with f.loop(r0, r1, unroll) as r:
                at = c * k.column_bytes + r * k.layout.line_bytes
                words = weights.at(r * (tiles.words_per_line * 4))
                mask = None if edge is None else k.layout.kind.mask(r, edge)
                self._walk(
                    k, values.at(at), None if source is None else source.at(at), words, unroll, k.page, acc, mask
                )
            for g in range(count):
                f.store(total_of(acc[g]), state, g * k.dim * 4)


def tiles_of(k: Frame, edge: Edge | None) -> tuple[Value, Value]:
    """Tiles of 16 positions that hold an allowed one: the first, and one past the last."""
    if edge is None:
        return k.f.const(I64, 0), k.f.const(I64, k.page // LANES)
    return edge[0] // LANES, (edge[1] + (LANES - 1)) // LANES


def column_source(k: Frame, ahead: Ahead | None, c: Value) -> Value | None:
    """Where column `c` of V fetches from (offsets are those of the block in hand)."""
    return None if ahead is None else (c < (k.chunks + 1) // 2).select(*ahead)


def _resumed(f: Function, state: Value, offset: int, ways: int) -> list[Var]:
    """Accumulators of which the first goes on from memory."""
    return [f.var(V16F, f.load(V16F, state, offset)), *(f.var(V16F, 0.0) for _ in range(ways - 1))]
