"""One self-contained HTML page about a sweep: ``python -m experiments.report results/NAME/latest``."""

from __future__ import annotations

import argparse
import base64
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from omegaconf import DictConfig, OmegaConf

from experiments.also import folders as companion_folders
from experiments.findings import failures
from experiments.finish import further_questions, question_of
from hybridattn.analysis.results import ResultFolder
from hybridattn.analysis.series import Panel, Question, good, origin_of, panels_of, without_copies
from hybridattn.core.errors import InputError

TEMPLATES = Path(__file__).parent / "templates"
Table = Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Figure:
    """An SVG file, to be put into the page."""

    base64: str
    caption: str


@dataclass(frozen=True, slots=True)
class Values:
    """The table of a panel."""

    title: str
    origin: str
    header: tuple[str, ...]
    rows: Table
    caption: str


@dataclass(frozen=True, slots=True)
class Part:
    """Everything about one sweep, as texts; the template ``report.html.j2`` says what stands where."""

    title: str
    kind: str
    points: int
    failed: int
    answers: list[str]
    figures: list[Figure]
    crossovers: Table
    values: list[Values]
    failures: Table
    traceback: str
    facts: Table
    command: str
    configuration: str


def write_report(path: Path) -> Path:
    """Write ``report.html`` into the result folder at ``path`` and return where it is.

    Sweeps that came with this one (``also``) get a part of their own on the page.
    """
    folder = _sweep_at(path)
    others = [_sweep_at(other) for other in companion_folders(folder).values() if _has_rows(other)]
    parts = [part_of(each) for each in (folder, *others)]
    page = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    file = folder.path / "report.html"
    file.write_text(page.get_template("report.html.j2").render(parts=parts) + "\n", encoding="utf-8")
    return file


def part_of(folder: ResultFolder) -> Part:
    """What the page says of one sweep."""
    rows, config = folder.rows(), _configuration(folder)
    question = question_of(config.analysis)
    panels = panels_of(without_copies(rows), question) if question is not None else []
    found = _json(folder, "crossovers.json", {}) if question is not None else {}
    bad = [r for r in rows if r.get("status") == "failed"]
    return Part(
        title=config.title or f"Experiment {config.name}",
        kind=", ".join(origin_of(good(rows)).kinds) or "failed",
        points=len(rows),
        failed=len(bad),
        answers=[*_json(folder, "verdict.json", []), *_crossover_answers(found, panels, question)],
        figures=[_figure(file, config, question) for file in sorted(folder.path.glob("*.svg"))],
        crossovers=[(panel, name, c["says"]) for panel, cs in found.items() for name, c in cs.items()],
        values=[_values(panel, question) for panel in panels] if question is not None else [],
        failures=failures(rows),
        traceback=str(bad[0].get("traceback")) if bad else "",
        facts=_facts(folder, rows),
        command=shlex.join(["python", "-m", "experiments.run", *folder.read_json("sweep.json")["command"]]),
        configuration=OmegaConf.to_yaml(config),
    )


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


def _json(folder: ResultFolder, name: str, otherwise: Any) -> Any:
    return folder.read_json(name) if (folder.path / name).is_file() else otherwise


def _configuration(folder: ResultFolder) -> DictConfig:
    first = min((folder.path / "points").glob("*.yaml"), key=lambda p: int(p.stem), default=None)
    if first is None:
        raise InputError(f"{folder.path} holds no configuration of a point")
    found = OmegaConf.load(first)
    assert isinstance(found, DictConfig)
    return found


def _crossover_answers(found: dict[str, Any], panels: list[Panel], question: Question | None) -> list[str]:
    """The crossover of the candidate in each panel, as a sentence."""
    if question is None or not question.candidate:
        return []
    lines = []
    for panel in panels:
        says = found.get(panel.label, {}).get(question.candidate)
        if says:
            where = f"{panel.label}: " if panel.label else ""
            clause = says["says"] if says["says"].startswith("pays") else f"has {says['says']}"
            lines.append(f"{where}{question.candidate} over {question.baseline} {clause}.")
    return lines


def _figure(file: Path, config: DictConfig, first: Question | None) -> Figure:
    further = {f"{config.name}_{q.y}": q for q in further_questions(config.analysis)}
    return Figure(base64.b64encode(file.read_bytes()).decode(), _caption(further.get(file.stem, first)))


def _caption(question: Question | None) -> str:
    if question is None:
        return "Figure of the sweep."
    text = f"{question.y_label or question.y} against {question.x_label or question.x}."
    if question.relative:
        text += f" Each curve is divided by {question.baseline} at the same point, so that 1 is {question.baseline}."
    text += " Solid lines with markers: our points, bars from the smallest to the largest repeat."
    return text + " Dashed: closed form. Crosses: published points. Dotted line and grey band: crossover and interval."


def _values(panel: Panel, question: Question) -> Values:
    """Mean y of every series at every x, with the gain where there is a baseline."""
    base = panel.find(question.baseline) if question.relative else None
    xs = sorted({x for s in panel.series for x in s.samples})
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
        rows.append(tuple(cells))
    header = (question.x_label or question.x, *(s.name for s in panel.series))
    return Values(panel.label or "Values", str(panel.origin), header, rows, f"{question.y}, mean of the repeats")


def _facts(folder: ResultFolder, rows: list[dict[str, Any]]) -> Table:
    origin = origin_of(good(rows))
    return [
        ("kind", ", ".join(origin.kinds)),
        ("device", ", ".join(origin.devices)),
        ("profile", ", ".join(origin.profiles)),
        ("commit", ", ".join(origin.commits)),
        ("model", ", ".join(dict.fromkeys(r["model"] for r in rows))),
        ("launcher", ", ".join(sorted({r["launcher"] for r in rows}))),
        ("time in points", f"{sum(r.get('took_s') or 0 for r in rows):.1f} s"),
        ("folder", folder.path.name),
    ]


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
