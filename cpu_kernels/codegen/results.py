"""From the running state to results: normalise and write a row, or save a split and let its last finisher merge."""

from __future__ import annotations

from cpu_kernels.codegen.convert import LN2, LOG2E, exp2, fma, log2, sum_over_lanes, vmax
from cpu_kernels.codegen.fields import Item, Job
from cpu_kernels.codegen.frame import MINUS_INF, Frame
from cpu_kernels.codegen.tiles import V16F, element_shift, store_from_f32
from cpu_kernels.codegen.values import F32, I64, PTR, Value
from cpu_kernels.layout import LANES


def finish(k: Frame, item: Value) -> None:
    f = k.f
    splits = k.item(item, Item.NUM_SPLITS)
    with f.either(splits.eq(1)) as alone:
        with f.loop(0, k.group) as g:
            write(k, g, f.load(F32, k.m, g * 4), mass_of(k, g), k.o.at(g * (k.dim * 4)))
        alone.otherwise()
        finish_part(k, k.item(item, Item.PARTIAL), k.item(item, Item.SPLIT), splits)


def finish_part(k: Frame, first: Value, split: Value, splits: Value) -> None:
    """Save one of several parts of a row; whoever saves the last one merges them."""
    f = k.f
    save_partial(k, first + split)
    counter = k.pointer(Job.COUNTERS).at((k.seq * k.heads + k.head) * 8)
    before = f.let(I64, f"atomicrmw add ptr {counter.name}, i64 1 acq_rel")
    with f.when((before + 1).eq(splits)):
        f.store(f.const(I64, 0), counter)
        with f.loop(0, k.group) as g:
            merge(k, g, first, splits)


def mass_of(k: Frame, g: Value) -> Value:
    """Add up the lanes of a query head's running sum."""
    return sum_over_lanes(k.f.load(V16F, k.l, g * 64))


def partial(k: Frame, slot: Value, g: Value) -> Value:
    index = (slot * k.heads + k.head) * k.group + g
    return k.pointer(Job.PARTIALS).at(index * ((k.dim + LANES) * 4))


def save_partial(k: Frame, slot: Value) -> None:
    f = k.f
    with f.loop(0, k.group) as g:
        where = partial(k, slot, g)
        for c in range(k.chunks):
            f.store(f.load(V16F, k.o, g * (k.dim * 4) + c * 64), where, c * 64)
        f.store(f.load(F32, k.m, g * 4), where, k.dim * 4)
        f.store(mass_of(k, g), where, k.dim * 4 + 4)


def merge(k: Frame, g: Value, first: Value, splits: Value) -> None:
    f = k.f
    top = f.var(F32, MINUS_INF)
    with f.loop(0, splits) as i:
        m = f.load(F32, partial(k, first + i, g), k.dim * 4)
        top.set(vmax(top.get(), m))
    base = top.get().eq(MINUS_INF).select(f.const(F32, 0.0), top.get())
    total, o = f.var(F32, 0.0), k.o
    for c in range(k.chunks):
        f.store(f.const(V16F, 0.0), o, c * 64)
    with f.loop(0, splits) as i:
        part = partial(k, first + i, g)
        weight = exp2(f.load(F32, part, k.dim * 4) - base)
        total.set(fma(f.load(F32, part, k.dim * 4 + 4), weight, total.get()))
        for c in range(k.chunks):
            wide = weight.splat(LANES)
            f.store(fma(f.load(V16F, part, c * 64), wide, f.load(V16F, o, c * 64)), o, c * 64)
    write(k, g, top.get(), total.get(), o)


def write(k: Frame, g: Value, m: Value, total: Value, o: Value) -> None:
    """Normalise one query head and write out and lse; an empty key set gives 0 and -inf."""
    f = k.f
    q_head = k.head * k.group + g
    empty = total.eq(0.0)
    top, mass, shrink = f.var(F32, m), f.var(F32, total), f.var(F32, 1.0)
    with f.when(k.sinks.ne(0) & empty.eq(0)):
        sink = f.load(F32, (k.sinks + k.seq * k.sinks_row).cast("inttoptr", PTR), q_head * 4) * LOG2E
        now = vmax(m, sink)
        shrink.set(exp2(m - now))
        mass.set(fma(total, shrink.get(), exp2(sink - now)))
        top.set(now)
    inverse = empty.select(f.const(F32, 0.0), shrink.get() / mass.get()).splat(LANES)
    code = k.word(Job.OUT_CODE)
    row = k.pointer(Job.OUT).at(k.seq * k.word(Job.OUT_ROW) + q_head * k.word(Job.OUT_HEAD))
    shift = element_shift(code)
    with f.loop(0, k.dim, LANES) as d:
        x = f.load(V16F, o, d * 4) * inverse
        store_from_f32(f, x, row.at(d << shift), code, LANES, k.level)
    with f.when(k.word(Job.LSE).ne(0)):
        value = (top.get() + log2(mass.get())) * LN2
        lse = empty.select(f.const(F32, MINUS_INF), value)
        f.store(lse, k.pointer(Job.LSE), k.seq * k.word(Job.LSE_ROW) + q_head * 4)
