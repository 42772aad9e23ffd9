"""On-line correction: prices follow what the machine really takes, as an exponentially weighted moving average."""

from __future__ import annotations

from hybridattn.core.errors import InputError


class Correction:
    """Factors by (lane, kind), learnt from measured against priced times. One instance belongs to one engine.

    ``factor <- factor + weight * (measured / priced - factor)``, starting at 1, clamped to ``[1 / limit, limit]`` so
    that one absurd measurement (a stopped process) cannot blind the policy for long.

    Parameters
    ----------
    weight : float
        Share of the newest measurement, in (0, 1].
    limit : float
        Largest factor believed, at least 1.
    """

    __slots__ = ("_factors", "limit", "weight")

    def __init__(self, weight: float = 0.1, limit: float = 10.0) -> None:
        if not 0 < weight <= 1:
            raise InputError(f"weight must be in (0, 1], got {weight}")
        if not limit >= 1:
            raise InputError(f"limit must be at least 1, got {limit}")
        self.weight = weight
        self.limit = limit
        self._factors: dict[tuple[str, str], float] = {}

    def observe(self, lane: str, kind: str, priced_ns: int, measured_ns: int) -> None:
        """Learn from one op: its uncorrected price and what it took. A price of 0 teaches nothing."""
        if priced_ns < 0 or measured_ns < 0:
            raise InputError(
                f"{kind} on {lane}: priced {priced_ns} ns, measured {measured_ns} ns; neither may be negative"
            )
        if priced_ns == 0:
            return
        ratio = min(max(measured_ns / priced_ns, 1 / self.limit), self.limit)
        old = self._factors.get((lane, kind), 1.0)
        self._factors[lane, kind] = old + self.weight * (ratio - old)

    def factor(self, lane: str, kind: str) -> float:
        """What prices of ``kind`` on ``lane`` are multiplied by; 1 before the first observation."""
        return self._factors.get((lane, kind), 1.0)
