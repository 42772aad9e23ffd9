"""Rows of a sweep as panels of series: what figures and crossovers are made of.

rows -> one panel for each value of the panel columns -> one series for each policy -> samples at each x
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from hybridattn.core.errors import InputError

Row = Mapping[str, Any]
MANY = 3  # more profiles than this are not all named in a title


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

    def __post_init__(self) -> None:
        if not self.x or not self.y:
            raise InputError(f"a question needs columns for x and y, got '{self.x}' and '{self.y}'")
        if self.relative and not self.baseline:
            raise InputError("a relative question needs a baseline")


@dataclass(frozen=True, slots=True)
class Series:
    """Samples at each x, repeats in their order."""

    name: str
    samples: Mapping[float, tuple[float, ...]]

    @property
    def xs(self) -> list[float]:
        return sorted(self.samples)

    def mean(self, x: float) -> float:
        return fmean(self.samples[x])


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


def panels_of(rows: Iterable[Row], question: Question) -> list[Panel]:
    """Panels in order of appearance; empty when no row answers the question. Each kind gets panels of its own."""
    groups: dict[str, list[Row]] = {}
    answers = [r for r in good(rows) if r.get(question.x) is not None and r.get(question.y) is not None]
    mixed = len({r.get("kind") for r in answers}) > 1
    columns = ("kind", *question.panels) if mixed else question.panels
    for row in answers:
        groups.setdefault(_label(row, columns), []).append(row)
    return [Panel(label, _series(mine, question), origin_of(mine), tuple(mine)) for label, mine in groups.items()]


def _label(row: Row, columns: Sequence[str]) -> str:
    parts = []
    for column in columns:
        value = row.get(column)
        parts.append(str(value) if isinstance(value, str) else f"{column.replace('_', ' ')} {value}")
    return ", ".join(parts)


def _series(rows: Sequence[Row], question: Question) -> tuple[Series, ...]:
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        samples = found.setdefault(str(row.get(question.series)), {})
        samples.setdefault(float(row[question.x]), []).append(float(row[question.y]))
    return tuple(Series(name, {x: tuple(ys) for x, ys in at.items()}) for name, at in found.items())


def gains(panel: Panel, name: str, baseline: str) -> dict[float, float]:
    """Mean of series ``name`` over the mean of the baseline, at every x that both have."""
    mine, base = panel.find(name), panel.find(baseline)
    if mine is None or base is None:
        return {}
    return {x: mine.mean(x) / base.mean(x) for x in mine.xs if x in base.samples and base.mean(x) > 0}
