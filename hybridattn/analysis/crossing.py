"""The crossover of a sweep: from which x on is one series above another, and how sure is that?

    gain = mean of the candidate / mean of the baseline, at each x

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridattn.analysis.series import Series
from hybridattn.core.errors import InputError

MIN_REPEATS = 3
SURE = 0.95  # share of the bootstrap's draws that must agree with what is said, or it is said too
EQUAL = 1e-6  # gains this close to 1 are equal: a policy that does the same as the baseline does not pay
STATES = ("found", "never", "always", "unknown")


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a candidate begins to pay.

    Parameters
    ----------
    state : str
        ``found``; ``never`` (at no x of the sweep); ``always`` (already at the smallest x); ``unknown`` (nothing to
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
        if self.state not in STATES:
            raise InputError(f"state '{self.state}' of a crossing is none of {', '.join(STATES)}")

    def describe(self, unit: str = "") -> str:
        """One clause for people."""
        if self.state == "never":
            text = "no crossover in range: it pays nowhere"
        elif self.state == "always":
            text = "no crossover in range: it pays from the smallest point on"
        elif self.state == "unknown":
            return "no crossover: there is nothing to compare"
        else:
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
    baseline: Series | None, candidate: Series | None, log_x: bool = False, draws: int = 1000, seed: int = 0
) -> Crossing:
    """The crossing of two series with its interval (95 %)."""
    if baseline is None or candidate is None:
        return Crossing("unknown")
    xs = [x for x in candidate.xs if x in baseline.samples and baseline.mean(x) > 0]
    found = crossing({x: candidate.mean(x) / baseline.mean(x) for x in xs}, log_x)
    if found.state == "unknown":
        return found
    repeats = min(min(len(s.samples[x]) for x in xs) for s in (baseline, candidate))
    if repeats >= MIN_REPEATS:
        return _bootstrap(found, baseline, candidate, xs, log_x, draws, seed)
    if found.value is None:
        return found
    if repeats > 1:  # two repeats tell of noise, but not enough for an interval
        method = f"no interval from {repeats} repeats"
        return Crossing("found", found.value, until=found.until, method=method)
    below = max(x for x in xs if x <= found.value)
    above = min(x for x in xs if x > below)  # the first point that pays lies above the value
    return Crossing("found", found.value, below, above, found.until, method="grid points around it")


def _bootstrap(
    found: Crossing,
    baseline: Series,
    candidate: Series,
    xs: Sequence[float],
    log_x: bool,
    draws: int,
    seed: int,
) -> Crossing:
    rng = np.random.default_rng(seed)
    means = {}
    for x in xs:
        pair = []
        for series in (candidate, baseline):
            samples = np.array(series.samples[x])
            pair.append(samples[rng.integers(0, len(samples), (draws, len(samples)))].mean(axis=1))
        means[x] = pair[0] / pair[1]
    values = []
    for i in range(draws):
        drawn = crossing({x: float(means[x][i]) for x in xs}, log_x)
        values += [] if drawn.value is None else [drawn.value]
    share = len(values) / draws
    if found.value is None:
        return Crossing(found.state, until=found.until, share=share)
    low, high = (float(v) for v in np.percentile([*values, found.value], (2.5, 97.5)))
    return Crossing("found", found.value, low, high, found.until, share, "95 % bootstrap interval")
