"""The rows of a result folder, as tables, figures and what follows from them: ``hybridattn.open_results(folder)``.

>>> results = hybridattn.open_results("results/ratio/latest")
>>> results.table()          # a pandas table, or a list of dicts where pandas is not installed
>>> results.plot()           # the figure of the sweep, drawn in a notebook as it is
>>> results.outcomes()       # per panel: the best policy, its gain, its price, and from where on it pays
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridattn.analysis.crossing import Crossing, crossover
from hybridattn.analysis.outcome import HEAD, outcome
from hybridattn.analysis.results import ResultFolder
from hybridattn.analysis.series import Panel, Question, good, panels_of, without_copies
from hybridattn.core.errors import InputError

if TYPE_CHECKING:
    from hybridattn.analysis.figure import Drawing
    from hybridattn.analysis.theory import Line

ASKED = "question.json"  # title, questions, and what is drawn beside the first one's points, as configured


@dataclass(frozen=True, slots=True, repr=False)
class SweepResults:
    """What a folder held when it was opened; a sweep that is still running is opened again.

    rows : as the points left them, failed ones included
    asked : the questions that figures answer, that of the sweep first
    points : how many points the sweep has
    theory, published : the closed form and the published points that are drawn beside those of the first question
    """

    folder: ResultFolder
    rows: list[dict[str, Any]]
    asked: tuple[Question, ...] = ()
    title: str = ""
    points: int = 0
    theory: str = ""
    published: Sequence[Mapping[str, str]] = ()

    @classmethod
    def of(cls, folder: ResultFolder) -> SweepResults:
        """Reads the folder."""
        rows, document = folder.rows(), folder.json(ASKED, {})
        asked = tuple(Question(**{**q, "panels": tuple(q["panels"])}) for q in document.get("asked", ()))
        points = len(folder.json("sweep.json", {}).get("points", ()))
        beside = {name: document[name] for name in ("theory", "published") if name in document}
        return cls(folder, rows, asked, document.get("title", ""), points, **beside)

    @property
    def missing(self) -> bool:
        """Whether points have not run, or failed."""
        return len(good(self.rows)) < max(self.points, len(self.rows))

    def counted(self) -> str:
        """``84 points``, or ``17 of 84 points``."""
        ran, total = len(good(self.rows)), max(self.points, len(self.rows))
        return f"{ran} of {total} points" if ran < total else f"{total} points"

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(str(r.get("kind")) for r in good(self.rows))) or "nothing ran yet"
        return f"<{self.folder.path.parent.name}: {self.counted()}, {kinds}, in {self.folder.path}>"

    # -- tables --------------------------------------------------------------------------------------------------

    def table(self) -> Any:
        """Every row with every column: a pandas table where pandas is installed, else a list of dicts."""
        if importlib.util.find_spec("pandas") is None:
            return self.rows
        return importlib.import_module("pandas").DataFrame(self.rows)

    def to_csv(self, path: str | Path) -> Path:
        """Every row with every column, in the order in which columns appear."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(self.rows)
        return Path(path)

    def outcomes(self) -> list[dict[str, str]]:
        """One row for each panel of the sweep's question. None where it asks none, or where nothing says what is best:
        neither a baseline nor policies alone, or a verdict of the experiment's own does."""
        if not self.asked:
            return []
        question = self.asked[0]
        if not question.baseline and (question.series != "policy" or self.folder.json("verdict.json", [])):
            return []
        found = [outcome(p, question, self.crossings(p, question)) for p in self.panels(question)]
        compared = any(o.gain is not None for o in found)
        names = [name if compared or name != "gain" else "value" for name in HEAD]
        return [dict(zip(names, o.cells(question), strict=True)) for o in found]

    # -- curves --------------------------------------------------------------------------------------------------

    def panels(self, question: Question) -> list[Panel]:
        """Panels of the rows that answer ``question``; copies of simulated points count once."""
        return panels_of(without_copies(self.rows), question)

    def crossings(self, panel: Panel, question: Question) -> dict[str, Crossing]:
        """The crossover of every other series over the baseline. A sweep with points to come has none in the end."""
        base = panel.find(question.baseline)
        if base is None:
            return {}
        found = {s.name: crossover(base, s, question.log_x, lower_is_better=question.lower_is_better)
                 for s in panel.series if s is not base}  # fmt: skip
        if not self.missing:
            return found
        return {n: replace(c, state="open") if c.state in ("never", "always") else c for n, c in found.items()}

    def plot(self, **asked: Any) -> Drawing:
        """The figure of the sweep's question, closed form and published points beside it, or the figure of a question
        that differs: ``plot(y="cpu_tpot_ns", relative=False)``.

        Raises
        ------
        InputError
            No question, no row that answers it, or matplotlib is not installed.
        """
        if importlib.util.find_spec("matplotlib") is None:
            raise InputError("figures need matplotlib: pip install 'hybridattn[experiments]'")
        return self.draw(self._question(asked))

    def draw(self, question: Question, paths: Sequence[Path] = ()) -> Drawing:
        """The figure of a question, also written to ``paths``; InputError where no row answers it."""
        figure = importlib.import_module("hybridattn.analysis.figure")  # an extra: tables do without
        panels = self.panels(question)
        if not panels:
            raise InputError(f"no row of {self.folder.path} has both {question.x} and {question.y}")
        found = {p.label: self.crossings(p, question).get(question.candidate) for p in panels}
        return figure.draw_sweep(
            panels, question, paths, title=self.title,
            crossings={label: c for label, c in found.items() if c},
            lines={p.label: self._lines(p, question) for p in panels},
        )  # fmt: skip

    def _lines(self, panel: Panel, question: Question) -> list[Line]:
        """Closed form and published points, which are answers to the first question alone, in the units of its axes."""
        first = self.asked[0] if self.asked else question
        same = all(getattr(first, n) == getattr(question, n) for n in ("x", "y", "relative", "baseline"))
        if not same or (question.relative and not question.base(panel)):
            return []
        theory = importlib.import_module("hybridattn.analysis.theory")
        return [*theory.theory_lines(self.theory, panel, question), *theory.published_lines(self.published, panel)]

    def _question(self, asked: dict[str, Any]) -> Question:
        unknown = [name for name in asked if name not in Question.__dataclass_fields__]
        if unknown:
            raise InputError(f"a question has no '{unknown[0]}'; it has {', '.join(Question.__dataclass_fields__)}")
        if not self.asked:
            return Question(**{"x": "", "y": "", "relative": False, **asked})
        first = self.asked[0]
        same = next((q for q in self.asked if q.y == asked.get("y", first.y)), replace(first, y_label=""))
        return replace(same, **asked)


def open_results(folder: str | Path) -> SweepResults:
    """The results in ``folder`` (``results/NAME/latest``).

    Raises
    ------
    InputError
        The folder has no ``rows.jsonl``.
    """
    return SweepResults.of(ResultFolder.open(Path(folder)))
