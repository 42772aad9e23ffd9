"""When requests come: all at once, Poisson, gamma gaps, a closed loop. And synthetic workloads made of these."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridattn.core.errors import InputError
from hybridattn.workload.item import WorkItem, Workload
from hybridattn.workload.lengths import Lengths


class Arrivals(Protocol):
    """A process of arrivals; the first is at 0."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """``count`` times [ns], int64 of shape [count], not decreasing."""
        ...


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """Everything at 0: offline inference."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.zeros(count, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gamma gaps of mean ``1 / rate_per_s``.

    ``burstiness`` is the shape: 1 is a Poisson process, below 1 is burstier (the gaps' coefficient of variation is
    ``1 / sqrt(burstiness)``), large is nearly even.
    """

    rate_per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "burstiness"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise InputError(f"{name} must be positive and finite, got {value}")

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        gaps = rng.gamma(self.burstiness, 1e9 / (self.rate_per_s * self.burstiness), max(0, count - 1))
        since_first = np.cumsum(gaps)
        if count > 1 and not since_first[-1] < 2.0**63:
            raise InputError(f"rate_per_s {self.rate_per_s} puts {count} arrivals over more than 292 years")
        times = np.zeros(count, dtype=np.int64)
        times[1:] = since_first
        return times


@dataclass(frozen=True, slots=True)
class Poisson:
    """Exponential gaps: ``Gamma`` with burstiness 1."""

    rate_per_s: float

    def __post_init__(self) -> None:
        Gamma(self.rate_per_s)

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return Gamma(self.rate_per_s).draw(rng, count)


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """At most ``concurrency`` requests at a time; the next comes ``think_ns`` after one ends (see ``item.Feed``)."""

    concurrency: int
    think_ns: int = 0

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.zeros(count, dtype=np.int64)


def synthetic(
    count: int, arrivals: Arrivals, prompts: Lengths, outputs: Lengths, seed: int = 0, name: str = "synthetic"
) -> Workload:
    """``count`` requests with lengths and arrivals drawn independently.

    Each of the three draws from its own stream of the seed, so that changing one leaves the other two as they were.
    """
    if count < 1:
        raise InputError(f"count must be at least 1, got {count}")
    streams = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3)]
    times = arrivals.draw(streams[0], count)
    tokens_in, tokens_out = prompts.draw(streams[1], count), outputs.draw(streams[2], count)
    rows = zip(times.tolist(), tokens_in.tolist(), tokens_out.tolist(), strict=True)
    closed = arrivals if isinstance(arrivals, ClosedLoop) else None
    return Workload(
        name,
        tuple(WorkItem(*row) for row in rows),
        concurrency=closed.concurrency if closed else None,
        think_ns=closed.think_ns if closed else 0,
    )
