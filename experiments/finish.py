"""What a sweep leaves beside its rows: a Parquet table, the crossovers, a summary and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig
from rich.console import Console

from experiments.published import published_lines
from experiments.results import ResultFolder
from experiments.theory import theory_lines
from hybridattn.analysis.crossing import Crossing, crossover
from hybridattn.analysis.figure import draw_sweep
from hybridattn.analysis.series import Panel, Question, Series, good, origin_of, panels_of

ENOUGH = 0.05  # what the next step of a ladder must add to be worth it


def finish(folder: ResultFolder, config: DictConfig, console: Console) -> None:
    """Write everything that follows from the rows. May be called again: it replaces what it wrote."""
    rows = folder.rows()
    write_parquet(rows, folder.path / "rows.parquet")
    question = question_of(config.analysis)
    panels = panels_of(rows, question) if question else []
    found = {p.label: _crossings(p, question) for p in panels} if question else {}
    folder.write_json("summary.json", summary(rows, question, panels, found))
    if question is None or not panels:
        return
    folder.write_json("crossovers.json", {label: _plain(c, question) for label, c in found.items()})
    lines = {p.label: [*theory_lines(config.analysis.theory, p, question),
                       *published_lines(config.analysis.published, p, question)] for p in panels}  # fmt: skip
    chosen = {label: c[question.candidate] for label, c in found.items() if question.candidate in c}
    paths = [folder.path / f"{config.name}.{suffix}" for suffix in ("png", "svg")]
    draw_sweep(panels, question, paths, title=config.title, crossings=chosen, lines=lines)
    for panel in panels:
        where = f"{panel.label}: " if panel.label else ""
        for series in panel.series if config.analysis.enough else ():
            console.print(f"{where}{series.name}: {enough(series, question)}", highlight=False, soft_wrap=True)
        for name, c in found[panel.label].items():
            text = f"{where}{name} over {question.baseline}: {c.describe(question.unit)}"
            console.print(text, highlight=False, soft_wrap=True, markup=False)


def enough(series: Series, question: Question) -> str:
    """Where more of x stops helping: the first x that no later one beats by 5 %."""
    means = {x: series.mean(x) for x in series.xs}
    later = {x: max(means[other] for other in means if other >= x) for x in means}
    first = next(x for x in means if later[x] < (1 + ENOUGH) * means[x])
    if first == series.xs[-1]:
        return f"more than {first:g} {question.unit} may still help"
    return f"{first:g} {question.unit} are enough (more add {later[first] / means[first] - 1:.1%} at most)"


def question_of(analysis: Any) -> Question | None:
    """The question of an experiment, None when it asks none."""
    if not analysis.x:
        return None
    names = ("x", "y", "series", "baseline", "candidate", "panel", "relative", "x_label", "y_label", "unit",
             "log_x", "log_y")  # fmt: skip
    return Question(panels=tuple(analysis.panels), **{n: analysis[n] for n in names})


def _crossings(panel: Panel, question: Question) -> dict[str, Crossing]:
    """The crossover of every other series over the baseline."""
    base = panel.find(question.baseline)
    if base is None:
        return {}
    return {s.name: crossover(base, s, question.log_x) for s in panel.series if s.name != question.baseline}


def _plain(found: dict[str, Crossing], question: Question) -> dict[str, Any]:
    names = ("state", "value", "low", "high", "until", "share", "method")
    return {
        name: {"says": c.describe(question.unit), "unit": question.unit, **{n: getattr(c, n) for n in names}}
        for name, c in found.items()
    }


def summary(
    rows: list[dict[str, Any]], question: Question | None, panels: list[Panel], found: dict[str, dict[str, Crossing]]
) -> dict[str, Any]:
    """``crossover``, ``source``, ``device``, ``profile``, ``commit``, ``points``, ``failed``.

    The crossover is that of the question's candidate in its panel; without one, its values are null. Profiles are those
    of that panel, or all.
    """
    panel = next((p for p in panels if question is not None and question.panel in ("", p.label)), None)
    origin = panel.origin if panel is not None else origin_of(good(rows))
    c = found.get(panel.label, {}).get(question.candidate) if panel is not None and question is not None else None
    crossover_ = {n: getattr(c, n) if c is not None else None for n in ("value", "low", "high")}
    return {
        "crossover": {**crossover_, "unit": question.unit if question is not None else ""},
        "source": ", ".join(origin.kinds),
        "device": ", ".join(origin.devices),
        "profile": ", ".join(origin.profiles),
        "commit": ", ".join(origin.commits),
        "points": len(rows),
        "failed": len(rows) - len(good(rows)),
    }


def write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """The same rows as a table; a column of mixed types becomes text."""
    table = pd.DataFrame(rows)
    for name in table.columns:
        kinds = {type(v) for v in table[name] if v is not None and v == v}
        if len(kinds) > 1 and not kinds <= {int, float}:
            table[name] = [None if v is None or v != v else str(v) for v in table[name]]
    table.to_parquet(path, index=False)
