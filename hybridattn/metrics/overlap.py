"""What ran at the same time: hidden CPU attention, GPU bubbles, copies, polls, layers per iteration, stretch.

    gpu.compute    |####|####|      |####|          bubble: idle between the first and the last span
    cpu.attention     |##########|                  overlap: the part of it under which gpu.compute runs

Everything is a pure function of spans and pass records. Definitions: ``docs/metrics.md``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridattn.core.device import Span
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D
from hybridattn.core.records import PassRecord
from hybridattn.core.trace import overlap_ns


def lane_spans(spans: Iterable[Span], lane: str) -> list[Span]:
    """The spans of ``lane`` by start time."""
    return sorted((s for s in spans if s.lane == lane), key=lambda s: (s.start_ns, s.end_ns))


def busy_ns(spans: Iterable[Span]) -> int:
    """Length of the union of the spans' intervals: time covered twice counts once."""
    total, covered = 0, None
    for s in sorted(spans, key=lambda s: s.start_ns):
        start = s.start_ns if covered is None else max(s.start_ns, covered)
        total += max(0, s.end_ns - start)
        covered = s.end_ns if covered is None else max(covered, s.end_ns)
    return total


def overlap_fraction(spans: Sequence[Span]) -> float | None:
    """Share of the ``cpu.attention`` time during which ``gpu.compute`` runs; ``None`` without CPU attention time."""
    cpu = lane_spans(spans, CPU)
    total = sum(s.duration_ns for s in cpu)
    return overlap_ns(cpu, lane_spans(spans, GPU)) / total if total else None


def gpu_bubble_ns(spans: Sequence[Span]) -> int | None:
    """Time ``gpu.compute`` is idle between the start of its first span and the end of its last; ``None`` without."""
    gpu = lane_spans(spans, GPU)
    if not gpu:
        return None
    return max(s.end_ns for s in gpu) - gpu[0].start_ns - busy_ns(gpu)


def layers_per_iteration(passes: Sequence[PassRecord]) -> float | None:
    """Mean number of layers that a cohort advances per iteration (*a*): layers advanced over cohorts in flight.

    Iterations are passes with GPU rows or prefill tokens; rounds of detours without them are left out. ``None`` when
    no cohort was in flight. One-layer overlap gives ``L / (L + 1)`` (``docs/crossover.md``).
    """
    counted = [p for p in passes if p.gpu_rows > 0 or p.prefill_tokens > 0]
    cohorts = sum(p.cohorts for p in counted)
    return sum(p.layers_advanced for p in counted) / cohorts if cohorts else None


def stretch(passes: Sequence[PassRecord], alone_ns: int | None = None) -> float | None:
    """By which fraction (*d*) a decode pass with cohorts takes longer than one without.

    Parameters
    ----------
    passes : sequence of PassRecord
        Passes with prefill or without GPU rows are left out.
    alone_ns : int, optional
        Duration of a pass of the same GPU rows without cohorts. Without it, passes of this run that had no cohort and
        the same number of GPU rows serve as the comparison.

    Returns
    -------
    float or None
        ``sum(T with cohorts) / sum(T without) - 1``; ``None`` when there is nothing to compare.
    """
    if alone_ns is not None and alone_ns <= 0:
        raise InputError(f"alone_ns must be positive, got {alone_ns}")
    alone: dict[int, list[int]] = defaultdict(list)
    mixed: dict[int, list[int]] = defaultdict(list)
    for p in passes:
        if p.gpu_rows > 0 and p.prefill_tokens == 0:
            (mixed if p.cohorts else alone)[p.gpu_rows].append(p.end_ns - p.start_ns)
    took = expected = 0.0
    for rows, durations in mixed.items():
        if alone_ns is None and not alone[rows]:
            continue
        took += sum(durations)
        expected += len(durations) * (alone_ns if alone_ns is not None else sum(alone[rows]) / len(alone[rows]))
    return took / expected - 1 if expected > 0 else None


@dataclass(frozen=True, slots=True)
class OverlapSummary:
    """Overlap of a run. Times in nanoseconds; fractions in [0, 1]; ``None`` where there is nothing to divide."""

    overlap_fraction: float | None
    cpu_busy_ns: int
    gpu_busy_ns: int
    gpu_bubble_ns: int | None
    d2h_bytes: int
    h2d_bytes: int
    d2h_busy_ns: int
    h2d_busy_ns: int
    passes: int
    polls_made: int
    polls_hit: int
    polls_missed: int
    joins: int
    skips: int
    waits: int
    detours: int
    layers_per_iteration: float | None
    stretch: float | None

    @property
    def gpu_bubble_fraction(self) -> float | None:
        """Bubble time over the time from the first to the last span of ``gpu.compute``."""
        if self.gpu_bubble_ns is None or self.gpu_bubble_ns + self.gpu_busy_ns == 0:
            return None
        return self.gpu_bubble_ns / (self.gpu_bubble_ns + self.gpu_busy_ns)

    @property
    def poll_hit_fraction(self) -> float | None:
        return self.polls_hit / self.polls_made if self.polls_made else None


def summarize_overlap(
    passes: Sequence[PassRecord], spans: Sequence[Span], alone_ns: int | None = None
) -> OverlapSummary:
    """All of the above for one run; ``alone_ns`` as in ``stretch``."""
    lanes = {lane: lane_spans(spans, lane) for lane in (GPU, CPU, D2H, H2D)}
    return OverlapSummary(
        overlap_fraction=overlap_fraction(spans),
        cpu_busy_ns=busy_ns(lanes[CPU]),
        gpu_busy_ns=busy_ns(lanes[GPU]),
        gpu_bubble_ns=gpu_bubble_ns(spans),
        d2h_bytes=sum(s.num_bytes for s in lanes[D2H]),
        h2d_bytes=sum(s.num_bytes for s in lanes[H2D]),
        d2h_busy_ns=busy_ns(lanes[D2H]),
        h2d_busy_ns=busy_ns(lanes[H2D]),
        passes=len(passes),
        polls_made=sum(p.polls_made for p in passes),
        polls_hit=sum(p.polls_hit for p in passes),
        polls_missed=sum(p.polls_missed for p in passes),
        joins=sum(p.joins for p in passes),
        skips=sum(p.skips for p in passes),
        waits=sum(p.waits for p in passes),
        detours=sum(p.detours for p in passes),
        layers_per_iteration=layers_per_iteration(passes),
        stretch=stretch(passes, alone_ns),
    )
