"""The price of an op on a machine: which model prices which kind of work on which lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from hybridattn.core.errors import InputError
from hybridattn.core.op import LANES, Op, Work


class PriceModel(Protocol):
    """``Roofline``, ``Table`` or another pure function of ``Work``."""

    def price_ns(self, work: Work) -> int: ...


class Together(Work):
    """Several kernels launched as one op (decode rows beside a prefill, the last layer and the head): prices add up.

    A single roofline over their sums would hide the bytes of one under the flops of the other.
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: Work) -> None:
        if not parts:
            raise InputError("Together needs at least one part, got none")
        super().__init__(
            "together",
            sum(p.flops for p in parts),
            sum(p.num_bytes for p in parts),
            max(p.rows for p in parts),
            sum(p.kv_tokens for p in parts),
        )
        self.parts = parts


@dataclass(frozen=True, slots=True)
class Constant:
    """The same price for all work, e.g. an op that only launches."""

    took_ns: int

    def __post_init__(self) -> None:
        if self.took_ns < 0:
            raise InputError(f"took_ns must not be negative, got {self.took_ns}")

    def price_ns(self, work: Work) -> int:
        return self.took_ns


@dataclass(frozen=True, slots=True)
class Pricing:
    """Prices of a machine.

    Parameters
    ----------
    name : str
        The machine, for messages and titles.
    fingerprint : str
        Of the profiles behind the models; goes into every row of a simulation.
    models : mapping of (lane, kind) to PriceModel
        What was measured or modelled. Anything else is refused, never guessed.
    contention : mapping of (lane, other lane) to float, optional
        Factor (>= 1) on prices of ``lane`` while ``other lane`` is busy: copies and CPU attention share the DRAM.

    Notes
    -----
    Called once per op in the simulator's inner loop: two dict look-ups and one method call. Prices beside busy lanes
    take the slower way.
    """

    name: str
    fingerprint: str
    models: Mapping[tuple[str, str], PriceModel]
    contention: Mapping[tuple[str, str], float] = field(default_factory=dict)
    _by_lane: dict[str, dict[str, Callable[[Work], int]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_lane: dict[str, dict[str, Callable[[Work], int]]] = {lane: {} for lane in LANES}
        for (lane, kind), model in self.models.items():
            if lane not in by_lane:
                raise InputError(f"pricing {self.name}: lane '{lane}' is none of {', '.join(LANES)}")
            by_lane[lane][kind] = model.price_ns
        for (lane, other), factor in self.contention.items():
            if lane not in by_lane or other not in by_lane or not factor >= 1:
                raise InputError(f"pricing {self.name}: contention of {lane} with {other} is {factor}, must be >= 1")
        object.__setattr__(self, "_by_lane", by_lane)

    def price_ns(self, op: Op, busy: tuple[str, ...] = ()) -> int:
        """Time of ``op`` on its lane [ns].

        Parameters
        ----------
        busy : tuple of str
            Other lanes with work in flight when the op starts, for contention.

        Raises
        ------
        InputError
            The kind of work was neither measured nor modelled on that lane.
        """
        work = op.work
        model = self._by_lane[op.lane].get(work.kind)
        if model is not None and not busy:
            return model(work)
        return self._slow_price_ns(op.lane, work, busy)

    def work_ns(self, lane: str, work: Work) -> int:
        """Time of ``work`` on ``lane`` without contention [ns]: what policies and plans ask."""
        return self._slow_price_ns(lane, work, ())

    def _slow_price_ns(self, lane: str, work: Work, busy: tuple[str, ...]) -> int:
        if isinstance(work, Together):
            return sum(self._slow_price_ns(lane, part, busy) for part in work.parts)
        model = self._by_lane.get(lane, {}).get(work.kind)
        if model is None:
            known = ", ".join(self._by_lane.get(lane, {})) or "nothing"
            raise InputError(
                f"pricing {self.name} has no price for '{work.kind}' on lane {lane}: neither measured nor modelled "
                f"there (it prices {known})"
            )
        factor = 1.0
        for other in busy:
            factor *= self.contention.get((lane, other), 1.0)
        return round(model(work) * factor)
