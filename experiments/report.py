"""One self-contained HTML page about a sweep: ``python -m experiments.report results/NAME/latest``."""

from __future__ import annotations

import argparse
import base64
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from omegaconf import DictConfig, OmegaConf

from experiments.also import folders as companion_folders
from experiments.findings import busy_lines, failures
from experiments.tables import blocks, cells
from hybridattn.analysis.crossing import gains
from hybridattn.analysis.results import ResultFolder
from hybridattn.analysis.series import Panel, Question, good, origin_of, swept_columns
from hybridattn.analysis.sweep_results import SweepResults
from hybridattn.core.errors import InputError
from hybridattn.policies.registry import POLICIES

TEMPLATES = Path(__file__).parent / "templates"
Table = Sequence[tuple[str, ...]]


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


def part_of(folder: ResultFolder) -> dict[str, Any]:
    """What the page says of one sweep, as texts; the template ``report.html.j2`` says what stands where.

    ``found`` is the verdict as blocks: a table as rows of cells, or lines of text. ``words`` are what the names on the
    page mean.
    """
    results, config = SweepResults.of(folder), _configuration(folder)
    rows = results.rows
    question = results.asked[0] if results.asked else None
    panels = results.panels(question) if question is not None else []
    bad = [r for r in rows if r.get("status") == "failed"]
    verdict, outcomes = blocks(folder.json("verdict.json", [])), results.outcomes()
    return dict(
        title=config.title or f"Experiment {config.name}",
        question=config.question,
        kind=", ".join(origin_of(good(rows)).kinds) or "failed",
        counted=results.counted(),
        failed=len(bad),
        outcomes=outcomes,
        axes=question.axes(outcomes[0]) if question is not None and outcomes else "",
        found=[(table, cells(lines) if table else "\n".join(lines)) for table, lines in verdict],
        figures=[_figure(file, config, results) for file in sorted(folder.path.glob("*.svg"))],
        crossovers=[(p.label, n, c.describe(question.unit)) for p in panels if question is not None
                    for n, c in results.crossings(p, question).items()],
        tables=[_table(panel, question) for panel in panels] if question is not None else [],
        words=_words(rows, question),
        failures=failures(rows),
        traceback=str(bad[0].get("traceback")) if bad else "",
        settings=_settings(rows, config),
        facts=_facts(folder, rows),
        command=shlex.join(["python", "-m", "experiments.run", *folder.read_json("sweep.json")["command"]]),
        configuration=OmegaConf.to_yaml(config),
    )  # fmt: skip


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


def _configuration(folder: ResultFolder) -> DictConfig:
    first = min((folder.path / "points").glob("*.yaml"), key=lambda p: int(p.stem), default=None)
    if first is None:
        raise InputError(f"{folder.path} holds no configuration of a point")
    found = OmegaConf.load(first)
    assert isinstance(found, DictConfig)
    return found


def _figure(file: Path, config: DictConfig, results: SweepResults) -> dict[str, str]:
    by_name = {f"{config.name}_{q.y}": q for q in results.asked[1:]} | {str(config.name): q for q in results.asked[:1]}
    svg = base64.b64encode(file.read_bytes()).decode()
    return {"base64": svg, "caption": _caption(by_name.get(file.stem), results)}


def _caption(question: Question | None, results: SweepResults) -> str:
    panels = results.panels(question) if question is not None else []
    if question is None or not panels:
        return "Figure of the sweep."
    text = f"{question.shown(panels[0])} against {question.x_label or question.x}."
    if question.base(panels[0]):
        text += f" Each curve is divided by {question.baseline} at the same point, so that 1 is {question.baseline}."
    text += " Solid lines with markers: our points, bars from the smallest to the largest repeat."
    return text + " Dashed: closed form. Crosses: published points. Dotted line and grey band: crossover and interval."


def _table(panel: Panel, question: Question) -> dict[str, Any]:
    """Mean y of every series at every x, with the gain where there is a baseline."""
    base = question.base(panel)
    measured = panel.origin.kinds == ("measured",)
    gained = {s.name: gains(base, s, measured, question.lower_is_better) if base else {} for s in panel.series}
    rows = []
    for x in sorted({x for s in panel.series for x in s.samples}):
        texts = [f"{x:.4g}"]
        for s in panel.series:
            gain = f", {gained[s.name][x]}" if s is not base and x in gained[s.name] else ""
            repeats = f" n={len(s.samples[x])}" if len(s.samples.get(x, ())) > 1 else ""
            texts.append(f"{s.mean(x):.4g}{gain}{repeats}" if x in s.samples else "-")
        rows.append(tuple(texts))
    header = (question.x_label or question.x, *(s.name for s in panel.series))
    over = f", and how many times that of {base.name}" if base else ""
    caption = f"{question.y_label or question.y}, mean of the repeats{over}"
    title = panel.label or "Values"
    return {"title": title, "origin": str(panel.origin), "header": header, "rows": rows, "caption": caption}


WORDS = {
    "GPU rows, CPU rows": "requests whose K,V lie on the GPU, and requests whose K,V lie in host memory, where the CPU "
                          "computes their attention",
    "gain": "throughput over that of the baseline at the same point: 1.10x is a tenth more. The range behind it is the "
            "95 % interval",
    "TPOT": "time per output token of a request: what its reader waits for each word",
    "pays from": "the point of the x axis from which the gain is above 1",
}  # fmt: skip

KINDS = {
    "simulated": "computed by the simulator from profiles of machines; nothing is noise",
    "measured": "timed on a real device; a difference without an interval may be noise",
}


def _words(rows: list[dict[str, Any]], question: Question | None) -> Table:
    """The policies of the rows by the first line of their classes, and the words of the tables."""
    names = dict.fromkeys(str(row["policy"]) for row in rows)
    policies = [(n, " ".join((POLICIES[n].__doc__ or "").partition("\n\n")[0].replace("``", "").split()))
                for n in names if n in POLICIES]  # fmt: skip
    kinds = [(kind, KINDS[kind]) for kind in dict.fromkeys(str(r.get("kind")) for r in rows) if kind in KINDS]
    return [*policies, *(WORDS.items() if question is not None else ()), *kinds]


def _settings(rows: list[dict[str, Any]], config: DictConfig) -> Table:
    """What was swept with its values, then the experiment's settings that were not."""
    swept = {
        column: ", ".join(dict.fromkeys(str(row.get(column)) for row in rows)) for _, column in swept_columns(rows)
    }
    plain = OmegaConf.to_container(config.settings)
    assert isinstance(plain, dict)
    about = {name: ", ".join(dict.fromkeys(str(row.get(name)) for row in rows)) for name in ("model", "hardware")}
    fixed = {**about, **plain}
    return [*((f"swept: {name}", values) for name, values in swept.items()),
            *((str(n), str(v)) for n, v in fixed.items() if v is not None and n not in swept)]  # fmt: skip


def _facts(folder: ResultFolder, rows: list[dict[str, Any]]) -> Table:
    origin = origin_of(good(rows))
    return [
        ("when", folder.read_json("sweep.json").get("began", folder.path.name)),
        ("kind", ", ".join(origin.kinds)),
        ("device", ", ".join(origin.devices)),
        ("profile", ", ".join(origin.profiles)),
        ("commit", ", ".join(origin.commits)),
        *(("machine", line) for line in busy_lines(rows)),
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
