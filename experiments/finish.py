"""What a sweep leaves beside its rows: a Parquet table, the crossovers, a summary and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from experiments.findings import busy_lines, panel_lines, verdict_lines
from hybridattn.analysis.crossing import Crossing
from hybridattn.analysis.results import ResultFolder
from hybridattn.analysis.series import Panel, Question, good, origin_of, without_copies
from hybridattn.analysis.sweep_results import SweepResults
from hybridattn.core.errors import InputError


def finish(folder: ResultFolder, config: DictConfig, console: Console) -> None:
    """Write everything that follows from the rows and print what was found. May be called again: it replaces what it
    wrote. A verdict that fails is raised after everything else has been written.
    """
    results = SweepResults.of(folder)
    write_parquet(results.rows, folder.path / "rows.parquet")
    question = results.asked[0] if results.asked else None
    panels = results.panels(question) if question else []
    found = {p.label: results.crossings(p, question) for p in panels} if question else {}
    folder.write_json("summary.json", summary(results.rows, question, panels, found))
    if same := len(results.rows) - len(without_copies(results.rows)):
        again = "a repeat draws nothing anew here, so each of these points counts once"
        console.print(f"{same} repeats of simulated points are copies of the first: {again}", highlight=False)
    own, trouble = [], None
    try:
        own = verdict_lines(config, good(without_copies(results.rows)))
    except InputError as error:
        trouble = error
    folder.write_json("verdict.json", own)
    lines = busy_lines(results.rows)
    if question is not None and panels:
        folder.write_json("crossovers.json", {label: _plain(c, question) for label, c in found.items()})
        results.draw(question, _pictures(folder, config.name))
        bare = not own and not results.outcomes()
        lines += [li for p in panels for li in panel_lines(p, question, found[p.label], config.analysis, bare)]
        lines += _further(results, config)
    if lines or own or panels:
        kinds = ", ".join(dict.fromkeys(str(r.get("kind")) for r in good(results.rows)))
        head = f"{config.name} found ({kinds}{f', {results.counted()}' if results.missing else ''}):"
        console.print("\n  ".join([head, *lines, *own]), highlight=False, soft_wrap=True, markup=False)
    print_outcomes(results, console)
    if trouble is not None:
        raise trouble


def print_outcomes(results: SweepResults, console: Console) -> None:
    """The table that a sweep ends with; in a file, a pipe or a notebook no line of it is broken."""
    rows = results.outcomes()
    if not rows:
        return
    question = results.asked[0]
    table = Table(caption=question.axes(rows[0]), caption_justify="left")
    for name in rows[0]:
        if any(row[name] for row in rows):
            table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(row[str(column.header)] for column in table.columns))
    screen = console.is_terminal and not console.is_dumb_terminal
    wide = console if screen else Console(file=console.file, width=250, height=100)  # without height a dumb one has 80
    wide.print(table, highlight=False, markup=False)


def _further(results: SweepResults, config: DictConfig) -> list[str]:
    """Figures of the further columns, and what a ladder says of them."""
    lines = []
    for more, question in zip(config.analysis.more, results.asked[1:], strict=True):
        panels = results.panels(question)
        if panels:
            results.draw(question, _pictures(results.folder, f"{config.name}_{question.y}"))
            lines += [line for p in panels for line in (panel_lines(p, question, {}, more) if more.enough else ())]
    return lines


def _pictures(folder: ResultFolder, name: str) -> list[Path]:
    return [folder.path / f"{name}.{suffix}" for suffix in ("png", "svg")]


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
    """The same rows as a table; a column of mixed types, or of integers beyond 64 bits, becomes text."""
    table = pd.DataFrame(rows)
    for name in table.columns:
        kinds = {type(v) for v in table[name] if v is not None and v == v}
        wide = int in kinds and any(isinstance(v, int) and not -(2**63) <= v < 2**63 for v in table[name])
        if wide or (len(kinds) > 1 and not kinds <= {int, float}):
            table[name] = [None if v is None or v != v else str(v) for v in table[name]]
    table.to_parquet(path, index=False)
