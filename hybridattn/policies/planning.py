"""Choosing a layout: short simulations of every one that is worth trying, and the best that keeps the limits.

    choose:   candidates --> a quick look at each --> a longer one at the best few --> the best of those

A ``LayoutQuestion`` carries all that decides the choice apart from the cost model, so that it may be answered
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from hybridattn.cost.costs import Costs
from hybridattn.policies.estimate import alone_on_cpu
from hybridattn.policies.layouts import Layout, bounded, fixed_layouts, rule_layouts, split_layouts
from hybridattn.policies.load import Limits, Load, Prediction

Predict = Callable[[Load, Layout, Costs, bool], Prediction]

FINALISTS = 5
ROOM = 0.03  # left below a limit: a load is rounded to about 3 % (``Adaptive``), and so is what is predicted for it


@dataclass(frozen=True, slots=True)
class LayoutQuestion:
    """Which layout for a load? With all that decides the answer, except for the cost model.

    ``cpu_factor`` is what CPU attention turned out to take over its price; ``discount`` what the guard learnt;
    ``split`` says that requests may lie on both tiers.
    """

    load: Load
    cpu_factor: float
    limits: Limits
    min_gain: float
    discount: tuple[tuple[Layout, float], ...] = ()
    split: bool = False

    def near(self, other: LayoutQuestion) -> bool:
        """An answer to ``other`` may serve this one until there is a better: loads within a third, all else equal."""
        mine = self.cpu_factor, self.limits, self.min_gain, self.discount, self.split
        theirs = other.cpu_factor, other.limits, other.min_gain, other.discount, other.split
        return mine == theirs and self.load.like(other.load, 3)

    def answer(self, costs: Costs, predict: Predict) -> tuple[Layout, Prediction]:
        """The layout and its prediction (see :func:`choose`)."""
        costs = costs.corrected(self.cpu_factor)
        return choose(self.load, costs, predict, self.limits, self.min_gain, dict(self.discount), self.split)


class AsyncChooser(Protocol):
    """Answers one question at a time, elsewhere (``hybridattn.planning.planner.Planner``). Neither method blocks."""

    cpu_ns: int  # processor time that answers took so far
    known: dict[LayoutQuestion, tuple[Layout, Prediction]]  # answers of earlier runs; those of this one are added

    def ask(self, question: LayoutQuestion) -> None: ...

    def take(self) -> tuple[Layout, Prediction] | None:
        """The answer, once it is there."""
        ...


def choose(
    load: Load,
    costs: Costs,
    predict: Predict,
    limits: Limits,
    min_gain: float = 1.0,
    discount: Mapping[Layout, float] | None = None,
    split: bool = False,
) -> tuple[Layout, Prediction]:
    """The layout with the highest predicted rate that keeps the limits with a little room, and that prediction.

    Parameters
    ----------
    min_gain : float
        Predicted gain over GPU-only that a layout with CPU rows must exceed.
    discount : mapping of Layout to float, optional
        What a layout's predicted rate counts for, where it fell short before.
    split : bool
        Requests may lie on both tiers.
    """
    if not load.gpu_rows:
        layout = alone_on_cpu(load, costs)
        return layout, predict(load, layout, costs, True)
    discount = discount or {}
    alone = Layout("gpu_only")
    base = predict(load, alone, costs, True)
    best, expected, rate = alone, base, base.tokens_per_s * min_gain
    tried = _finalists(load, costs, predict, limits, base, discount)
    most = limits.gpu and limits.gpu * (1 - ROOM)
    over_both = split_layouts(costs, load.gpu_rows, load.cpu_rows, load.context, most) if split else []
    for layout in tried + over_both:
        found = predict(load, layout, costs, True)
        value = found.tokens_per_s * discount.get(layout, 1.0)
        if value > rate and limits.kept_by(found, base.gpu_tpot_ns, slack=-ROOM):
            best, expected, rate = layout, found, value
    return best, expected


def _finalists(
    load: Load, costs: Costs, predict: Predict, limits: Limits, base: Prediction, discount: Mapping[Layout, float]
) -> list[Layout]:
    """The best few by a quick look; with them some that miss a limit by little, which a longer look may find kept."""
    rated: list[tuple[float, int, Layout, bool]] = []
    for i, layout in enumerate(candidates(load, costs, limits)):
        found = predict(load, layout, costs, False)
        if limits.kept_by(found, base.gpu_tpot_ns, slack=0.1):
            kept = limits.kept_by(found, base.gpu_tpot_ns, slack=-ROOM)
            rated.append((-found.tokens_per_s * discount.get(layout, 1.0), i, layout, kept))
    rated.sort()
    chosen = [r for r in rated if r[3]][:FINALISTS]
    chosen += [r for r in rated[:FINALISTS] if not r[3]]
    return [layout for _, _, layout, _ in chosen]


def candidates(load: Load, costs: Costs, limits: Limits) -> list[Layout]:
    """Every layout worth trying: the fixed policies tuned, the local rule; with limits also fewer CPU rows."""
    sizes = load.gpu_rows, load.cpu_rows, load.context
    fixed = fixed_layouts(costs, *sizes)[1:]
    if not limits.any:
        return fixed + rule_layouts(costs, *sizes)
    found = fixed + rule_layouts(costs, *sizes, stretches=(0.1, 0.2), omegas=(0.0, 0.5))
    for share in (2, 4):
        rows = load.cpu_rows // share
        if rows:
            found += bounded(rule_layouts(costs, load.gpu_rows, rows, load.context, (0.2,), (0.0, 0.5)), rows)
    return found
