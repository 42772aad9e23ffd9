"""The tile interface of the ISA levels: how one line of K or V meets the queries or weights of a group.

A line holds 16 lanes of ``n`` elements (see `cpu_kernels.layout`). `Tiles` says how it is loaded and multiplied:

- `WideTiles` widens a line to ``n`` float vectors and uses fused multiply-adds with float32 queries and weights; plain
  vector IR, so it is right on every level and LLVM cuts the vectors to the target's width.
- `DotTiles` feeds lines as bf16 pairs to the AVX-512 BF16 dot product; queries and weights are bf16 pairs.

A *word* is one 4-byte factor that is spread over the lanes: a float32, or a pair of bf16.
"""

from __future__ import annotations

from cpu_kernels.codegen.convert import bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, fma
from cpu_kernels.codegen.emit import Function
from cpu_kernels.codegen.values import F32, I16, I32, Value, vec
from cpu_kernels.layout import Layout

V16F, V16I = vec(16, F32), vec(16, I32)


class WideTiles:
    """Lines widened to float32."""

    def __init__(self, layout: Layout, level: str) -> None:
        self.layout, self.level = layout, level
        self.words_per_line = layout.per_lane
        self.word_kind = F32
        # A bf16 line is used as two float vectors; more queries than this per line spill on narrow registers.
        self.max_group = {"avx2": 4, "portable": 2}.get(level, 8)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one stored query element or weight."""
        return 4

    def factors(self, f: Function, line: Value, mask: Value | None = None) -> list[Value]:
        """Load a line and return what is multiplied: one vector per word. `mask` clears bits of 32-bit lanes."""
        x = f.load(self.layout.kind.line_kind, line)
        return self.layout.kind.factors(x if mask is None else x & mask, self.level)

    def mac(self, acc: Value, factor: Value, word: Value) -> Value:
        """``acc + factor * word`` with the word spread over the lanes."""
        return fma(factor, word.splat(16), acc)

    def store_weights(self, f: Function, x: Value, where: Value) -> None:
        """Store 16 float32 query elements or softmax weights in the form `mac` reads."""
        f.store(x, where)


def dot_bf16(acc: Value, line: Value, word: Value) -> Value:
    """``acc`` plus, in every lane, the dot product of the line's bf16 pair with the pair in `word`."""
    pairs = vec(32, "bfloat")
    return acc.fn.call(V16F, "llvm.x86.avx512bf16.dpbf16ps.512", acc, line.bits(pairs), word.splat(16).bits(pairs))


class DotTiles:
    """Lines as bf16 pairs and the 512-bit dot product of pairs; one instruction is 32 multiply-adds."""

    def __init__(self, layout: Layout, level: str) -> None:
        self.layout, self.level = layout, level
        self.words_per_line = layout.per_lane // 2
        self.word_kind = I32
        self.max_group = 8

    @property
    def weight_bytes(self) -> int:
        return 2

    def factors(self, f: Function, line: Value, mask: Value | None = None) -> list[Value]:
        x = f.load(V16I, line)
        return self.layout.kind.pairs(x if mask is None else x & mask)

    def mac(self, acc: Value, factor: Value, word: Value) -> Value:
        return dot_bf16(acc, factor, word)

    def store_weights(self, f: Function, x: Value, where: Value) -> None:
        half, order = vec(16, "bfloat"), self.layout.kind.pairs_order
        y = f.call(half, "llvm.x86.avx512bf16.cvtneps2bf16.512", x)
        if order != tuple(range(len(order))):
            listed = ", ".join(f"i32 {base + i}" for base in range(0, 16, len(order)) for i in order)
            y = f.let(half, f"shufflevector {half} {y.name}, {half} poison, {vec(16, I32)} <{listed}>")
        f.store(y, where)


Tiles = WideTiles | DotTiles


def load_as_f32(f: Function, pointer: Value, code: Value, lanes: int, level: str) -> Value:
    """Load `lanes` elements whose type is known at run time (`fields.Code`) and widen them to float32."""
    out = f.var(vec(lanes, F32), 0.0)
    with f.either(code.eq(0)) as is_fp32:
        out.set(f.load(vec(lanes, F32), pointer))
        is_fp32.otherwise()
        bits = f.load(vec(lanes, I16), pointer)
        with f.either(code.eq(1)) as is_bf16:
            out.set(bf16_to_f32(bits))
            is_bf16.otherwise()
            out.set(f16_to_f32(bits, level))
    return out.get()


def store_from_f32(f: Function, x: Value, pointer: Value, code: Value, lanes: int, level: str) -> None:
    """Store float32 lanes as the run-time element type `code`."""
    with f.either(code.eq(0)) as is_fp32:
        f.store(x, pointer)
        is_fp32.otherwise()
        with f.either(code.eq(1)) as is_bf16:
            f.store(f32_to_bf16(x), pointer)
            is_bf16.otherwise()
            f.store(f32_to_f16(x, level), pointer)


def element_shift(code: Value) -> Value:
    """log2 of the element size of a run-time type."""
    return code.eq(0).select(code.fn.const(code.kind, 2), 1)
