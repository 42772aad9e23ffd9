"""What ran at the same time: hidden CPU attention, GPU bubbles, copies, polls, layers per step, stretch.

    gpu.compute    |####|####|      |####|          bubble: idle between the first and the last span
    cpu.attention     |##########|                  overlap: the part of it under which gpu.compute runs

Everything is a pure function of spans and step records. Definitions: ``docs/metrics.md``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridattn.core.device import Span
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D
from hybridattn.core.records import StepRecord
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


def layers_per_step(steps: Sequence[StepRecord]) -> float | None:
    """Mean number of layers that a micro-batch advances per step (*a*): layers advanced over micro-batches in flight.

    Steps counted are those with GPU rows or prefill tokens; rounds of detours without them are left out. ``None`` when
    no micro-batch was in flight. One-layer overlap gives ``L / (L + 1)`` (``docs/crossover.md``).
    """
    counted = [p for p in steps if p.gpu_rows > 0 or p.prefill_tokens > 0]
    micro_batches = sum(p.micro_batches for p in counted)
    return sum(p.layers_advanced for p in counted) / micro_batches if micro_batches else None


def stretch(steps: Sequence[StepRecord], alone_ns: int | None = None) -> float | None:
    """By which fraction (*d*) a decode step with micro-batches takes longer than one without.

    Parameters
    ----------
    steps : sequence of StepRecord
        Steps with prefill or without GPU rows are left out.
    alone_ns : int, optional
        Duration of a step of the same GPU rows without micro-batches. Without it, steps of this run that had no
        micro-batch and the same number of GPU rows serve as the comparison.

    Returns
    -------
    float or None
        ``sum(T with micro_batches) / sum(T without) - 1``; ``None`` when there is nothing to compare.
    """
    if alone_ns is not None and alone_ns <= 0:
        raise InputError(f"alone_ns must be positive, got {alone_ns}")
    alone: dict[int, list[int]] = defaultdict(list)
    mixed: dict[int, list[int]] = defaultdict(list)
    for p in steps:
        if p.gpu_rows > 0 and p.prefill_tokens == 0:
            (mixed if p.micro_batches else alone)[p.gpu_rows].append(p.end_ns - p.start_ns)
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
    steps: int
    polls_made: int
    polls_hit: int
    polls_missed: int
    joins: int
    skips: int
    waits: int
    detours: int
    layers_per_step: float | None
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
    steps: Sequence[StepRecord], spans: Sequence[Span], alone_ns: int | None = None
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
        steps=len(steps),
        polls_made=sum(p.polls_made for p in steps),
        polls_hit=sum(p.polls_hit for p in steps),
        polls_missed=sum(p.polls_missed for p in steps),
        joins=sum(p.joins for p in steps),
        skips=sum(p.skips for p in steps),
        waits=sum(p.waits for p in steps),
        detours=sum(p.detours for p in steps),
        layers_per_step=layers_per_step(steps),
        stretch=stretch(steps, alone_ns),
    )
