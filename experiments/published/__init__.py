"""Published points, drawn beside ours and held against them. Each file names its source in its first lines."""

from __future__ import annotations

import csv
from pathlib import Path

from hybridattn.analysis.figure import Line
from hybridattn.analysis.series import Panel, Question
from hybridattn.core.errors import InputError

FOLDER = Path(__file__).parent


def published_rows(name: str) -> list[dict[str, str]]:
    """Rows of ``name``.csv by its column names; ``#`` begins a comment."""
    path = FOLDER / f"{name}.csv"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.csv")))
        raise InputError(f"published points '{name}' are unknown; known are {known or 'none'}")
    text = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return list(csv.DictReader(text))


def published_lines(name: str, panel: Panel, question: Question) -> list[Line]:
    """Points of ``name``.csv for a panel (columns panel, series, x, y, and others that are left alone); none without a
    name."""
    if not name:
        return []
    points: dict[str, list[tuple[float, float]]] = {}
    for row in published_rows(name):
        if row["panel"] == panel.label:
            points.setdefault(row["series"], []).append((float(row["x"]), float(row["y"])))
    lines = []
    for label, at in points.items():
        at.sort()
        lines.append(Line(label, tuple(x for x, _ in at), tuple(y for _, y in at), published=True))
    return lines
