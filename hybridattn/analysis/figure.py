"""Figures of a sweep: one panel per setting, points with their spread, theory as a line, published points as crosses.

The title of every panel says where its numbers come from, so that a figure without its text cannot mislead.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hybridattn.analysis.crossing import Crossing
from hybridattn.analysis.series import Panel, Question
from hybridattn.analysis.theory import Line

# One colour and marker per policy in every figure (Okabe and Ito's palette, safe for colour-blind readers).
STYLES = {
    "gpu_only": ("#000000", "o"), "sync_offload": ("#e69f00", "s"), "asymmetric": ("#56b4e9", "^"),
    "async_overlap": ("#009e73", "D"), "cpu_only": ("#cc79a7", "v"), "fixed_fraction": ("#b8a800", "P"),
    "adaptive": ("#d55e00", "*"), "auto": ("#0072b2", "X"),
}  # fmt: skip
CROSSES = (("x", "#8b0000"), ("+", "#4b0082"), ("1", "#005f5f"))  # published points
TITLE_WIDTH = 84
OTHERS = ("#666666", "#8c564b", "#17becf", "#7f3c8d", "#11a579", "#3969ac")


class Drawing(Figure):
    """A figure outside of pyplot: a notebook shows it as it is, whatever backend is chosen there, and nothing holds it
    when it is let go."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()

    def write(self, path: str | Path) -> None:
        """To a PNG or SVG file, the same bytes for the same figure."""
        self.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def draw_sweep(
    panels: Sequence[Panel],
    question: Question,
    paths: Sequence[Path] = (),
    *,
    title: str = "",
    crossings: Mapping[str, Crossing] | None = None,
    lines: Mapping[str, Sequence[Line]] | None = None,
) -> Drawing:
    """All panels, also written to every one of ``paths`` (PNG, SVG).

    Parameters
    ----------
    crossings : mapping of panel label to the crossover of its candidate
    lines : mapping of panel label to theory and published points
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = (6.4 * columns if columns > 1 else 8.0, 4.3 * rows + 0.9)
    figure = Drawing(figsize=size, dpi=120, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    spare = list(grid.flat)
    for panel, axes in zip(panels, spare, strict=False):
        _draw_panel(axes, panel, question, (crossings or {}).get(panel.label), (lines or {}).get(panel.label, ()))
    for axes in spare[len(panels) :]:
        axes.set_visible(False)
    handles: dict[str, Artist] = {}
    for axes in spare[: len(panels)]:
        handles |= {label: h for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=min(4, len(handles)), frameon=False
    )
    if title:
        figure.suptitle(title, fontsize=13)
    for path in paths:
        figure.write(path)
    return figure


def _draw_panel(axes: Axes, panel: Panel, question: Question, found: Crossing | None, lines: Sequence[Line]) -> None:
    base = question.base(panel)
    others = list(OTHERS)
    for series in panel.series:
        colour, marker = STYLES.get(series.name) or (others.pop(0) if others else "#999999", "o")
        xs = [x for x in series.xs if base is None or (x in base.samples and base.mean(x) > 0)]
        scale = {x: 1.0 if base is None else 1 / base.mean(x) for x in xs}
        ys = [series.mean(x) * scale[x] for x in xs]
        spread = [[y - min(series.samples[x]) * scale[x] for x, y in zip(xs, ys, strict=True)],
                  [max(series.samples[x]) * scale[x] - y for x, y in zip(xs, ys, strict=True)]]  # fmt: skip
        repeated = any(len(series.samples[x]) > 1 for x in xs)
        bars: dict[str, Any] = {"yerr": spread, "capsize": 3} if repeated else {}
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.6}
        axes.errorbar(xs, ys, label=series.name, **look, **bars)
    crosses = list(CROSSES)
    for line in lines:
        marker, colour = crosses.pop(0) if line.published and crosses else ("x", "#8b0000")
        style: dict[str, Any] = {"linestyle": "none", "marker": marker} if line.published else {"linestyle": "--"}
        axes.plot(line.x, line.y, color=colour, linewidth=1.4, markersize=8, label=line.label, **style)
    if found is not None and found.value is not None:
        axes.axvline(found.value, color="#444444", linestyle=":", linewidth=1.2)
        if found.low is not None and found.high is not None:
            axes.axvspan(found.low, found.high, color="#444444", alpha=0.12, linewidth=0)
    _label(axes, panel, question, found)


def _label(axes: Axes, panel: Panel, question: Question, found: Crossing | None) -> None:
    if question.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if question.log_y:
        axes.set_yscale("log")
    if question.base(panel):
        axes.axhline(1.0, color="#000000", linewidth=0.6)
    axes.set_xlabel(question.x_label or question.x)
    label = question.shown(panel)
    if label.endswith("[ns]"):  # billions would need a factor in the corner, under the title
        label = label.removesuffix("[ns]") + "[ms]"
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1e6:.6g}")
        if question.log_y:
            axes.yaxis.set_minor_formatter(lambda value, _: f"{value / 1e6:.6g}" if f"{value:e}"[0] in "25" else "")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    head = [panel.label] if panel.label else []
    if found is not None and question.candidate:
        head += _balanced(f"{question.candidate} over {question.baseline}: {found.describe()}")
    source = _balanced(str(panel.origin))
    axes.set_title("\n".join([*head, *source]), fontsize=8.5)


def _balanced(text: str) -> list[str]:
    """``text`` in as few lines of a title as it takes, of about equal length: no word stands alone."""
    count = len(textwrap.wrap(text, TITLE_WIDTH))
    return next(
        lines for width in range(1, TITLE_WIDTH + 1) if len(lines := textwrap.wrap(text, width)) <= max(1, count)
    )
