"""How much of a run the CPU does and how much the GPU ("14 % / 86 %"), by three stated calibres.

- *busy time*: the union of the intervals in which a processor runs anything (all GPU lanes together, so that a copy
  beside a kernel counts once);
- *work*: bytes that ``cpu.attention`` and ``gpu.compute`` read and write (copies are moves, not work, and are out);
- *operator time*: the durations of all ops added up, overlapping ones counted in full, with the driver's own stages
  (tokenise, schedule, detokenise) on the CPU's side: what an operator-level profiler adds up.

Each can be told per phase (prefill, first token, decode); operator time also per stage.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hybridattn.core.device import Span
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, GPU_LANES, H2D
from hybridattn.core.records import RequestRecord, StepRecord
from hybridattn.metrics.overlap import busy_ns

PHASES = ("prefill", "first_token", "decode")
HOST_STAGES = ("tokenise", "schedule", "detokenise")
LANE_STAGES = ("copy", "linear", "attention", "sample", "other")
STAGES = HOST_STAGES + LANE_STAGES

_WORDS = {
    "attention": "attention",
    "linear": "linear",
    "embed": "linear",
    "head": "linear",
    "sample": "sample",
    "merge": "attention",
}


def stage_of(span: Span) -> str:
    """The stage of a span: its lane decides for copies and CPU attention, the first known word of its name else."""
    if span.lane in (D2H, H2D):
        return "copy"
    if span.lane == CPU:
        return "attention"
    for word in re.split(r"[^a-z]+", span.name.lower()):
        if word in _WORDS:
            return _WORDS[word]
    return "other"


@dataclass(frozen=True, slots=True)
class Share:
    """The two sides of one calibre, in its unit (ns or bytes)."""

    cpu: int
    gpu: int

    def __post_init__(self) -> None:
        if self.cpu < 0 or self.gpu < 0:
            raise InputError(f"a share has no negative side, got cpu {self.cpu}, gpu {self.gpu}")

    @property
    def cpu_fraction(self) -> float | None:
        """``cpu / (cpu + gpu)``; ``None`` when both are 0."""
        total = self.cpu + self.gpu
        return self.cpu / total if total else None


@dataclass(frozen=True, slots=True)
class Shares:
    """One set of spans by the three calibres, and the operator time per stage [ns]."""

    busy_time: Share
    work: Share
    operator_time: Share
    stage_ns: tuple[tuple[str, int], ...]


def shares(spans: Sequence[Span], host_stage_ns: Mapping[str, int] | None = None) -> Shares:
    """The three calibres over ``spans``.

    Parameters
    ----------
    host_stage_ns : mapping, optional
        Time [ns] that the driver itself spent per stage of ``HOST_STAGES``; it is no span of a lane. Without it the
        operator time holds the lanes only, and ``stage_ns`` leaves those stages out.
    """
    stages = dict.fromkeys(LANE_STAGES if host_stage_ns is None else STAGES, 0)
    for name, value in (host_stage_ns or {}).items():
        if name not in HOST_STAGES or value < 0:
            raise InputError(
                f"host_stage_ns['{name}'] = {value}: the stages are {', '.join(HOST_STAGES)}, at least 0 ns"
            )
        stages[name] = value
    host = sum(stages.values())
    for s in spans:
        stages[stage_of(s)] += s.duration_ns
    cpu = [s for s in spans if s.lane == CPU]
    gpu = [s for s in spans if s.lane in GPU_LANES]
    work_gpu = sum(s.num_bytes for s in gpu if s.lane == GPU)
    return Shares(
        busy_time=Share(busy_ns(cpu), busy_ns(gpu)),
        work=Share(sum(s.num_bytes for s in cpu), work_gpu),
        operator_time=Share(sum(s.duration_ns for s in cpu) + host, sum(s.duration_ns for s in gpu)),
        stage_ns=tuple(stages.items()),
    )


def step_phases(steps: Sequence[StepRecord], requests: Iterable[RequestRecord]) -> list[tuple[int, str]]:
    """When each phase begins: ``(start_ns, phase)`` per step, in time order.

    A step lasts until the next one begins. It is ``first_token`` when a request got its first token in it, else
    ``prefill`` when it carried prompt tokens, else ``decode``.
    """
    ordered = sorted(steps, key=lambda p: p.start_ns)
    starts = [p.start_ns for p in ordered]
    # A token known exactly when the next step begins belongs to the step that made it.
    firsts = {bisect_right(starts, r.token_ns[0] - 1) - 1 for r in requests if r.token_ns}
    return [
        (p.start_ns, "first_token" if i in firsts else "prefill" if p.prefill_tokens else "decode")
        for i, p in enumerate(ordered)
    ]


def by_phase(spans: Iterable[Span], marks: Sequence[tuple[int, str]]) -> dict[str, list[Span]]:
    """Spans cut at the phase marks of ``step_phases``; bytes are divided in proportion to time.

    What runs before the first mark belongs to the first phase. Without marks nothing is returned.
    """
    found: dict[str, list[Span]] = defaultdict(list)
    if not marks:
        return found
    starts = [start for start, _ in marks]
    for s in spans:
        i = max(0, bisect_right(starts, s.start_ns) - 1)
        left = s.start_ns
        while True:
            right = s.end_ns if i + 1 == len(marks) else min(s.end_ns, marks[i + 1][0])
            found[marks[i][1]].append(_cut(s, left, right))
            if right >= s.end_ns:
                break
            left, i = right, i + 1
    return found


def _cut(span: Span, left: int, right: int) -> Span:
    if left == span.start_ns and right == span.end_ns:
        return span

    # Differences of one rounded cumulative count, so that the pieces add up to the whole.
    def bytes_until(time_ns: int) -> int:
        return span.num_bytes * (time_ns - span.start_ns) // span.duration_ns

    return replace(span, start_ns=left, end_ns=right, num_bytes=bytes_until(right) - bytes_until(left))


def phase_shares(
    spans: Sequence[Span], steps: Sequence[StepRecord], requests: Iterable[RequestRecord]
) -> dict[str, Shares]:
    """The calibres per phase, for the phases that occur (the driver's own stages are known for the run only)."""
    pieces = by_phase(spans, step_phases(steps, requests))
    return {phase: shares(pieces[phase]) for phase in PHASES if phase in pieces}
