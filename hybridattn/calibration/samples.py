"""From timed ops to samples of a profile's tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridattn.core.op import CPU, D2H, GPU, H2D, Work
from hybridattn.cost.table import Sample

AXES = {
    f"{GPU}/linear": ("rows",),
    f"{GPU}/head": ("rows",),
    f"{GPU}/other": ("rows",),
    f"{GPU}/decode_attention": ("rows", "kv_per_row"),
    f"{GPU}/prefill_attention": ("flops",),
    f"{CPU}/decode_attention": ("rows", "kv_per_row"),
    f"{D2H}/copy": ("num_bytes",),
    f"{H2D}/copy": ("num_bytes",),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """An op that ran: its lane, its work, how long it took, and how late it began.

    ``late_ns`` counts from when it could have begun: submitted, all that it comes after ended, its lane free.
    ``woke_ns`` is how long after its end the driver, which waited for it, went on (None: it did not wait for it).
    """

    lane: str
    layer: int
    work: Work
    took_ns: int
    late_ns: int = 0
    woke_ns: int | None = None


def samples_of(timed: Sequence[Timed]) -> list[Sample]:
    """Samples of the ops whose work is of one kind, and of the head: what the last layer takes beyond a middle one."""
    found: list[Sample] = []
    linear: dict[int, list[int]] = {}
    for t in timed:
        if t.work.kind == "linear":
            linear.setdefault(t.work.rows, []).append(t.took_ns)
    for t in timed:
        work = t.work
        if f"{t.lane}/{work.kind}" in AXES:
            found.append(Sample(t.lane, work.kind, work.rows, work.kv_tokens, work.flops, work.num_bytes, t.took_ns))
        elif work.kind == "together" and t.lane == GPU and work.kv_tokens == 0 and work.rows in linear:
            rest = max(1, t.took_ns - round(statistics.median(linear[work.rows])))
            kind = "head" if t.layer >= 0 else "other"
            part = next(p for p in work.parts if p.kind == kind)  # type: ignore[attr-defined]
            found.append(Sample(GPU, kind, part.rows, 0, part.flops, part.num_bytes, rest))
    return found


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    """One sample for each point: the median of what was measured there."""
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    for s in samples:
        groups.setdefault((s.lane, s.kind, s.rows, s.kv_tokens, s.flops, s.num_bytes), []).append(s)
    return [replace(g[0], took_ns=round(statistics.median(s.took_ns for s in g))) for g in groups.values()]


def handovers(timed: Sequence[Timed]) -> dict[str, tuple[int, ...]]:
    """How late ops begin on each lane [ns], and how late a waiting driver goes on (``wake``): nine values, the
    means of the ninths of the sorted times.

    A lane is a thread that has to be woken, or runs Python between two ops; none of it is part of any op's own time.
    Nine values, because what two threads do at about the same time is decided by how these times vary; means, because
    the rare long ones count in a throughput, and no quantile up to the ninth decile sees them.
    """
    late: dict[str, list[int]] = {"wake": [t.woke_ns for t in timed if t.woke_ns is not None]}
    for t in timed:
        late.setdefault(t.lane, []).append(max(0, t.late_ns))
    return {name: _ninths(values) for name, values in late.items()}


def _ninths(values: Sequence[int]) -> tuple[int, ...]:
    """Means of nine equal parts of the sorted values: their mean is that of all."""
    ordered = sorted(values or (0,)) if len(values) >= 9 else sorted(list(values or (0,)) * 9)
    ends = [i * len(ordered) // 9 for i in range(10)]
    return tuple([round(statistics.fmean(ordered[a:b])) for a, b in zip(ends, ends[1:], strict=False)])
