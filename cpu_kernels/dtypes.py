"""K,V dtypes: each is one class that says everything the package needs to know of it, in NumPy and in generated code.

| dtype | element | in a 32-bit lane | scale per token and head | multiplied as |
|---|---|---|---|---|
| ``fp32`` | float32 | 1 | | float32 |
| ``bf16`` | upper half of a float32 | 2 | | bf16 pairs where the level has them |
| ``fp16`` | IEEE half | 1 (16-bit lanes) | | float32 |
| ``int8`` | code times scale | 4 | max / 127 | bytes where the level has them |
| ``fp8`` | OCP E4M3 times scale | 4 | max / 448, rounded up to 2**n | bf16 pairs, else float32 |

One more is a subclass of `KVDtype` and a call of `register` (`docs/extend.md` shows it). Names starting with ``f`` are
functions under construction; ``x``, ``bits`` are values of generated code, see `cpu_kernels.codegen.emit`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from cpu_kernels import isa
from cpu_kernels.arrays import from_bf16, to_bf16
from cpu_kernels.codegen import convert
from cpu_kernels.codegen.fields import Code
from cpu_kernels.codegen.values import F32, I8, I16, I32, Value, lanes_of, vec

LANES = 16
LARGEST = 448 * 2.0**119  # with the largest scale, the largest code is a float32 still


class KVDtype:
    """What a K,V dtype is. The defaults are those of plain float32.

    Attributes
    ----------
    name : str
    element_bytes, per_lane : int
        Bytes of a stored element; elements that share a lane of a line (`cpu_kernels.layout`).
    element : type
        NumPy type of a stored element.
    limit : float
        Largest code of a dtype with a scale per token and KV head; 0: it has none.
    bytes_dot : bool
        Codes are signed bytes that the byte dot product multiplies exactly.
    pairs_order : tuple of int
        Positions, within a lane, of the elements that `pairs` puts next to each other; empty: not multiplied as bf16.
    """

    name: ClassVar[str] = "fp32"
    element_bytes: ClassVar[int] = 4
    per_lane: ClassVar[int] = 1
    element: ClassVar[type] = np.float32
    limit: ClassVar[float] = 0.0
    bytes_dot: ClassVar[bool] = False
    pairs_order: ClassVar[tuple[int, ...]] = ()
    stored_as: ClassVar[Code | None] = Code.FP32  # rows of this type are stored as they are, but for `quiet`
    # 16-bit types of rows for which `narrow_short` serves, and the bits of their largest |x|, from least to most.
    short_peaks: ClassVar[dict[Code, tuple[int, int]]] = {}

    # ------------------------------------------------------------------ in NumPy
    def scales_of(self, x: np.ndarray) -> np.ndarray | None:
        """Scales float32 ``[...]`` of the rows ``[..., head_dim]``, None without `limit`. A NaN counts as nothing."""
        if not self.limit:
            return None
        return (np.fmax.reduce(np.abs(x), -1, initial=0) / np.float32(self.limit)).astype(np.float32)

    def encode(self, x: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
        """Stored elements of float32 ``[..., head_dim]``, rounded to nearest even."""
        return x

    def decode(self, stored: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
        """float32 values of stored elements ``[..., head_dim]`` (and scales ``[...]``)."""
        wide = self.values(stored)
        return wide if scales is None or not self.limit else wide * scales[..., None]

    def values(self, stored: np.ndarray) -> np.ndarray:
        """float32 of stored elements, without their scale."""
        return stored.astype(np.float32)

    # ------------------------------------------------------------------ in generated code: a row
    def scale(self, peak: Value) -> Value:
        """Scale of a row whose largest magnitude is `peak` (scalar float)."""
        return peak / self.limit

    def factor(self, peak: Value, scale: Value) -> Value | None:
        """What `narrow` gets, computed once a row (scalar float); None without `limit`."""
        return None

    def narrow(self, x: Value, factor: Value | None, level: str) -> Value:
        """Stored elements of float lanes, rounded to nearest even."""
        return x

    def narrow_fp16(self, x: Value, level: str) -> Value:
        """The same of float lanes that were fp16, so that no lane is subnormal (asked for without `limit`)."""
        return self.narrow(x, None, level)

    def narrow_short(self, x: Value, code: Code, scale: Value) -> Value:
        """The same of 16-bit elements ``<n x i16>`` of a type in `short_peaks`, without the way over floats."""
        raise NotImplementedError(f"{self.name} has no short way from {code.name}")

    def quiet(self, stored: Value) -> Value:
        """What rows of type `stored_as` become: their NaNs are quiet."""
        return stored

    def widen(self, stored: Value, level: str) -> Value:
        """Float lanes of stored elements, without their scale."""
        return stored

    @property
    def kind(self) -> str:
        """LLVM type of a stored element."""
        return F32

    # ------------------------------------------------------------------ in generated code: a line of 16 lanes
    @property
    def line_kind(self) -> str:
        """LLVM type that a line is loaded as."""
        return vec(LANES, self.kind if self.per_lane == 1 else I32)

    def factors(self, line: Value, level: str) -> list[Value]:
        """The line as `per_lane` float vectors, in the order of the elements in a lane."""
        return [self.widen(line, level)]

    def pairs(self, line: Value) -> list[Value]:
        """The line as vectors of bf16 pairs, exactly (asked for where `multiplies_pairs`)."""
        raise NotImplementedError(f"{self.name} is not multiplied as bf16 pairs")

    def multiplies_pairs(self, level: str, extras: tuple[str, ...]) -> bool:
        """Whether lines are multiplied by the bf16 dot product on a level whose processor has `extras`."""
        return bool(self.pairs_order) and level in ("avx512_bf16", "amx_bf16")

    def extras(self, level: str) -> tuple[str, ...]:
        """Instruction sets beyond the level's that this processor has and the dtype uses, by LLVM's names."""
        return ()

    def mask(self, row: Value, edge: tuple[Value, Value]) -> Value | None:
        """Bits of row `row` of V that belong to positions ``edge[0] <= p < edge[1]``; None where none need clearing.

        A slot outside may hold NaN, which must not meet its weight 0. Rows of one position hold no other.
        """
        if self.per_lane == 1:
            return None
        bits = row.fn.const(I32, 0)
        for j in range(self.per_lane):
            size = 32 // self.per_lane
            inside = (row * self.per_lane + j >= edge[0]) & (row * self.per_lane + j < edge[1])
            ones = ((1 << size) - 1) << (size * j)
            bits = bits | inside.select(row.fn.const(I32, ones - (2**32 if ones >> 31 else 0)), 0)
        return bits.splat(LANES)


class Bf16(KVDtype):
    name, element_bytes, per_lane, element, pairs_order = "bf16", 2, 2, np.uint16, (0, 1)
    kind, stored_as = I16, Code.BF16

    def encode(self, x: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
        return to_bf16(x)

    def values(self, stored: np.ndarray) -> np.ndarray:
        return from_bf16(stored)

    def narrow(self, x: Value, factor: Value | None, level: str) -> Value:
        return convert.f32_to_bf16(x)

    def narrow_fp16(self, x: Value, level: str) -> Value:
        return convert.normal_to_bf16(x, level)

    def quiet(self, stored: Value) -> Value:
        return ((stored & 0x7FFF) > 0x7F80).select(stored | 0x40, stored)

    def widen(self, stored: Value, level: str) -> Value:
        return convert.bf16_to_f32(stored)

    def factors(self, line: Value, level: str) -> list[Value]:
        wide = vec(LANES, F32)
        return [(line << 16).bits(wide), (line & (0xFFFF0000 - 2**32)).bits(wide)]

    def pairs(self, line: Value) -> list[Value]:
        return [line]

    def mask(self, row: Value, edge: tuple[Value, Value]) -> Value | None:
        low, high = edge
        even = (row * 2 >= low).select(row.fn.const(I32, 0xFFFF), 0)
        odd = (row * 2 + 1 < high).select(row.fn.const(I32, -65536), 0)
        return (even | odd).splat(LANES)


class Fp16(KVDtype):
    name, element_bytes, element = "fp16", 2, np.float16
    kind, stored_as = I16, None

    def encode(self, x: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
        with np.errstate(over="ignore"):
            return x.astype(np.float16)

    def narrow(self, x: Value, factor: Value | None, level: str) -> Value:
        return convert.f32_to_f16(x, level)

    def widen(self, stored: Value, level: str) -> Value:
        return convert.f16_to_f32(stored, level)


class Int8(KVDtype):
    """``code = round(x * 127 / max|x|)``; no floor, a row of zeros has scale 0."""

    name, element_bytes, per_lane, element = "int8", 1, 4, np.int8
    limit, bytes_dot = 127.0, True
    kind, stored_as = I8, None

    def encode(self, x: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
        peak = np.fmax.reduce(np.abs(x), -1, initial=0)[..., None]
        inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak / np.float32(127) > 0)
        return np.rint(x * inverse).astype(np.int8)

    def factor(self, peak: Value, scale: Value) -> Value | None:
        return (scale > 0.0).select(127.0 / peak, 0.0)

    def narrow(self, x: Value, factor: Value | None, level: str) -> Value:
        assert factor is not None
        n = lanes_of(x.kind)
        whole = x.fn.call(x.kind, f"llvm.rint.{convert.suffix(x.kind)}", x * factor.splat(n))
        return whole.cast("fptosi", vec(n, I32)).cast("trunc", vec(n, I8))

    def widen(self, stored: Value, level: str) -> Value:
        return stored.cast("sitofp", vec(lanes_of(stored.kind), F32))

    def factors(self, line: Value, level: str) -> list[Value]:
        return [(line << (24 - 8 * j)).ashr(24).cast("sitofp", vec(LANES, F32)) for j in range(4)]

    def mask(self, row: Value, edge: tuple[Value, Value]) -> Value | None:
        return None  # no code is a NaN


class Fp8(KVDtype):
    """OCP E4M3: 4 bits of exponent, 3 of mantissa, largest 448, NaN but no infinity; ``code = e4m3(x / scale)``.

    The conversion saturates and keeps NaN. The scale is the smallest power of two that brings max|x| to 448 at most: a
    floating-point code is no coarser for it, dividing and multiplying by it is exact, and so are softmax weights that
    carry it. It lies between 2**-126 and 2**119, so an infinity comes back as 448 * 2**119.
    """

    name, element_bytes, per_lane, element = "fp8", 1, 4, np.uint8
    limit, pairs_order = 448.0, (0, 2, 1, 3)
    kind, stored_as = I8, None
    short_peaks = {Code.BF16: (0x0A80, 0x7F60), Code.FP16: (1, 0x7BFF)}  # 2**-106 to 448 * 2**119; what is finite

    def scales_of(self, x: np.ndarray) -> np.ndarray | None:
        peak = np.minimum(np.fmax.reduce(np.abs(x), -1, initial=0), np.float32(LARGEST))
        bits = (peak / np.float32(self.limit)).astype(np.float32).view(np.uint32)
        return ((bits + np.uint32(0x7FFFFF)) & np.uint32(0xFF800000)).view(np.float32)

    def encode(self, x: np.ndarray, scales: np.ndarray | None = None) -> np.ndarray:
        assert scales is not None
        with np.errstate(over="ignore", invalid="ignore"):
            return to_e4m3(x / np.where(scales > 0, scales, 1)[..., None].astype(np.float32))

    def values(self, stored: np.ndarray) -> np.ndarray:
        return E4M3[stored]

    def scale(self, peak: Value) -> Value:
        bits = ((peak < LARGEST).select(peak, LARGEST) / self.limit).bits(I32)
        return ((bits + 0x7FFFFF) & (0xFF800000 - 2**32)).bits(F32)

    def factor(self, peak: Value, scale: Value) -> Value | None:
        return (scale > 0.0).select(1.0 / scale, 1.0)

    def narrow(self, x: Value, factor: Value | None, level: str) -> Value:
        assert factor is not None
        return convert.f32_to_e4m3(x * factor.splat(lanes_of(x.kind)))

    def narrow_short(self, x: Value, code: Code, scale: Value) -> Value:
        return convert.short_to_e4m3(x, code is Code.FP16, scale)

    def widen(self, stored: Value, level: str) -> Value:
        return convert.e4m3_to_f32(stored.cast("zext", vec(lanes_of(stored.kind), I32)))

    def factors(self, line: Value, level: str) -> list[Value]:
        return [convert.e4m3_to_f32((line >> (8 * j)) & 0xFF) for j in range(4)]

    def multiplies_pairs(self, level: str, extras: tuple[str, ...]) -> bool:
        return level == "amx_bf16" or (level == "avx512_bf16" and bool(extras))

    def extras(self, level: str) -> tuple[str, ...]:
        """The table of `pairs` needs VBMI: part of Sapphire Rapids and Zen 4, not of Cooper Lake."""
        return ("avx512vbmi",) if level == "avx512_bf16" and "avx512vbmi" in isa.cpu_flags() else ()

    def pairs(self, line: Value) -> list[Value]:
        """Look both bytes of the bf16 up in tables of 128: exact, subnormals and NaN included."""
        low, high = (convert.lookup128(line, x) for x in (E4M3_BF16 & 0xFF, E4M3_BF16 >> 8))
        high = high | (line & (0x80808080 - 2**32))
        even, odd = 0x00FF00FF, 0xFF00FF00 - 2**32
        return [(low & even) | ((high << 8) & odd), ((low >> 8) & even) | (high & odd)]


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Round float32 to OCP E4M3 codes (uint8): ties to even, saturating at 448, NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    size = bits & np.uint32(0x7FFFFFFF)
    normal = ((size + np.uint32(0x7FFFF) + ((size >> 20) & 1)) >> 20).astype(np.int64) - (120 << 3)
    small = (size.view(np.float32) + np.float32(16384)).view(np.uint32).astype(np.int64) - 0x46800000
    code = np.minimum(np.where(size < 0x3C800000, small, normal), 0x7E)
    return np.where(size > 0x7F800000, 0x7F, code).astype(np.uint8) | (bits >> 24 & 0x80).astype(np.uint8)


def _e4m3_values() -> np.ndarray:
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[127] = np.nan
    return np.concatenate([value, -value]).astype(np.float32)


E4M3 = _e4m3_values()  # float32 value of each code
E4M3_BF16 = to_bf16(E4M3[:128])  # bf16 bits of each code without its sign: every value is one exactly

KINDS: dict[str, KVDtype] = {}


def register(kind: KVDtype) -> KVDtype:
    """Make a dtype known by its name to `KVPages` and everything that is generated.

    Raises
    ------
    ValueError
        If the name is taken by another class, or the elements do not fill lanes of 32 bits (16 for one of two bytes).
    """
    taken = KINDS.get(kind.name)
    if taken is not None and type(taken) is not type(kind):
        raise ValueError(f"dtype {kind.name!r} is {type(taken).__name__} already")
    if kind.element_bytes * kind.per_lane not in (2, 4) or kind.per_lane not in (1, 2, 4):
        raise ValueError(
            f"dtype {kind.name!r} has {kind.per_lane} elements of {kind.element_bytes} bytes in a lane; 1, 2 or 4 "
            "elements must fill 4 bytes, or one 2"
        )
    KINDS[kind.name] = kind
    return kind


for _kind in (KVDtype(), Bf16(), Fp16(), Int8(), Fp8()):
    register(_kind)


def kind_of(name: Any) -> KVDtype:
    """Look a dtype up by its name.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if name not in KINDS:
        raise ValueError(f"dtype {name!r} of the KV pages is unknown; known: {', '.join(KINDS)}")
    return KINDS[name]
