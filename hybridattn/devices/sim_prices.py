"""What the ops of a simulated device cost: looked up once for each ``Work``, dearer while lanes share bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hybridattn.core.errors import InputError
from hybridattn.core.op import LANES, Op, Work
from hybridattn.cost.pricing import Pricing

MOST_KNOWN = 4096  # prices kept for each lane


class Prices:
    """Prices by a callable ``(Op) -> int``, or by a ``Pricing`` with its contention.

    Prices of a ``Pricing`` are fixed: they are kept by their ``Work``, which the layers of a step share.

    Attributes
    ----------
    known : by lane, the prices of works that hold at any time: look there first. Those of a lane that shares bandwidth
        are not among them.
    """

    __slots__ = ("_alone", "_fixed", "_partners", "_price", "known")

    def __init__(self, price: Callable[[Op], int] | Pricing) -> None:
        self._price: Callable[..., int] = price.price_ns if isinstance(price, Pricing) else price
        self._fixed = isinstance(price, Pricing)
        self.known: dict[str, dict[Work, int]] = {lane: {} for lane in LANES}
        self._partners: dict[str, tuple[str, ...]] = {}
        for lane, other in price.contention if isinstance(price, Pricing) else ():
            self._partners[lane] = (*self._partners.get(lane, ()), other)
        self._alone = {lane: {} if lane in self._partners else known for lane, known in self.known.items()}

    def at(self, op: Op, lane: str, start_ns: int, free_ns: Mapping[str, int]) -> int:
        """The price of an op that starts then, where each lane is busy until ``free_ns``.

        Raises
        ------
        InputError
            The price is negative, or the pricing has none for this work.
        """
        if lane in self._partners:
            busy = tuple([other for other in self._partners[lane] if free_ns[other] > start_ns])
            if busy:
                return _checked(op, self._price(op, busy))
        return self.alone(op, lane)

    def alone(self, op: Op, lane: str) -> int:
        """The price while no other lane is busy."""
        alone = self._alone[lane]
        price = alone.get(op.work)
        if price is None:
            price = _checked(op, self._price(op))
            if self._fixed:
                if len(alone) >= MOST_KNOWN:
                    alone.clear()
                alone[op.work] = price
        return price


def _checked(op: Op, price: int) -> int:
    if price < 0:
        raise InputError(f"{op.describe()} has the negative price {price} ns")
    return price
