"""The crossover of a sweep: from which x on is one series above another, and how sure is that?

    gain = mean of the candidate / mean of the baseline, at each x (the other way round where lower is better)

    gain |                    o----        pays where gain > 1; between two points the line through them (over log x
       1 |- - - - - - x- - - - - -         where the axis is) gives the value
         |   o----o /
         +-------------|----------- x
                  value

Measured points (>= 3 repeats): percentile bootstrap, the repeats of both series drawn again at each x (Efron, 1979).
Simulated points are deterministic: the interval is the pair of grid points around the value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hybridattn.analysis.series import Series
from hybridattn.core.errors import InputError

MIN_REPEATS = 3
SURE = 0.95  # share of the bootstrap's draws that must agree with what is said, or it is said too
EQUAL = 1e-6  # gains this close to 1 are equal: a policy that does the same as the baseline does not pay
SAID = {  # state of a crossing -> what it says
    "found": "", "never": "no crossover in range: it pays nowhere",
    "always": "no crossover in range: it pays from the smallest point on",
    "open": "no crossover among the points that ran so far",
    "same": "runs as the baseline does at every point: no crossover is looked for",
    "unsure": "not distinguishable: the interval of every gain holds 1",
    "unknown": "no crossover: there is nothing to compare",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gain:
    """One series over another at one x: the ratio of their means, with its 95 % interval from enough repeats.

    sure : whether it can be told from 1
    note : what stands behind it where there is no interval, though there is noise
    """

    mean: float
    low: float | None = None
    high: float | None = None
    sure: bool = False
    note: str = ""

    def __str__(self) -> str:
        interval = f"{self.low:.2f} to {self.high:.2f}" if self.low is not None else ""
        behind = "; ".join(filter(None, (interval, self.note or ("" if self.sure else "not distinguishable"))))
        return f"{self.mean:.2f}x" + (f" ({behind})" if behind else "")


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a candidate begins to pay.

    Parameters
    ----------
    state : str
        ``found``; ``never`` (at no x of the sweep); ``always`` (already at the smallest x); ``open`` (points are
        missing); ``same`` (both ran the same ops); ``unsure`` (differences within the noise); ``unknown`` (nothing to
        compare).
    value, low, high : float, optional
        The crossover with its interval, where found; the interval also needs enough repeats.
    until : float, optional
        Where it stops paying again, if it does.
    share : float, optional
        Share of the bootstrap's draws that had a crossing.
    method : str
        How the interval was found.
    """

    state: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    until: float | None = None
    share: float | None = None
    method: str = ""

    def __post_init__(self) -> None:
        if self.state not in SAID:
            raise InputError(f"state '{self.state}' of a crossing is none of {', '.join(SAID)}")

    def short(self) -> str:
        """For a cell of a table: where it pays from."""
        if self.state != "found":
            return {"always": "the smallest point", "never": "nowhere"}.get(self.state, SAID[self.state])
        interval = f" ({self.low:.3g} to {self.high:.3g})" if self.low is not None else ""
        until = f", until {self.until:.3g}" if self.until is not None else ""
        return f"{self.value:.3g}{interval}{until}"

    def describe(self, unit: str = "") -> str:
        """One clause for people."""
        if self.state in ("open", "same", "unsure", "unknown"):
            return SAID[self.state]
        text = SAID[self.state]
        if self.state == "found":
            text = f"pays from {self.value:.3g}{f' {unit}' if unit else ''} on"
            if self.low is not None and self.high is not None:
                text += f" ({self.low:.3g} to {self.high:.3g}, {self.method})"
            elif self.method:
                text += f" ({self.method})"
        if self.until is not None:
            text += f", until {self.until:.3g}"
        if self.share is not None and self.state == "found" and self.share < SURE:
            text += f"; only {self.share:.0%} of the bootstrap's draws cross"
        elif self.share is not None and self.state != "found" and self.share > 1 - SURE:
            text += f"; yet {self.share:.0%} of the bootstrap's draws cross"
        return text


def crossing(gain: Mapping[float, float], log_x: bool = False) -> Crossing:
    """The first x from which ``gain`` exceeds 1, without an interval."""
    xs = sorted(gain)
    if log_x and xs and xs[0] <= 0:
        raise InputError(f"an axis with {xs[0]} cannot be logarithmic")
    if len(xs) < 2:
        return Crossing("unknown")
    pays = [gain[x] > 1 + EQUAL for x in xs]
    if not any(pays):
        return Crossing("never")
    start = pays.index(True)
    end = next((i for i in range(start, len(xs)) if not pays[i]), None)
    until = None if end is None else _between(xs[end - 1], xs[end], gain, log_x)
    if start == 0:
        return Crossing("always", until=until)
    return Crossing("found", _between(xs[start - 1], xs[start], gain, log_x), until=until)


def _between(a: float, b: float, gain: Mapping[float, float], log_x: bool) -> float:
    """Where the line through two neighbours is 1."""
    share = min(max((1 - gain[a]) / (gain[b] - gain[a]), 0.0), 1.0)
    return math.exp(math.log(a) + share * math.log(b / a)) if log_x else a + share * (b - a)


def crossover(
    baseline: Series | None,
    candidate: Series | None,
    log_x: bool = False,
    draws: int = 1000,
    seed: int = 0,
    lower_is_better: bool = False,
) -> Crossing:
    """The crossing of two series with its interval (95 %)."""
    if baseline is None or candidate is None:
        return Crossing("unknown")
    drawn = _drawn(baseline, candidate, draws, seed, lower_is_better)
    xs = list(drawn)
    gain = {x: _mean_gain(baseline, candidate, x, lower_is_better) for x in xs}
    found = crossing(gain, log_x)
    if found.state == "unknown":
        return found
    if all(abs(g - 1) <= EQUAL for g in gain.values()):
        return Crossing("same")
    repeats = min(min(len(s.samples[x]) for x in xs) for s in (baseline, candidate))
    if repeats >= MIN_REPEATS:
        return _with_interval(found, drawn, log_x)
    if found.value is None:
        return found
    if repeats > 1:  # two repeats tell of noise, but not enough for an interval
        method = f"no interval from {repeats} repeats"
        return Crossing("found", found.value, until=found.until, method=method)
    below = max(x for x in xs if x <= found.value)
    above = min(x for x in xs if x > below)  # the first point that pays lies above the value
    return Crossing("found", found.value, below, above, found.until, method="grid points around it")


def gains(
    baseline: Series, candidate: Series, measured: bool = False, lower_is_better: bool = False
) -> dict[float, Gain]:
    """The gain at every x that both have. One of ``measured`` points has an interval, or says that it has none."""
    found = {}
    for x, drawn in _drawn(baseline, candidate, 1000, 0, lower_is_better).items():
        mean = _mean_gain(baseline, candidate, x, lower_is_better)
        repeats = min(len(baseline.samples[x]), len(candidate.samples[x]))
        if baseline.same_ops(candidate, x):
            found[x] = Gain(1.0, note="the same ops")
        elif repeats >= MIN_REPEATS:
            low, high = (float(v) for v in np.percentile(drawn, (2.5, 97.5)))
            found[x] = Gain(mean, low, high, not low <= 1 <= high)
        else:
            runs = f"{repeats} run{'s' if repeats > 1 else ''}, no interval" if measured else ""
            found[x] = Gain(mean, sure=abs(mean - 1) > EQUAL, note=runs)
    return found


def _mean_gain(baseline: Series, candidate: Series, x: float, lower_is_better: bool) -> float:
    if baseline.same_ops(candidate, x):
        return 1.0
    mine, other = candidate.mean(x), baseline.mean(x)
    return other / mine if lower_is_better else mine / other


def _drawn(
    baseline: Series, candidate: Series, draws: int, seed: int, lower_is_better: bool
) -> dict[float, np.ndarray]:
    """The bootstrap's gains at every x that both series have."""
    rng = np.random.default_rng(seed)
    found = {}
    for x in candidate.xs:
        if x not in baseline.samples or baseline.mean(x) <= 0:
            continue
        pair = []
        for series in (candidate, baseline):
            samples = np.array(series.samples[x])
            pair.append(samples[rng.integers(0, len(samples), (draws, len(samples)))].mean(axis=1))
        gain = pair[1] / pair[0] if lower_is_better else pair[0] / pair[1]
        found[x] = np.ones(draws) if baseline.same_ops(candidate, x) else gain
    return found


def _with_interval(found: Crossing, drawn: Mapping[float, np.ndarray], log_x: bool) -> Crossing:
    low_high = [np.percentile(gain, (2.5, 97.5)) for gain in drawn.values()]
    above, below = (any(test) for test in zip(*((low > 1, high < 1) for low, high in low_high), strict=True))
    if not above and (found.state != "never" or not below):
        return Crossing("unsure")
    draws = len(next(iter(drawn.values())))
    one = (crossing({x: float(gain[i]) for x, gain in drawn.items()}, log_x).value for i in range(draws))
    values = [value for value in one if value is not None]
    share = len(values) / draws
    if found.value is None:
        return Crossing(found.state, until=found.until, share=share)
    low, high = (float(v) for v in np.percentile([*values, found.value], (2.5, 97.5)))
    return Crossing("found", found.value, low, high, found.until, share, "95 % bootstrap interval")
