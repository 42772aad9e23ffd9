"""The running softmax: one update of (m, l, o) per page, in base 2 (``exp(x) = 2**(x log2 e)``)."""

from __future__ import annotations

from cpu_kernels.codegen.convert import LOG2E, exp2, max_over_lanes, tanh
from cpu_kernels.codegen.frame import MINUS_INF, Frame
from cpu_kernels.codegen.lines import Edge, PageMath
from cpu_kernels.codegen.tiles import V16F
from cpu_kernels.codegen.values import F32, I32, PTR, Value
from cpu_kernels.layout import LANES


def shape_scores(k: Frame) -> None:
    """Apply scale, soft cap and ALiBi to the page's scores in place; leaves base-2 scores."""
    f = k.f
    query = (k.seq_len - 1).cast("trunc", I32).splat(LANES)
    with f.loop(0, k.group) as g:
        slope = f.var(F32, 0.0)
        with f.when(k.alibi.ne(0)):
            slopes = (k.alibi + k.seq * k.alibi_row).cast("inttoptr", PTR)
            slope.set(f.load(F32, slopes, (k.head * k.group + g) * 4))
        with f.loop(0, k.page, LANES) as at:
            where = k.s.at((g * k.page + at) * 4)
            x = f.var(V16F, f.load(V16F, where) * k.sm_scale.splat(LANES))
            with f.when(k.soft_cap.ne(0.0)):
                cap = k.soft_cap.splat(LANES)
                x.set(tanh(x.get() / cap) * cap)
            position = k.iota() + (k.start + at).cast("trunc", I32).splat(LANES)
            bias = (position - query).cast("sitofp", V16F) * slope.get().splat(LANES)
            f.store((x.get() + bias) * LOG2E, where)


def update(k: Frame, math: PageMath, edge: Edge | None) -> None:
    """Turn the page's scores into weights (exactly 0 where masked) and bring m, l and o up to date."""
    f = k.f
    with f.when(k.shaped):
        shape_scores(k)
    keep, scale = _keep(k, edge), k.scale2.splat(LANES)
    with f.loop(0, k.group) as g:
        xs = []
        for t in range(k.page // LANES):
            x = f.load(V16F, k.s, g * (k.page * 4) + t * 64) * scale
            xs.append(keep[t].select(x, MINUS_INF) if keep else x)
        base = _raise_maximum(k, g, xs)
        weights = [exp2(x - base) for x in xs]
        total = weights[0]
        for e in weights[1:]:
            total = total + e
        f.store(f.load(V16F, k.l, g * 64) + total, k.l, g * 64)
        math.store_weights(k, g, _scaled(k, weights, keep))


def _keep(k: Frame, edge: Edge | None) -> list[Value]:
    """Masks of the allowed positions, one per 16; none for a whole page."""
    if edge is None:
        return []
    low, high = (x.cast("trunc", I32).splat(LANES) for x in edge)
    places = [k.iota() + t * LANES for t in range(k.page // LANES)]
    return [(x >= low) & (x < high) for x in places]


def _scaled(k: Frame, weights: list[Value], keep: list[Value]) -> list[Value]:
    """The weights carry V's scales (int8, fp8), which may be garbage where masked."""
    if not k.layout.kind.limit:
        return weights
    out = [e * k.f.load(V16F, k.scales, 4 * k.page + t * 64) for t, e in enumerate(weights)]
    return [m.select(e, 0.0) for m, e in zip(keep, out, strict=True)] if keep else out


def _raise_maximum(k: Frame, g: Value, xs: list[Value]) -> Value:
    """Raise m[g] to the page's maximum, rescaling l and o when it grew; return it, safe to subtract, in lanes."""
    f = k.f
    top = max_over_lanes(*xs)
    before = f.load(F32, k.m, g * 4)
    with f.when(top > before):
        shrink = exp2((before - top).splat(LANES))
        f.store(top, k.m, g * 4)
        f.store(f.load(V16F, k.l, g * 64) * shrink, k.l, g * 64)
        for c in range(k.chunks):
            where = k.o.at(g * (k.dim * 4) + c * 64)
            f.store(f.load(V16F, where) * shrink, where)
    now = f.load(F32, k.m, g * 4)
    # Every score so far may be -inf: subtract 0 then, so that the weights are 0 and not NaN.
    return now.eq(MINUS_INF).select(f.const(F32, 0.0), now).splat(LANES)
