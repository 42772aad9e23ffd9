"""Gain and price together: what a panel says for those who want one line of it.

    panel -> the point where a series gains most over the baseline, with the interval of that gain
          -> time per output token of the rows of both tiers there, and how many times the baseline's that is
          -> from which x on it pays

A gain whose interval holds 1, or of two runs of the same ops, is no difference: nothing is called best for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hybridattn.analysis.crossing import Crossing, Gain, gains
from hybridattn.analysis.series import Panel, Question, Row, Series

TPOT = (("gpu_tpot_ns", "tpot_gpu_tier_mean_ns"), ("cpu_tpot_ns", "tpot_cpu_tier_mean_ns"))  # names in rows, by tier
HEAD = ("setting", "best", "at", "gain", "TPOT GPU rows", "TPOT CPU rows", "pays from")
SLOWER = 3.0  # a time per output token this many times the baseline's is said beside the gain


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best point of a panel.

    best : name of the series; empty where none can be told from the baseline; the baseline where all others lose
    gain : of the best other series over the baseline at the same x; None where there is no baseline
    value : mean y there
    tpot_ns : of the rows on the GPU tier and on the CPU tier; None where there are none, or it was not measured
    base_tpot_ns : of the baseline's rows at the same x
    pays : where the best series begins to pay
    """

    label: str
    best: str
    x: float
    value: float
    gain: Gain | None
    tpot_ns: tuple[float | None, float | None] = (None, None)
    base_tpot_ns: float | None = None
    pays: Crossing | None = None

    def cells(self, question: Question) -> tuple[str, ...]:
        """Under ``HEAD``."""
        label = question.y_label or question.y
        unit = label.partition("[")[2].rstrip("]")
        value = _time(self.value) if unit == "ns" else f"{self.value:.4g} {unit}".rstrip()
        best, gain = self.best, value if self.gain is None else str(self.gain)
        if self.gain is not None and self.best in ("", question.baseline):
            best = best or f"none distinguishable from {question.baseline}"
            gain = f"others: at most {gain}"
        pays = "" if self.pays is None else self.pays.short()
        return (self.label, best, f"{self.x:.4g}", gain, *map(self._tpot, self.tpot_ns), pays)

    def _tpot(self, tpot_ns: float | None) -> str:
        if tpot_ns is None:
            return "-"
        times = tpot_ns / self.base_tpot_ns if self.base_tpot_ns else 0.0
        return _time(tpot_ns) + (f" ({times:.0f} times as long)" if times >= SLOWER else "")


def _time(ns: float) -> str:
    return f"{ns / 1e6:.3g} ms" if ns < 1e9 else f"{ns / 1e9:.3g} s"


def outcome(panel: Panel, question: Question, found: Mapping[str, Crossing]) -> Outcome:
    """The outcome of a panel; ``found`` are the crossovers of its series."""
    lower = question.lower_is_better
    base = panel.find(question.baseline) if question.baseline else None
    others = [s for s in panel.series if s is not base]
    if base is None or not others:
        best, x = (min if lower else max)(((s, x) for s in panel.series for x in s.xs), key=lambda c: c[0].mean(c[1]))
        return Outcome(panel.label, best.name, x, best.mean(x), None, _tpots(best, x))
    measured = panel.origin.kinds == ("measured",)
    points = [(g, x, s) for s in others for x, g in gains(base, s, measured, lower).items()]
    if not points:
        return Outcome(panel.label, "", base.xs[0], base.mean(base.xs[0]), Gain(1.0, note="nothing to compare"))
    gain, x, best = max(points, key=lambda p: (p[0].sure and p[0].mean > 1, p[0].mean))
    if not gain.sure or gain.mean <= 1:
        lost = all(g.sure for g, _, _ in points)
        return Outcome(panel.label, base.name if lost else "", x, base.mean(x), gain, _tpots(base, x))
    return Outcome(
        panel.label, best.name, x, best.mean(x), gain, _tpots(best, x),
        _tpots(base, x)[0], found.get(best.name),
    )  # fmt: skip


def _tpots(series: Series, x: float) -> tuple[float | None, float | None]:
    """Mean time per output token [ns] of a series at ``x`` on the GPU tier and on the CPU tier."""
    rows = series.rows.get(x, ())
    return _mean(rows, TPOT[0]), _mean(rows, TPOT[1])


def _mean(rows: Iterable[Row], names: Sequence[str]) -> float | None:
    found = [float(row[name]) for row in rows for name in names if row.get(name) is not None]
    return fmean(found) if found else None
