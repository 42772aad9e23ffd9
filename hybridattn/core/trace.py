"""A trace: the spans of a run with where they come from, and the invariants every trace must keep."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from hybridattn.core.device import Span
from hybridattn.core.op import LANES
from hybridattn.core.records import LayoutRecord


@dataclass(slots=True)
class Trace:
    """Spans plus provenance. ``kind`` says measured, emulated or simulated; titles and rows repeat it.

    ``clock_spread_ns`` is how far the times of GPU spans may lie from those of the host (0: one clock); ``dropped`` is
    how many older spans were not kept. ``layouts`` are the changes of the layout of a policy that plans.
    """

    device: str
    kind: str
    profile: str
    commit: str
    spans: list[Span] = field(default_factory=list, repr=False)
    clock_spread_ns: int = 0
    dropped: int = 0
    layouts: list[LayoutRecord] = field(default_factory=list)

    def lane(self, name: str) -> list[Span]:
        """The spans of a lane by start time."""
        return sorted((s for s in self.spans if s.lane == name), key=lambda s: (s.start_ns, s.end_ns))


def violations(spans: list[Span]) -> list[str]:
    """What is wrong with a list of spans, one sentence each; empty when the invariants hold.

    Known lane; no negative duration; spans of one lane do not overlap; none starts before what it waited for ended.
    """
    found = []
    by_lane: dict[str, list[Span]] = defaultdict(list)
    for s in spans:
        by_lane[s.lane].append(s)
        if s.lane not in LANES:
            found.append(f"{s.name}: unknown lane {s.lane}")
        if s.end_ns < s.start_ns:
            found.append(f"{s.name} on {s.lane} ends at {s.end_ns}, before its start {s.start_ns}")
        if s.start_ns < s.ready_ns:
            found.append(f"{s.name} on {s.lane} starts at {s.start_ns}, before what it waits for ended at {s.ready_ns}")
    for lane, members in by_lane.items():
        members.sort(key=lambda s: (s.start_ns, s.end_ns))
        for a, b in zip(members, members[1:], strict=False):
            if b.start_ns < a.end_ns:
                found.append(f"{a.name} and {b.name} overlap on {lane}: [{a.start_ns}, {a.end_ns}) and {b.start_ns}")
    return found


def overlap_ns(a: list[Span], b: list[Span]) -> int:
    """Time during which a span of ``a`` and a span of ``b`` are both running (each list free of overlap)."""
    xs, ys = (sorted((s.start_ns, s.end_ns) for s in spans) for spans in (a, b))
    total = i = j = 0
    while i < len(xs) and j < len(ys):
        total += max(0, min(xs[i][1], ys[j][1]) - max(xs[i][0], ys[j][0]))
        if xs[i][1] <= ys[j][1]:
            i += 1
        else:
            j += 1
    return total
