"""One self-contained HTML page about a sweep: ``python -m experiments.report results/NAME/latest``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.also import folders as companion_folders
from experiments.findings import failures
from experiments.finish import further_questions, question_of
from experiments.results import ResultFolder
from hybridattn.analysis.page import Page
from hybridattn.analysis.series import Panel, Question, good, origin_of, panels_of
from hybridattn.core.errors import InputError


def write_report(path: Path) -> Path:
    """Write ``report.html`` into the result folder at ``path`` and return where it is.

    Sweeps that came with this one (``also``) get a part of their own on the page.
    """
    folder = _sweep_at(path)
    config = _configuration(folder)
    page = Page(config.title or f"Experiment {config.name}")
    others = {name: _sweep_at(other) for name, other in companion_folders(folder).items() if _has_rows(other)}
    _part(page, folder, config, "part" if others else "page")
    for name, other in others.items():
        theirs = _configuration(other)
        page.part(theirs.title or f"Experiment {name}")
        _part(page, other, theirs, "part")
    file = folder.path / "report.html"
    file.write_text(page.html(), encoding="utf-8")
    return file


def _sweep_at(path: Path) -> ResultFolder:
    folder = ResultFolder.open(path)
    if not folder.rows():
        raise InputError(f"{path} has no rows yet: there is nothing to report")
    if not (folder.path / "sweep.json").is_file():
        raise InputError(f"{path} is not a sweep (it has no sweep.json): reports are written about sweeps")
    return folder


def _has_rows(path: Path) -> bool:
    file = path / "rows.jsonl"  # it may have been begun and interrupted, or deleted since
    return file.is_file() and file.stat().st_size > 0


def _part(page: Page, folder: ResultFolder, config: DictConfig, what: str) -> None:
    """Everything about one sweep. ``what`` is how its text names the part of the page that it fills."""
    rows = folder.rows()
    question = question_of(config.analysis)
    panels = panels_of(rows, question) if question is not None else []
    _answer(page, folder, rows, question, panels, what)
    for picture in sorted(folder.path.glob("*.svg")):
        page.picture(picture, _caption(_shown_by(picture, config, question)))
    if question is not None:
        _crossovers(page, folder)
        for panel in panels:
            _values(page, panel, question)
    _failures(page, rows)
    _provenance(page, folder, rows)
    _repeat(page, folder, config)


def _shown_by(picture: Path, config: DictConfig, question: Question | None) -> Question | None:
    """The question that a figure answers."""
    further = {f"{config.name}_{q.y}": q for q in further_questions(config.analysis)}
    return further.get(picture.stem, question)


def _configuration(folder: ResultFolder) -> DictConfig:
    first = min((folder.path / "points").glob("*.yaml"), key=lambda p: int(p.stem), default=None)
    if first is None:
        raise InputError(f"{folder.path} holds no configuration of a point")
    found = OmegaConf.load(first)
    assert isinstance(found, DictConfig)
    return found


def _answer(
    page: Page,
    folder: ResultFolder,
    rows: list[dict[str, Any]],
    question: Question | None,
    panels: list[Panel],
    what: str,
) -> None:
    kind = ", ".join(origin_of(good(rows)).kinds) or "failed"
    count = f"{len(rows)} points, {len(rows) - len(good(rows))} failed."
    where = "on this page" if what == "page" else "of this part"
    page.text(f"Every number {where} is {kind}. {count}", "note")
    for line in _verdict(folder):
        page.text(line, "answer")
    if question is None or not question.candidate or not (folder.path / "crossovers.json").is_file():
        return
    found = folder.read_json("crossovers.json")
    for panel in panels:
        says = found.get(panel.label, {}).get(question.candidate)
        if says:
            where = f"{panel.label}: " if panel.label else ""
            page.text(f"{where}{question.candidate} over {question.baseline} {_clause(says['says'])}.", "answer")


def _verdict(folder: ResultFolder) -> list[str]:
    """What the experiment's own verdict said."""
    return list(folder.read_json("verdict.json")) if (folder.path / "verdict.json").is_file() else []


def _clause(says: str) -> str:
    return says if says.startswith("pays") else f"has {says}"


def _caption(question: Question | None) -> str:
    if question is None:
        return "Figure of the sweep."
    text = f"{question.y_label or question.y} against {question.x_label or question.x}."
    if question.relative:
        text += f" Each curve is divided by {question.baseline} at the same point, so that 1 is {question.baseline}."
    text += " Solid lines with markers: our points, bars from the smallest to the largest repeat."
    return text + " Dashed: closed form. Crosses: published points. Dotted line and grey band: crossover and interval."


def _crossovers(page: Page, folder: ResultFolder) -> None:
    file = folder.path / "crossovers.json"
    found = folder.read_json("crossovers.json") if file.is_file() else {}
    rows = [(panel, name, c["says"]) for panel, cs in found.items() for name, c in cs.items()]
    if rows:
        page.heading("Where it pays")
        page.table(("setting", "policy", "verdict over the baseline"), rows, text=True)


def _values(page: Page, panel: Panel, question: Question) -> None:
    """Mean y of every series at every x, with the gain where there is a baseline."""
    base = panel.find(question.baseline) if question.relative else None
    xs = sorted({x for s in panel.series for x in s.samples})
    names = [s.name for s in panel.series]
    rows = []
    for x in xs:
        cells = [f"{x:.4g}"]
        for series in panel.series:
            if x not in series.samples:
                cells.append("-")
                continue
            gain = f" ({series.mean(x) / base.mean(x):.2f}x)" if base and x in base.samples and base.mean(x) > 0 else ""
            repeats = f" n={len(series.samples[x])}" if len(series.samples[x]) > 1 else ""
            cells.append(f"{series.mean(x):.4g}{gain}{repeats}")
        rows.append(cells)
    page.heading(panel.label or "Values")
    page.text(str(panel.origin), "note")
    page.table((question.x_label or question.x, *names), rows, caption=f"{question.y}, mean of the repeats")


def _failures(page: Page, rows: list[dict[str, Any]]) -> None:
    bad = [r for r in rows if r.get("status") == "failed"]
    if not bad:
        return
    page.heading("Failed points")
    page.table(("points", "error"), failures(bad), text=True)
    page.code(str(bad[0].get("traceback")), "traceback of the first")


def _provenance(page: Page, folder: ResultFolder, rows: list[dict[str, Any]]) -> None:
    origin = origin_of(good(rows))
    took = sum(r.get("took_s") or 0 for r in rows)
    launchers = sorted({r["launcher"] for r in rows})
    page.heading("Where the numbers come from")
    facts = [
        ("kind", ", ".join(origin.kinds)),
        ("device", ", ".join(origin.devices)),
        ("profile", ", ".join(origin.profiles)),
        ("commit", ", ".join(origin.commits)),
        ("model", ", ".join(dict.fromkeys(r["model"] for r in rows))),
        ("launcher", ", ".join(launchers)),
        ("time in points", f"{took:.1f} s"),
        ("folder", folder.path.name),
    ]
    page.table(("", ""), facts, text=True)
    page.text(
        "A commit that ends in -dirty had local changes. Metrics: docs/metrics.md, theory: docs/crossover.md.", "note"
    )


def _repeat(page: Page, folder: ResultFolder, config: DictConfig) -> None:
    page.heading("How to repeat it")
    given = folder.read_json("sweep.json")
    words = [f"'{o}'" if any(c in o for c in " {}[]") else o for o in given["command"]]
    page.code("python -m experiments.run " + " ".join(words))
    page.text("rows.jsonl and rows.parquet in the same folder hold every column of every point.", "note")
    page.code(OmegaConf.to_yaml(config), "configuration of the first point")


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m experiments.report", description=__doc__)
    p.add_argument("folder", type=Path, help="results/NAME/latest or another folder of a sweep")
    args = p.parse_args(argv)
    try:
        print(write_report(args.folder))
    except InputError as error:
        print(f"experiments.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
