"""A picture of a trace: one row per lane, time to the right."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from hybridattn.analysis.figure import Drawing
from hybridattn.core.device import Span
from hybridattn.core.op import CPU, D2H, GPU, H2D, LANES
from hybridattn.core.trace import Trace

# Lanes are named on the axis, so colour only has to tell the ops of gpu.compute apart.
COLOURS = {
    "linear": "#4878a8", "linear+sample": "#1d3557", "attention": "#e9a03b", "send q,k,v": "#5b9a68",
    "cold attention": "#b8541f", "merge": "#f3c98b", "send q": "#8fc79b", "fetch cold part": "#d9a5d0",
    "offload k,v": "#2f5d3a", "fetch output": "#a05195", "load k,v": "#6a2c70",
}  # fmt: skip
SHORT = {GPU: "gpu.compute", CPU: "cpu.attention", D2H: "gpu.d2h", H2D: "gpu.h2d"}


def draw_timeline(trace: Trace, path: str | Path, window_ns: tuple[int, int], title: str = "") -> Drawing:
    """Draw the spans inside ``window_ns`` (start, end on the device's clock) to ``path`` (PNG or SVG).

    The title says where the trace comes from.
    """
    start, end = window_ns
    figure = Drawing(figsize=(12, 3.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    shown = [s for s in trace.spans if s.end_ns > start and s.start_ns < end]
    for row, lane in enumerate(reversed(LANES)):
        _draw_lane(axes, row, [s for s in shown if s.lane == lane], start, end)
    axes.set_yticks(range(len(LANES)), [SHORT[lane] for lane in reversed(LANES)])
    axes.set_xlim(0, (end - start) / 1e6)
    axes.set_ylim(-0.6, len(LANES) - 0.4)
    axes.set_xlabel("time from the start of the window [ms]")
    source = f"{trace.kind} on {trace.device}, profile {trace.profile}, commit {trace.commit}"
    axes.set_title(f"{title}\n{source}" if title else source, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    names = [name for name in COLOURS if any(s.name == name for s in shown)]
    handles = [Patch(color=COLOURS[name], label=name) for name in names]
    if handles:
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(handles), frameon=False)
    figure.write(path)
    return figure


def _draw_lane(axes: Axes, row: int, spans: list[Span], start: int, end: int) -> None:
    pixel = (end - start) / 2500  # shorter spans would vanish
    for s in spans:
        left, right = max(s.start_ns, start), min(max(s.end_ns, s.start_ns + pixel), end)
        bar = [((left - start) / 1e6, (right - left) / 1e6)]
        axes.broken_barh(bar, (row - 0.35, 0.7), facecolors=COLOURS.get(s.name, "#888888"))


def busiest_window(trace: Trace, length_ns: int) -> tuple[int, int]:
    """The window of ``length_ns`` in which cpu.attention and gpu.compute are busy together for the longest time.

    Windows begin at cpu.attention spans, as long as the GPU lane still has attention of its own to come (afterwards
    all rows are CPU rows); without any, the window begins with the trace.
    """
    cpu, gpu = trace.lane(CPU), trace.lane(GPU)
    mixed_until = max((s.start_ns for s in gpu if s.name == "attention"), default=0)
    cpu = [s for s in cpu if s.start_ns < mixed_until] or cpu
    first = min((s.start_ns for s in trace.spans), default=0)
    edges = sorted([(s.start_ns, 1, 0) for s in gpu] + [(s.end_ns, -1, 0) for s in gpu]
                   + [(s.start_ns, 0, 1) for s in cpu] + [(s.end_ns, 0, -1) for s in cpu])  # fmt: skip
    times, together, on_gpu, on_cpu, at = [first], [0], 0, 0, first
    for when, gpu_step, cpu_step in edges:  # running total of time with both lanes busy
        together.append(together[-1] + (when - at if on_gpu and on_cpu else 0))
        times.append(when)
        on_gpu, on_cpu, at = on_gpu + gpu_step, on_cpu + cpu_step, when
    best, best_start, right = -1, first, 0
    totals = dict(zip(times, together, strict=True))
    for s in cpu:
        while right + 1 < len(times) and times[right + 1] <= s.start_ns + length_ns:
            right += 1
        gained = together[right] - totals[s.start_ns]
        if gained > best:
            best, best_start = gained, s.start_ns
    return best_start, best_start + length_ns
