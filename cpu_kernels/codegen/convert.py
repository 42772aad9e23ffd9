"""Conversions between float32 and the 16-bit and 8-bit formats, in vectors of any width, rounding to nearest even.

The integer forms keep subnormals and NaNs (a NaN never becomes an infinity), on every level alike; only the fp16 pair
uses the processor's instructions where the level has them, which round the same way.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from cpu_kernels.codegen.values import F32, I8, I16, I32, Value, lanes_of, vec
from cpu_kernels.jit import SUM_FLAGS

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
HARDWARE_HALF = ("amx_bf16", "avx512_bf16", "avx512", "avx2")


def bf16_to_f32(x: Value) -> Value:
    """Widen ``<n x i16>`` bf16 bits to ``<n x float>``, exactly."""
    n = lanes_of(x.kind)
    return (x.cast("zext", vec(n, I32)) << 16).bits(vec(n, F32))


def f32_to_bf16(x: Value) -> Value:
    """Round ``<n x float>`` to bf16 bits ``<n x i16>``, ties to even; NaN stays NaN (quiet)."""
    n = lanes_of(x.kind)
    u = x.bits(vec(n, I32))
    rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    quiet = (u >> 16) | 0x40
    return x.ne(x).select(quiet, rounded).cast("trunc", vec(n, I16))


def normal_to_bf16(x: Value, level: str) -> Value:
    """The same of lanes none of which is subnormal: one instruction where the level has it."""
    n = lanes_of(x.kind)
    if level not in ("amx_bf16", "avx512_bf16") or n != 16:
        return f32_to_bf16(x)
    return x.fn.call(vec(n, "bfloat"), "llvm.x86.avx512bf16.cvtneps2bf16.512", x).bits(vec(n, I16))


def f16_to_f32(x: Value, level: str) -> Value:
    """Widen ``<n x i16>`` fp16 bits to ``<n x float>``, exactly."""
    n = lanes_of(x.kind)
    if level in HARDWARE_HALF:
        return x.bits(vec(n, "half")).cast("fpext", vec(n, F32))
    h = x.cast("zext", vec(n, I32))
    magnitude = h & 0x7FFF
    shifted = magnitude << 13
    finite = shifted.bits(vec(n, F32)) * 2.0**112  # re-biases the exponent; exact for subnormals too
    special = (magnitude > 0x7BFF).select(shifted | 0x7F800000, finite.bits(vec(n, I32)))
    return (special | ((h & 0x8000) << 16)).bits(vec(n, F32))


def f32_to_f16(x: Value, level: str) -> Value:
    """Round ``<n x float>`` to fp16 bits ``<n x i16>``, ties to even; overflow gives infinity."""
    n = lanes_of(x.kind)
    if level in HARDWARE_HALF:
        return x.cast("fptrunc", vec(n, "half")).bits(vec(n, I16))
    u = x.bits(vec(n, I32))
    a = u & 0x7FFFFFFF
    normal = (a + (0xC8000FFF - 2**32) + ((a >> 13) & 1)) >> 13
    # Adding 0.5 makes the unit place of the sum the smallest fp16 subnormal, so the adder does the rounding.
    small = (a.bits(vec(n, F32)) + 0.5).bits(vec(n, I32)) - 0x3F000000
    bits = (a < 0x38800000).select(small, normal)
    bits = (a > 0x477FEFFF).select(x.fn.const(vec(n, I32), 0x7C00), bits)
    bits = (a > 0x7F800000).select(((a >> 13) | 0x7E00) & 0x7FFF, bits)
    return (bits | ((u >> 16) & 0x8000)).cast("trunc", vec(n, I16))


def e4m3_to_f32(u: Value) -> Value:
    """Widen OCP E4M3 codes, one in the low byte of each lane ``<n x i32>``, to ``<n x float>``, exactly."""
    kind = like(u.kind, F32)
    size = u & 0x7F
    # Exponent 0 reads as (1 + m/8) 2**-7 at first; the number meant is m/8 2**-6.
    first = ((size << 20) + 0x3C000000).bits(kind)
    finite = (size < 8).select(first * 2.0 - 2.0**-6, first).bits(u.kind)
    return (size.eq(0x7F).select(u.fn.const(u.kind, 0x7FC00000), finite) | ((u & 0x80) << 24)).bits(kind)


def f32_to_e4m3(x: Value) -> Value:
    """Round ``<n x float>`` to OCP E4M3 codes ``<n x i8>``: ties to even, saturating at 448, NaN stays NaN."""
    n = lanes_of(x.kind)
    u = x.bits(vec(n, I32))
    a = u & 0x7FFFFFFF
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - (120 << 3)
    # The unit place of a sum with 2**14 is the smallest subnormal, so the adder does the rounding.
    small = (a.bits(vec(n, F32)) + 16384.0).bits(vec(n, I32)) - 0x46800000
    code = (a < 0x3C800000).select(small, normal)
    code = (code > 0x7E).select(x.fn.const(vec(n, I32), 0x7E), code)
    code = (a > 0x7F800000).select(x.fn.const(vec(n, I32), 0x7F), code)
    return (code | ((u >> 24) & 0x80)).cast("trunc", vec(n, I8))


def short_to_e4m3(x: Value, is_fp16: bool, scale: Value) -> Value:
    """Round bf16 or fp16 bits ``<n x i16>`` over `scale`, a power of two, to OCP E4M3 codes ``<n x i8>``, ties to even.

    For finite values whose quotient is 448 at most: bf16 under scales from 2**-115 on, below which subnormals would
    count, and fp16 that are normal (no 0). In 16-bit arithmetic: half the instructions of the way over float32.
    """
    fn, n = x.fn, lanes_of(x.kind)
    size = x & 0x7FFF
    # Seven bits of mantissa decide if the last one says that something was cut off: nothing but a tie is a tie then.
    short = (((size & 7) + 7) | size) >> 3 if is_fp16 else size
    # Re-biased: exponent 1 is E4M3's smallest normal, 2**-6.
    bias = (((119 if is_fp16 else 7) - (scale.bits(I32) >> 23)) << 7).cast("trunc", I16).splat(n)
    t = short + bias
    wide = t << 5  # 4 bits of exponent, 12 of mantissa; what is smaller is shifted until its exponent is 1 as well
    # Counts above 15 give 0; those of normal numbers, which are "negative", are not asked for.
    small = fn.call(x.kind, f"llvm.x86.avx512.psrlv.w.{16 * n}", (wide & 0xFE0) | 0x1000, 1 - t.ashr(7))
    wide = (t > 0x7F).select(wide, small)
    code = (wide + 0xFF + ((wide >> 9) & 1)) >> 9
    return (code | ((x >> 8) & 0x80)).cast("trunc", vec(n, I8))


def lookup128(index: Value, table: np.ndarray) -> Value:
    """Replace each byte of 16 32-bit lanes by the entry of `table` ``[128]`` that its low seven bits name (VBMI)."""
    kind = vec(64, I8)
    halves = (
        Value(index.fn, kind, "<" + ", ".join(f"i8 {int(b)}" for b in part) + ">") for part in (table[:64], table[64:])
    )
    low, high = halves
    return index.fn.call(kind, "llvm.x86.avx512.vpermi2var.qi.512", low, index.bits(kind), high).bits(index.kind)


def like(kind: str, element: str) -> str:
    """Type with the shape of `kind` and another element."""
    return vec(lanes_of(kind), element) if kind.startswith("<") else element


def fma(a: Value, b: Value, c: Value) -> Value:
    """``a * b + c``, fused where the target has it (a level always gives the same bits)."""
    return a.fn.call(a.kind, f"llvm.fmuladd.{suffix(a.kind)}", a, b, c)


def suffix(kind: str) -> str:
    """Intrinsic suffix of a float type: ``f32`` or ``v16f32``."""
    n = lanes_of(kind)
    return "f32" if not kind.startswith("<") else f"v{n}f32"


def vmax(a: Value, b: Value) -> Value:
    """Lane-wise maximum by compare and select (one instruction on x86)."""
    return (a > b).select(a, b)


def max_over_lanes(*vectors: Value) -> Value:
    """Largest lane of all vectors, by halves; no floating-point flags, so NaN and infinities keep their meaning."""
    x = reduce(vmax, vectors)
    lanes = lanes_of(x.kind)
    while lanes > 1:
        half = lanes // 2
        low, high = (
            x.fn.let(
                vec(half, F32),
                f"shufflevector {x.kind} {x.name}, {x.kind} poison, {vec(half, I32)} "
                f"<{', '.join(f'i32 {first + i}' for i in range(half))}>",
            )
            for first in (0, half)
        )
        x, lanes = vmax(low, high), half
    return x.lane(0)


def sum_over_lanes(x: Value) -> Value:
    """Sum of the lanes of a float vector, as a tree (always the same one)."""
    zero = x.fn.const(F32, 0.0)
    return x.fn.call(F32, f"llvm.vector.reduce.fadd.{suffix(x.kind)}", zero, x, flags=SUM_FLAGS)


# 2**f on [-0.5, 0.5], degree 6, weighted least squares driven to the minimax; largest relative error 1e-08.
EXP2 = (1.53659101e-04, 1.33981579e-03, 9.61838197e-03, 5.55033386e-02, 2.40226477e-01, 6.93147182e-01, 1.0)


def exp2(x: Value) -> Value:
    """``2**x`` for x <= 0 in vectors; exactly 0 below -126 and for -inf (a masked weight must vanish); NaN of NaN."""
    fn, kind = x.fn, x.kind
    ints = like(kind, I32)
    magic = 12582912.0  # 1.5 * 2**23: the sum's low mantissa bits are the rounded integer
    shifted = x + magic
    f = x - (shifted - magic)
    p = fn.const(kind, EXP2[0])
    for c in EXP2[1:]:
        p = fma(p, f, fn.const(kind, c))
    power = ((shifted.bits(ints) + 127) << 23).bits(kind)
    return (x <= -126.0).select(fn.const(kind, 0.0), p * power)


def log2(x: Value) -> Value:
    """``log2(x)`` of a positive scalar float (libm; once per row)."""
    return x.fn.call(F32, "llvm.log2.f32", x)


def tanh(x: Value) -> Value:
    """Hyperbolic tangent to about 1e-7 relative: its series near 0, the exponential form elsewhere."""
    fn, kind = x.fn, x.kind
    a = fn.call(kind, f"llvm.fabs.{suffix(kind)}", x)
    e = exp2(a * (-2 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    square = a * a
    series = fn.const(kind, 62 / 2835)
    for c in (-17 / 315, 2 / 15, -1 / 3, 1.0):
        series = fma(series, square, fn.const(kind, c))
    size = (a < 0.25).select(series * a, far)
    return fn.call(kind, f"llvm.copysign.{suffix(kind)}", size, x)
