"""Closed forms and published points as lines beside the points of a sweep (``docs/crossover.md``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hybridattn.analysis.series import Panel, Question
from hybridattn.core.errors import InputError
from hybridattn.cost.crossover import ap_gain, capacity_gain_bound, eq6_threshold, overlap_gain


@dataclass(frozen=True, slots=True)
class Line:
    """A curve to draw beside the points; ``y`` is what the axis shows."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    published: bool = False


def theory_lines(name: str, panel: Panel, question: Question) -> list[Line]:
    """The lines called ``name`` for a panel; none for an empty name."""
    check_theory(name)
    return LINES[name](panel, question) if name else []


def check_theory(name: str) -> None:
    """InputError for a name that no closed form has."""
    if name and name not in LINES:
        raise InputError(f"theory '{name}' is unknown; known are {', '.join(LINES)}")


def published_lines(points: Iterable[Mapping[str, str]], panel: Panel) -> list[Line]:
    """Published ``points`` (panel, series, x, y) of a panel."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in points:
        if row["panel"] == panel.label:
            found.setdefault(row["series"], []).append((float(row["x"]), float(row["y"])))
    return [Line(label, tuple(x for x, _ in sorted(at)), tuple(y for _, y in sorted(at)), published=True)
            for label, at in found.items()]  # fmt: skip


def _grid(panel: Panel, question: Question) -> np.ndarray:
    xs = [float(r[question.x]) for r in panel.rows]
    low, high = min(xs), max(xs)
    return np.geomspace(low, high, 60) if question.log_x and low > 0 else np.linspace(low, high, 60)


def _one_layer_overlap(panel: Panel, question: Question) -> list[Line]:
    """Section 4: one layer per step, CPU not saturated."""
    with_rows = [r for r in panel.rows if r.get("stretch") is not None]
    if len({(r["stretch"], r["num_layers"]) for r in with_rows}) != 1:
        return []  # nothing to draw, or several settings in one panel, for which no single line holds
    d, layers = float(with_rows[0]["stretch"]), int(with_rows[0]["num_layers"])
    xs = _grid(panel, question)
    label = "theory: one layer per step"
    return [Line(label, tuple(xs), tuple(overlap_gain(x, d, layers) for x in xs))]


def _eq6(panel: Panel, question: Question) -> list[Line]:
    """Section 3: asymmetric pipelining, the CPU always busy; over N_C / N_G."""
    x = float(panel.rows[0]["attention_over_linear"])
    shares = _grid(panel, question)
    return [Line("theory: asymmetric pipelining", tuple(shares), tuple(ap_gain(x, 1 / s) for s in shares))]


def _eq6_threshold(panel: Panel, question: Question) -> list[Line]:
    """Section 3: the ratio of rates below which asymmetric pipelining pays, over T_a / T_l."""
    xs = _grid(panel, question)
    return [Line("theory: eq. 6", tuple(xs), tuple(eq6_threshold(x) for x in xs))]


def _capacity(panel: Panel, question: Question) -> list[Line]:
    """Section 1: what CPU help could gain at most when everything fits (drawn up to a demand of 1)."""
    inside = [r for r in panel.rows if float(r[question.x]) <= 1 and r.get("rate_ratio") is not None]
    best: dict[float, float] = {}
    for r in inside:
        best[float(r[question.x])] = capacity_gain_bound(float(r["attention_over_linear"]), float(r["rate_ratio"]))
    xs = sorted(best)
    return [Line("bound while all KV fits", tuple(xs), tuple(best[x] for x in xs))] if xs else []


def _control_path(panel: Panel, question: Question) -> list[Line]:
    """``experiments/control.py``: the same arrivals through the model, mean over the repeats at each x."""
    at: dict[float, list[float]] = {}
    for r in panel.rows:
        at.setdefault(float(r[question.x]), []).append(float(r["modelled_ready_mean_ns"]))
    xs = tuple(sorted(at))
    return [Line("model: cores shared evenly, first come, first served", xs, tuple(float(np.mean(at[x])) for x in xs))]


LINES: dict[str, Callable[[Panel, Question], list[Line]]] = {
    "one_layer_overlap": _one_layer_overlap,
    "eq6": _eq6,
    "eq6_threshold": _eq6_threshold,
    "capacity": _capacity,
    "control_path": _control_path,
}
