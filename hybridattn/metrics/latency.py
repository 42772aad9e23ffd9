"""Latencies of requests: TTFT, TPOT, ITL, E2EL, and their distributions.

    arrival      scheduled      first token     token 2   token 3        end
    |--- queue ---|-- prefill --|               |         |              |
    |---------- TTFT -----------|----- ITL -----|-- ITL --|
    |                           |---------------- TPOT * (n - 1) --------|
    |------------------------------- E2EL -------------------------------|

A value that does not exist is ``None``, never 0 and never NaN. Definitions and units: ``docs/metrics.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hybridattn.core.errors import InputError
from hybridattn.core.records import RequestRecord


def ttft_ns(record: RequestRecord) -> int | None:
    """Time to first token, ``token_ns[0] - arrival_ns``; ``None`` for a request without output."""
    return record.token_ns[0] - record.arrival_ns if record.token_ns else None


def tpot_ns(record: RequestRecord) -> int | None:
    """Time per output token after the first, ``(end_ns - token_ns[0]) / (n - 1)``; ``None`` for n < 2."""
    n = record.output_tokens
    return round((record.end_ns - record.token_ns[0]) / (n - 1)) if n >= 2 else None


def itl_ns(record: RequestRecord) -> tuple[int, ...]:
    """Inter-token latencies, the ``n - 1`` gaps between consecutive tokens; empty for n < 2."""
    return tuple(b - a for a, b in zip(record.token_ns, record.token_ns[1:], strict=False))


def e2el_ns(record: RequestRecord) -> int:
    """End-to-end latency, ``end_ns - arrival_ns``."""
    return record.end_ns - record.arrival_ns


def queue_ns(record: RequestRecord) -> int | None:
    """Time before the scheduler first took the request; ``None`` if it never did."""
    return None if record.scheduled_ns is None else record.scheduled_ns - record.arrival_ns


def per_token_ns(record: RequestRecord) -> int | None:
    """End-to-end latency per output token, ``E2EL / n`` (the ordinate of NEO's load figure); ``None`` for n = 0."""
    return round(e2el_ns(record) / record.output_tokens) if record.token_ns else None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of ``count`` samples, in nanoseconds (linear interpolation, rounded to 1 ns)."""

    count: int
    mean_ns: int
    median_ns: int
    p90_ns: int
    p99_ns: int
    max_ns: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"a distribution needs at least one sample, got {self.count}; none is None")


def distribution(samples: Iterable[int | None]) -> Distribution | None:
    """The distribution of ``samples`` [ns], missing ones left out; ``None`` when none is left."""
    values = np.fromiter((s for s in samples if s is not None), dtype=np.int64)
    if values.size == 0:
        return None
    median, p90, p99 = (round(float(p)) for p in np.percentile(values, (50, 90, 99)))
    return Distribution(int(values.size), round(float(values.mean())), median, p90, p99, int(values.max()))


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objectives in nanoseconds; ``None`` sets none. A latency that is missing violates nothing."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None
    e2el_ns: int | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ns", "tpot_ns", "e2el_ns"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InputError(f"slo {name} must be positive, got {value}")

    def met_by(self, record: RequestRecord) -> bool:
        """All objectives are met. The request must have completed with at least one token (see ``completed``)."""
        if not is_completed(record):
            return False
        pairs = (
            (ttft_ns(record), self.ttft_ns),
            (tpot_ns(record), self.tpot_ns),
            (e2el_ns(record), self.e2el_ns),
        )
        return all(value is None or limit is None or value <= limit for value, limit in pairs)


def is_completed(record: RequestRecord) -> bool:
    """Finished by ``stop`` or ``length`` with at least one token. Zero-token answers are ``empty``, not completed."""
    return not record.failed and record.output_tokens > 0


def completed(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The records that latency is computed over."""
    return [r for r in records if is_completed(r)]


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Latency of the completed requests. ``failed`` and ``empty`` (no token) are counted apart, never averaged in."""

    completed: int
    failed: int
    empty: int
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2el: Distribution | None
    queue: Distribution | None
    per_token: Distribution | None


def summarize(records: Sequence[RequestRecord]) -> LatencySummary:
    """Summary over ``records``; restrict them first (``throughput.inside``) to leave out a warm-up."""
    done = completed(records)
    failed = sum(r.failed for r in records)
    return LatencySummary(
        completed=len(done),
        failed=failed,
        empty=len(records) - len(done) - failed,
        ttft=distribution(map(ttft_ns, done)),
        tpot=distribution(map(tpot_ns, done)),
        itl=distribution(chain.from_iterable(map(itl_ns, done))),
        e2el=distribution(map(e2el_ns, done)),
        queue=distribution(map(queue_ns, done)),
        per_token=distribution(map(per_token_ns, done)),
    )
