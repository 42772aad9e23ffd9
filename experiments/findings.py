"""What a sweep found, as lines for people: crossovers, where more stops helping, and the experiment's own.

rows -> panels -> the candidate     "A10: async_overlap over gpu_only: pays from 8.25 ... on (8 to 9, ...)"
               -> a ladder          "A10, async_overlap: 16 cores are enough ..."
               -> no table          "A10, group 4: 0.61 (at 256) to 0.93 (at 16384)"
     -> verdict(rows)               whatever the experiment's own function says; verdict(rows, config) may be asked
                                    for the composed configuration as well
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.settings import resolve
from hybridattn.analysis.crossing import Crossing
from hybridattn.analysis.outcome import outcome
from hybridattn.analysis.series import Panel, Question, Series
from hybridattn.core.errors import InputError
from hybridattn.core.machine_load import BUSY

ENOUGH = 0.05  # what a doubling of a ladder must bring to be worth it
POINTS_SHOWN = 3
Rows = list[Mapping[str, Any]]


def panel_lines(
    panel: Panel, question: Question, found: Mapping[str, Crossing], ladder: Any, bare: bool = False
) -> list[str]:
    """What the table at the end does not say of a panel: ladders, what is missing, and the crossover of the candidate
    where another series is the best. ``ladder`` has ``enough`` and ``lower_is_better``; ``bare``: there is no table and
    no verdict, so the extremes are said."""
    where = f"{panel.label}: " if panel.label else ""
    lines = [f"{where}{s.name}: {enough(s, question, ladder.lower_is_better)}" for s in panel.series if ladder.enough]
    if question.baseline and question.relative and panel.find(question.baseline) is None:
        return [*lines, f"{where}no crossover can be told: {question.baseline}, the baseline, is not in this sweep"]
    if question.relative and not found and not lines:
        return [f"{where}there is nothing beside {question.baseline} to compare it with"]
    if bare:
        return lines or [f"{where}{s.name}: {extremes(s, question)}" for s in panel.series]
    asked = found.get(question.candidate)
    if asked is None or outcome(panel, question, found).best == question.candidate:
        return lines
    return [*lines, f"{where}{question.candidate} over {question.baseline}: {asked.describe(question.unit)}"]


def enough(series: Series, question: Question, lower_is_better: bool = False) -> str:
    """From which x on a doubling of x brings less than 5 %: the first one that no later step contradicts.

    A step from x to x' with y to y' brings (y' / y) ** (1 / log2(x' / x)) - 1 for each doubling (y / y' where lower is
    better).
    """
    xs = series.xs
    if xs[0] <= 0:
        raise InputError(f"a ladder of {question.x} cannot begin at {xs[0]:g}: a doubling of it means nothing")
    steps = [_per_doubling(series, a, b, lower_is_better) for a, b in zip(xs, xs[1:], strict=False)]
    worth = [i for i, gain in enumerate(steps) if gain >= ENOUGH]
    at = worth[-1] + 1 if worth else 0
    if not steps:
        return f"{question.y} at {xs[0]:g} {question.unit} alone: a single point is no ladder"
    if at == len(xs) - 1:
        last = f"the last doubling still brings {steps[-1]:.0%} of {question.y}"
        return f"more than {xs[-1]:g} {question.unit} may still help ({last})"
    gain = f"{max(steps[at:]):.1%} of {question.y} at most"
    return f"{xs[at]:g} {question.unit} are enough: a further doubling brings less than {ENOUGH:.0%} ({gain})"


def _per_doubling(series: Series, a: float, b: float, lower_is_better: bool) -> float:
    before, after = series.mean(a), series.mean(b)
    if lower_is_better:
        before, after = after, before
    return math.inf if before <= 0 else (after / before) ** (1 / math.log2(b / a)) - 1


def extremes(series: Series, question: Question) -> str:
    """The lowest and the highest mean, and where."""
    low, high = (pick(series.xs, key=series.mean) for pick in (min, max))
    name, unit = question.y_label or question.y, 1.0
    if name.endswith("[ns]"):
        name, unit = name.removesuffix("[ns]") + "[ms]", 1e6
    least, most = series.mean(low) / unit, series.mean(high) / unit
    if least == most:
        return f"{name} is {least:.4g} at every point"
    return f"{name} from {least:.4g} (at {low:g}) to {most:.4g} (at {high:g})"


def verdict_of(config: Any) -> Callable[..., list[str]] | None:
    """The experiment's own verdict: what ``verdict`` names, else the function of that name beside ``point``."""
    if config.verdict:
        found: Any = resolve(config.verdict, "verdict")
    else:
        found = getattr(importlib.import_module(config.point.partition(":")[0]), "verdict", None)
    if found is not None and not callable(found):
        raise InputError(f"verdict of experiment {config.name} is no function but a {type(found).__name__}")
    return found


def verdict_lines(config: Any, rows: Rows) -> list[str]:
    """What the verdict says of the rows of the points that ran, in the order of the sweep (a parallel launcher leaves
    them in the order in which they ended); InputError names a verdict that fails."""
    judge = verdict_of(config) if rows else None
    if judge is None:
        return []
    rows = sorted(rows, key=lambda row: row.get("point", 0))
    name = f"{judge.__module__}:{judge.__qualname__}"
    try:
        lines = judge(rows, config) if len(inspect.signature(judge).parameters) > 1 else judge(rows)
    except Exception as error:  # somebody's function: the rows are safe, and what went wrong is said
        raise InputError(f"the verdict {name} failed ({type(error).__name__}: {error})") from error
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise InputError(f"the verdict {name} must return a list of strings, got {lines!r}")
    return lines


def busy_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Measured rows beside which other work ran."""
    shares = [float(r["others_cpu_fraction"]) for r in rows if r.get("others_cpu_fraction") is not None]
    busy = [share for share in shares if share >= BUSY]
    if not busy:
        return []
    return [f"measured on a busy machine: beside {len(busy)} of {len(shares)} points other work used {BUSY:.0%} or "
            f"more of the cpus, {max(busy):.0%} at most (column others_cpu_fraction)"]  # fmt: skip


def failure_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Failed points as lines, those with one and the same message together."""
    return [f"failed: {points}: {error}" for points, error in failures(rows)]


def failures(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """``(points, error)`` of the failed rows: each message once, with its count and the first few points."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row.get("status") == "failed":
            groups.setdefault(str(row["error"]), []).append(str(row["point_id"]))
    return [(_points(ids), error) for error, ids in groups.items()]


def _points(ids: Sequence[str]) -> str:
    if len(ids) == 1:
        return ids[0] or "the only point"
    rest = len(ids) - POINTS_SHOWN
    return f"{len(ids)} points ({' | '.join(ids[:POINTS_SHOWN])}{f' | and {rest} more' if rest > 0 else ''})"
