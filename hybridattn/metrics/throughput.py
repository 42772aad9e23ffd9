"""Throughput over a window of time, the steady-state window, and goodput.

Rule for a window: *events* (a token, a completion) count by their own time; *latencies* count only for requests that
lie wholly inside, so that one which merely touches the window (arrived during warm-up, or ended in the tail) is out.

    time            |<------ window ------>|
    A      #######                                 outside: nothing counts
    B           ####|####                          across: its tokens inside count, its latency does not
    C               |   #########          |       inside: all counts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hybridattn.core.errors import InputError
from hybridattn.core.records import RequestRecord
from hybridattn.metrics.latency import Slo, completed


@dataclass(frozen=True, slots=True)
class Window:
    """The half-open time ``(start_ns, end_ns]``: an event at the start belongs to what was before."""

    start_ns: int
    end_ns: int

    def __post_init__(self) -> None:
        if self.end_ns < self.start_ns:
            raise InputError(f"window ends at {self.end_ns} ns, before its start {self.start_ns} ns")

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def holds(self, time_ns: int) -> bool:
        """The event at ``time_ns`` belongs to the window."""
        return self.start_ns < time_ns <= self.end_ns


@dataclass(frozen=True, slots=True)
class Throughput:
    """What completed requests produced in ``duration_ns``; rates are ``None`` for a window without duration.

    ``prompt_tokens`` of a request count at its first output token, when their prefill was done.
    """

    duration_ns: int
    requests: int
    prompt_tokens: int
    output_tokens: int

    def _rate(self, count: int) -> float | None:
        return count * 1e9 / self.duration_ns if self.duration_ns > 0 else None

    @property
    def requests_per_s(self) -> float | None:
        return self._rate(self.requests)

    @property
    def output_tokens_per_s(self) -> float | None:
        return self._rate(self.output_tokens)

    @property
    def total_tokens_per_s(self) -> float | None:
        return self._rate(self.prompt_tokens + self.output_tokens)


def whole_run(records: Sequence[RequestRecord]) -> Window | None:
    """From the first arrival to the last end, failures included; ``None`` without records."""
    if not records:
        return None
    return Window(min(r.arrival_ns for r in records), max(r.end_ns for r in records))


def steady_window(records: Sequence[RequestRecord], low: float = 0.3, high: float = 0.7) -> Window | None:
    """From the end of the request at share ``low`` of the completions to the one at share ``high``.

    This leaves out the start burst and the thin tail (NEO's evaluation takes 0.3 and 0.7). A share that rounds down to
    no completion starts at the first arrival. ``None`` when there are too few completions to tell start from end.
    """
    if not 0 <= low < high <= 1:
        raise InputError(f"steady window needs 0 <= low < high <= 1, got low {low}, high {high}")
    ends = sorted(r.end_ns for r in completed(records))
    first, last = int(low * len(ends)), int(high * len(ends))
    if last < 1:
        return None
    start_ns = ends[first - 1] if first else min(r.arrival_ns for r in records)
    return Window(start_ns, ends[last - 1]) if ends[last - 1] > start_ns else None


def inside(records: Sequence[RequestRecord], window: Window) -> list[RequestRecord]:
    """The requests that arrived and ended within the window; an arrival exactly at its start is inside."""
    return [r for r in records if window.start_ns <= r.arrival_ns and r.end_ns <= window.end_ns]


def without_first(records: Sequence[RequestRecord], fraction: float) -> list[RequestRecord]:
    """The records without the given share of the earliest arrivals (NEO's load figure drops the first quarter)."""
    if not 0 <= fraction < 1:
        raise InputError(f"fraction must be in [0, 1), got {fraction}")
    ordered = sorted(records, key=lambda r: r.arrival_ns)
    return ordered[int(fraction * len(ordered)) :]


def throughput(records: Sequence[RequestRecord], window: Window | None = None) -> Throughput | None:
    """Events of completed requests in ``window``; by default all of them over the whole run.

    Tokens of failed requests are no output: a system must not look fast by failing late.
    """
    span = window or whole_run(records)
    if span is None:
        return None
    done = completed(records)
    if window is None:
        prompt, output = sum(r.prompt_tokens for r in done), sum(r.output_tokens for r in done)
        return Throughput(span.duration_ns, len(done), prompt, output)
    times = np.fromiter(chain.from_iterable(r.token_ns for r in done), dtype=np.int64)
    return Throughput(
        duration_ns=span.duration_ns,
        requests=sum(window.holds(r.end_ns) for r in done),
        prompt_tokens=sum(r.prompt_tokens for r in done if window.holds(r.token_ns[0])),
        output_tokens=int(np.count_nonzero((times > window.start_ns) & (times <= window.end_ns))),
    )


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met all objectives: ``met`` of ``counted`` (failed and empty ones included in ``counted``)."""

    met: int
    counted: int
    requests_per_s: float | None

    @property
    def attainment(self) -> float | None:
        """Share of all requests that met the objectives; ``None`` without requests."""
        return self.met / self.counted if self.counted else None


def goodput(records: Sequence[RequestRecord], slo: Slo, window: Window | None = None) -> Goodput:
    """Requests that ended in ``window`` (default: all, over the whole run) and met every objective."""
    span = window or whole_run(records)
    if span is None:
        return Goodput(0, 0, None)
    counted = [r for r in records if window is None or window.holds(r.end_ns)]
    met = sum(slo.met_by(r) for r in counted)
    return Goodput(met, len(counted), met * 1e9 / span.duration_ns if span.duration_ns > 0 else None)
