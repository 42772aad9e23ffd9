"""Writing one token's K and V into a page, and reading them back: the scalar side of the layout."""

from __future__ import annotations

from cpu_kernels.codegen.convert import bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16
from cpu_kernels.codegen.emit import Function, Module
from cpu_kernels.codegen.tiles import element_shift, load_as_f32, store_from_f32
from cpu_kernels.codegen.values import F32, I8, I16, I32, I64, PTR, Value, vec
from cpu_kernels.layout import LANES, Layout


class RowCodec:
    """Emits the transfer of one row (token and KV head) between a plain vector and a page block.

    Parameters
    ----------
    f : Function
        Where the code goes; two small stack buffers are taken from it once.
    layout : Layout
        The page's layout.
    level : str
        ISA level (fp16 conversions differ).
    """

    def __init__(self, f: Function, layout: Layout, level: str) -> None:
        self.f, self.layout, self.level = f, layout, level
        self._row = f.buffer(layout.head_dim * 4)

    def _places(self, block: Value, offset: Value) -> tuple[tuple[Value, int], tuple[Value, int]]:
        """Return (address of dim 0, bytes to the next line of dims) of K and of V for a token at `offset`."""
        n, size, dim = self.layout.per_lane, self.layout.element_bytes, self.layout.head_dim
        tile, lane = offset // LANES, offset % LANES
        k = block.at(tile * (LANES * dim * size) + lane * (n * size))
        v = block.at((offset // n) * (LANES * n * size) + (offset % n) * size + self.layout.k_bytes)
        return (k, LANES * n * size), (v, self.layout.page_size // n * LANES * n * size)

    def _scale_at(self, block: Value, offset: Value, which: int) -> Value:
        return block.at(offset * 4 + (2 * self.layout.k_bytes + which * 4 * self.layout.page_size))

    def _element(self, place: tuple[Value, int], which: int, d: Value) -> Value:
        """Address of element `d`: a line of K holds n dims of a token, a line of V holds 16."""
        base, stride = place
        n, size = self.layout.per_lane, self.layout.element_bytes
        if which == 0:
            return base.at((d // n) * stride + (d % n) * size)
        return base.at((d // LANES) * stride + (d % LANES) * (n * size))

    def write(self, block: Value, offset: Value, k: Value, v: Value, code: Value) -> None:
        """Convert the plain rows at `k` and `v` (run-time type `code`) and write them as token `offset`."""
        places = self._places(block, offset)
        for which, source in enumerate((k, v)):
            self._widen(source, code)
            if self.layout.dtype == "int8":
                self._write_int8(places[which], which, self._scale_at(block, offset, which))
            else:
                self._write_float(places[which], which)

    def _widen(self, source: Value, code: Value) -> None:
        f, shift = self.f, element_shift(code)
        with f.loop(0, self.layout.head_dim, LANES) as d:
            x = load_as_f32(f, source.at(d << shift), code, LANES, self.level)
            f.store(x, self._row, d * 4)

    def _write_float(self, place: tuple[Value, int], which: int) -> None:
        f, dtype = self.f, self.layout.dtype
        with f.loop(0, self.layout.head_dim) as d:
            where = self._element(place, which, d)
            one = f.load(vec(1, F32), self._row, d * 4)
            if dtype == "bf16":
                one = f32_to_bf16(one)
            elif dtype == "fp16":
                one = f32_to_f16(one, self.level)
            f.store(one, where)

    def _write_int8(self, place: tuple[Value, int], which: int, scale_at: Value) -> None:
        """scale = max|x| / 127 without a floor; codes round to nearest even, an all-zero row has scale 0."""
        f = self.f
        peak = f.var(F32, 0.0)
        with f.loop(0, self.layout.head_dim) as d:
            a = f.call(F32, "llvm.fabs.f32", f.load(F32, self._row, d * 4))
            now = peak.get()
            peak.set((a > now).select(a, now))
        scale = peak.get() / 127.0
        f.store(scale, scale_at)
        inverse = (scale > 0.0).select(127.0 / peak.get(), 0.0)
        with f.loop(0, self.layout.head_dim) as d:
            x = f.call(F32, "llvm.rint.f32", f.load(F32, self._row, d * 4) * inverse)
            f.store(x.cast("fptosi", I32).cast("trunc", I8), self._element(place, which, d))

    def read(self, block: Value, offset: Value, k: Value, v: Value, code: Value) -> None:
        """Write token `offset` of a page to the plain rows at `k` and `v` (run-time type `code`)."""
        f, shift = self.f, element_shift(code)
        places = self._places(block, offset)
        for which, target in enumerate((k, v)):
            scale = None
            if self.layout.dtype == "int8":
                scale = f.load(F32, self._scale_at(block, offset, which))
            with f.loop(0, self.layout.head_dim) as d:
                f.store(self._read_element(self._element(places[which], which, d), scale), self._row, d * 4)
            with f.loop(0, self.layout.head_dim, LANES) as d:
                x = f.load(vec(LANES, F32), self._row, d * 4)
                store_from_f32(f, x, target.at(d << shift), code, LANES, self.level)

    def _read_element(self, where: Value, scale: Value | None) -> Value:
        f, dtype = self.f, self.layout.dtype
        if dtype == "fp32":
            return f.load(F32, where)
        if scale is not None:
            return f.load(I8, where).cast("sitofp", F32) * scale
        bits = f.load(I16, where).bits(vec(1, I16))
        return (bf16_to_f32(bits) if dtype == "bf16" else f16_to_f32(bits, self.level)).bits(F32)


def build_moves(layout: Layout, level: str) -> str:
    """Return IR of ``append`` and ``gather`` for one layout.

    ``append(base, page_bytes, heads, slots, n, k, k_row, k_head, v, v_row, v_head, code)`` writes row i to slot
    ``slots[i]`` (skipped when negative). ``gather(base, page_bytes, heads, pages, n, k, ..., code)`` reads token i from
    page ``pages[i / page_size]``. Strides are bytes.
    """
    module = Module()
    args = (PTR, I64, I64, PTR, I64, PTR, I64, I64, PTR, I64, I64, I64)
    for name in ("append", "gather"):
        f = module.function(name, args)
        base, page_bytes, heads, slots, n, k, k_row, k_head, v, v_row, v_head, code = f.args
        codec = RowCodec(f, layout, level)
        with f.loop(0, n) as i:
            slot = _slot_of(f, name, slots, i, layout)
            with f.when(slot >= 0):
                page = base.at((slot // layout.page_size) * page_bytes)
                offset = slot % layout.page_size
                with f.loop(0, heads) as h:
                    block = page.at(h * layout.head_bytes)
                    rows = k.at(i * k_row + h * k_head), v.at(i * v_row + h * v_head)
                    transfer = codec.write if name == "append" else codec.read
                    transfer(block, offset, *rows, code)
    return module.text()


def _slot_of(f: Function, name: str, slots: Value, i: Value, layout: Layout) -> Value:
    if name == "append":
        return f.load(I64, slots, i * 8)
    page = f.load(I64, slots, (i // layout.page_size) * 8)
    return page * layout.page_size + i % layout.page_size
