"""Writes a trace in the Chrome trace format (opens in Perfetto): lanes become named threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybridattn.core.op import LANES
from hybridattn.core.trace import Trace


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """Complete events (``ph: X``) in microseconds from the first span, after the metadata that names the lanes, and an
    instant for each change of the layout."""
    title = f"{trace.device} ({trace.kind}, profile {trace.profile}, commit {trace.commit})"
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for tid, lane in enumerate(LANES, start=1):
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    origin = min((s.start_ns for s in trace.spans), default=0)
    tids = {lane: tid for tid, lane in enumerate(LANES, start=1)}
    for s in trace.spans:
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": tids[s.lane],
                "name": s.name,
                "ts": (s.start_ns - origin) / 1e3,
                "dur": s.duration_ns / 1e3,
                "args": {"layer": s.layer, "rows": s.rows, "bytes": s.num_bytes},
            }
        )
    for change in trace.layouts:
        args = {"load": change.load, "chosen by": change.by, "predicted tokens/s": change.tokens_per_s}
        at = {"ph": "i", "s": "p", "pid": 1, "tid": 1, "ts": (change.at_ns - origin) / 1e3}
        events.append({**at, "name": f"layout: {change.layout}", "args": args})
    return events


def write_chrome(trace: Trace, path: Path) -> None:
    """Write ``trace`` to ``path`` as JSON."""
    document = {
        "traceEvents": chrome_events(trace),
        "displayTimeUnit": "ms",
        "otherData": {
            "device": trace.device,
            "kind": trace.kind,
            "profile": trace.profile,
            "commit": trace.commit,
            "clock_spread_ns": trace.clock_spread_ns,
            "dropped_spans": trace.dropped,
        },
    }
    path.write_text(json.dumps(document))
