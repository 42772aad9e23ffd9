"""Rows of a sweep as panels of series: what figures and crossovers are made of.

rows -> one panel for each value of the panel columns -> one series for each policy -> samples at each x

Samples at one x are repeats of one setting. A swept key that the question does not name, but in which rows of one point
of a curve would differ, tells them apart: an option of a policy makes a series for each value, any other key a panel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from hybridattn.core.errors import InputError

Row = Mapping[str, Any]
MANY = 3  # more profiles than this are not all named in a title
KEY = re.compile(r"(?:^| )[+~]*([A-Za-z_][\w./]*)=")  # of an override in the id of a point
REPEATS = ("repeat", "seed")  # rows that differ in these alone are draws of one setting
OF_A_RUN = ("point_id", "point", "took_s", *REPEATS)  # columns in which copies differ


@dataclass(frozen=True, slots=True)
class Question:
    """What a sweep asks of its rows.

    Parameters
    ----------
    x, y : str
        Columns. Rows without one of them (failed points) are left out.
    series : str
        Column that tells the curves of a panel apart.
    panels : tuple of str
        Columns whose values make a panel each.
    baseline, candidate : str
        Series compared for the crossover: from which x on is the candidate's y above the baseline's?
    panel : str
        Label of the panel whose crossover is the sweep's answer; empty: the first.
    relative : bool
        Show y over the baseline's y at the same x.
    lower_is_better : bool
        Less of y is an improvement.
    """

    x: str
    y: str
    series: str = "policy"
    panels: tuple[str, ...] = ()
    baseline: str = ""
    candidate: str = ""
    panel: str = ""
    relative: bool = True
    x_label: str = ""
    y_label: str = ""
    unit: str = ""
    log_x: bool = False
    log_y: bool = False
    lower_is_better: bool = False

    def __post_init__(self) -> None:
        if not self.x or not self.y:
            raise InputError(f"a question needs columns for x and y, got '{self.x}' and '{self.y}'")
        if self.relative and not self.baseline:
            raise InputError("a relative question needs a baseline")

    def shown(self, panel: Panel) -> str:
        """What the y axis of ``panel`` shows: y, or y over that of the baseline where the panel has one."""
        label = self.y_label or self.y
        return f"{label.partition(' [')[0]} / {self.baseline}" if self.base(panel) else label

    def axes(self, columns: Iterable[str]) -> str:
        """What a table of outcomes of this question, with these columns, must say beside it."""
        label = self.y_label or self.y
        over = f"gain: {label.partition(' [')[0]} over {self.baseline}" if "gain" in columns else f"value: {label}"
        return f"at, pays from: {self.x_label or self.x}; {over}"

    def base(self, panel: Panel) -> Series | None:
        """The series that the others are divided by; None where they are shown as they are."""
        return panel.find(self.baseline) if self.relative else None


@dataclass(frozen=True, slots=True)
class Series:
    """Samples at each x, repeats in their order.

    ``rows`` : the rows behind the samples.
    """

    name: str
    samples: Mapping[float, tuple[float, ...]]
    rows: Mapping[float, tuple[Row, ...]] = field(default_factory=dict, repr=False)

    @property
    def xs(self) -> list[float]:
        return sorted(self.samples)

    def mean(self, x: float) -> float:
        return fmean(self.samples[x])

    def same_ops(self, other: Series, x: float) -> bool:
        """Whether neither had a row on the CPU tier at ``x``: what tells them apart there is noise."""
        rows = [*self.rows.get(x, ()), *other.rows.get(x, ())]
        return bool(rows) and all(row.get("cpu_rows") == 0 for row in rows)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the numbers of a panel come from."""

    kinds: tuple[str, ...]
    devices: tuple[str, ...]
    profiles: tuple[str, ...]
    commits: tuple[str, ...]

    def __str__(self) -> str:
        kind, device, commit = (", ".join(values) or "unknown" for values in (self.kinds, self.devices, self.commits))
        profile = ", ".join(self.profiles) or "unknown"
        if len(self.profiles) > MANY:  # all of them are in the rows and in the report
            profile = f"{self.profiles[0]} to {self.profiles[-1]} ({len(self.profiles)} in all)"
        if self.kinds == ("simulated",):
            return f"simulated with profile {profile}, commit {commit}"
        return f"{kind} on {device}, {profile}, commit {commit}"


@dataclass(frozen=True, slots=True)
class Panel:
    """The series of one setting. ``rows`` are its good rows."""

    label: str
    series: tuple[Series, ...]
    origin: Origin
    rows: tuple[Row, ...] = field(repr=False)

    def find(self, name: str) -> Series | None:
        return next((s for s in self.series if s.name == name), None)


def good(rows: Iterable[Row]) -> list[Row]:
    """Rows of points that ran."""
    return [r for r in rows if r.get("status", "ok") == "ok"]


def origin_of(rows: Iterable[Row]) -> Origin:
    """Distinct provenance of rows, in order of appearance. Rows of several kinds are refused: they share no figure."""
    rows = list(rows)
    names = ("kind", "device", "profile", "commit")
    kinds, devices, profiles, commits = (
        tuple(dict.fromkeys(str(r[n]) for r in rows if r.get(n) is not None)) for n in names
    )
    if len(kinds) > 1:
        raise InputError(f"rows that are {' and '.join(kinds)} cannot share a figure or a table")
    return Origin(kinds, devices, profiles, commits)


def without_copies(rows: Iterable[Row]) -> list[Row]:
    """Rows without those simulated repeats that equal another row in everything."""
    seen: set[str] = set()
    kept = []
    for row in rows:
        what = repr(sorted((k, v) for k, v in row.items() if k not in OF_A_RUN))
        if row.get("kind") != "simulated" or row.get("status") != "ok" or not row.get("repeat") or what not in seen:
            kept.append(row)
        seen.add(what)
    return kept


def panels_of(rows: Iterable[Row], question: Question) -> list[Panel]:
    """Panels in order of appearance; empty when no row answers the question. Each kind gets panels of its own."""
    groups: dict[str, list[Row]] = {}
    answers = [r for r in good(rows) if r.get(question.x) is not None and r.get(question.y) is not None]
    curves, panels = told_apart(answers, question)
    mixed = len({r.get("kind") for r in answers}) > 1
    columns = ("kind", *panels) if mixed else panels
    for row in answers:
        groups.setdefault(_label(row, columns), []).append(row)
    return [Panel(label, _series(mine, question, curves), origin_of(mine), tuple(mine))
            for label, mine in groups.items()]  # fmt: skip


def told_apart(rows: Sequence[Row], question: Question) -> tuple[list[str], list[str]]:
    """Further columns that tell series apart, and all columns that tell panels apart."""
    curves: list[str] = []
    panels = list(question.panels)
    for key, column in swept_columns(rows):
        cells: dict[Any, set[Any]] = {}
        for row in rows:
            at = tuple(row.get(c) for c in (question.x, question.series, *curves, *panels, "kind"))
            cells.setdefault(at, set()).add(row.get(column))
        if any(len(values) > 1 for values in cells.values()):
            (curves if key.startswith("policy.") else panels).append(column)
    return curves, panels


def swept_columns(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Swept keys with the columns that hold their values: ``a.b.mean`` stands in ``b.mean`` where another key took
    ``mean``."""
    found: dict[str, str] = {}
    for row in rows:
        for key in KEY.findall(str(row.get("point_id", ""))):
            last = key.split(".")[-1]
            column = next((c for c in (".".join(key.split(".")[-2:]), last) if c in row), "")
            if column and last not in REPEATS:
                found.setdefault(key, column)
    return list(found.items())


def _label(row: Row, columns: Sequence[str]) -> str:
    values = ((c, row.get(c)) for c in columns)
    return ", ".join(v if isinstance(v, str) else f"{c.replace('_', ' ')} {v}" for c, v in values if v is not None)


def _series(rows: Sequence[Row], question: Question, more: Sequence[str]) -> tuple[Series, ...]:
    found: dict[str, dict[float, list[Row]]] = {}
    for row in rows:
        options = [f"{c.replace('_', ' ')} {row[c]}" for c in more if row.get(c) is not None]
        samples = found.setdefault(", ".join([str(row.get(question.series)), *options]), {})
        samples.setdefault(float(row[question.x]), []).append(row)
    return tuple(
        Series(name, {x: tuple(float(r[question.y]) for r in mine) for x, mine in at.items()},
               {x: tuple(mine) for x, mine in at.items()})
        for name, at in found.items()
    )  # fmt: skip
