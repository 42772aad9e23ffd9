"""Spans from futures that were timed by two clocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridattn.core.device import Span
from hybridattn.core.op import CPU, LANES

_EVENT_NS = 2_000  # resolution of GPU events, twice


def spans_of(futures: Sequence[Any], spread_ns: int) -> list[Span]:
    """Spans by start, from ended futures in order of submission.

    An op never starts before what it waits for has ended, but the two clocks agree only up to ``spread_ns``: a start
    that lies before by no more than that is put right. A larger gap stays and is seen by ``core.trace.violations``.
    """
    spans = []
    for lane in LANES:
        members = [t for t in futures if t.op.lane == lane]
        if lane == CPU:
            members.sort(key=lambda t: t.end_ns)  # priorities decide the order, not submission
        spans += _lane(members, 2 * spread_ns + _EVENT_NS)
    return sorted(spans, key=lambda s: s.start_ns)


def _lane(members: Sequence[Any], slack: int) -> list[Span]:
    spans, free = [], 0
    for t in members:
        start, end = _lift(t.start_ns, t.ready_ns, slack), t.end_ns
        if t.op.lane == CPU:  # workers go on to the next job while the last chunks of the one before are still running
            start = max(start, min(free, end))
        else:
            start = _lift(start, free, _EVENT_NS)
        free = end = max(start, end)
        work = t.op.work
        spans.append(Span(t.op.lane, t.op.name, start, end, t.op.layer, work.rows, work.num_bytes, t.ready_ns))
    return spans


def _lift(start: int, floor: int, slack: int) -> int:
    return floor if floor - slack <= start < floor else start
