"""Who chooses the layout for an adaptive policy: here, while the step waits, or elsewhere, beside the steps.

Here        begin: ask, simulate, take -> the layout from now on (or from ``plan_steps`` later on)
Elsewhere   begin: ask; a closed form's layout at once ... begin: take, nothing yet ... begin: take -> the simulated one
            begin: ask of a load that was answered before, in this run or an earlier one -> that answer at once
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from hybridattn.cost.costs import Costs
from hybridattn.policies.base import StepView
from hybridattn.policies.estimate import at_once, rate
from hybridattn.policies.layouts import Layout
from hybridattn.policies.load import Load, Prediction
from hybridattn.policies.planning import AsyncChooser, LayoutQuestion, Predict

SHARE = 0.05  # of one core that planning beside the steps may take
SETTLE_STEPS = 8  # after a plan that was waited for, before a changed load or what was learnt leads to the next
FIRST_NS = 300_000_000  # what a first answer takes, about; time for it has to be earned as well
MOST_KNOWN = 4096  # answers that are remembered in a run
FACTOR_STEP = 1.25  # between speeds of the CPU that are planned for, where answers are remembered
MATTERS = 0.05  # change of the rate by closed forms below which another speed of the CPU is none


class Answer(NamedTuple):
    """A layout, what is predicted of it and for which load, and who says so."""

    layout: Layout
    expected: Prediction | None
    load: Load
    by: str


class Here:
    """Short simulations, which the step waits for. What planning takes is a stated constant: a layout is used
    ``plan_steps`` after it was asked for, the first one at once."""

    settle_steps = SETTLE_STEPS

    def __init__(self, costs: Costs, predict: Predict, plan_steps: int) -> None:
        self._costs = costs
        self._predict = predict
        self._plan_steps = plan_steps
        self._delay = 0
        self._pending: tuple[int, Answer] | None = None  # step from which on it is used

    def __str__(self) -> str:
        return "chosen by simulations that the step waited for"

    @property
    def free(self) -> bool:
        """A question may be asked now."""
        return self._pending is None

    def cpu_factor(self, load: Load, measured: float) -> float:
        """What to plan with where CPU attention takes ``measured`` times its price."""
        return round(measured, 2)

    def ask(self, question: LayoutQuestion, view: StepView) -> None:
        answer = Answer(*question.answer(self._costs, self._predict), question.load, "a simulation")
        self._pending = view.number + self._delay, answer
        self._delay = self._plan_steps

    def take(self, view: StepView) -> Answer | None:
        """The layout to use from now on, with its prediction; None: the one in use goes on."""
        if self._pending is None or view.number < self._pending[0]:
            return None
        answer, self._pending = self._pending[1], None
        return answer


class Elsewhere:
    """One question at a time to somebody who answers later, or never again; meanwhile a closed form decides.

    Answers are kept by coarse loads, and questions come so seldom that answering takes at most ``SHARE`` of one core:
    after an answer that took a second, nobody is asked for the next twenty, nor at all in a short run. An answer is
    looked up and a closed form takes well below a millisecond, so that a load which changes need not settle first.

    Attributes
    ----------
    asked, recalled, estimated : questions that were handed on, answered from memory, and answered by the closed form
    """

    settle_steps = 0

    def __init__(self, costs: Costs, chooser: AsyncChooser) -> None:
        self.asked = self.recalled = self.estimated = 0
        self._costs = costs
        self._chooser = chooser
        self._known = chooser.known
        self._ready: Answer | None = None
        self._wanted: LayoutQuestion | None = None  # its load has no answer of its own so far
        self._open: tuple[LayoutQuestion, int] | None = None  # handed on, and what answers had cost by then
        self._rest_until_ns: int | None = None  # known once there is a question

    def __str__(self) -> str:
        return f"chosen {self.estimated} times by closed forms, {self.recalled} from memory, {self.asked} simulated"

    @property
    def free(self) -> bool:
        """A question may be asked now."""
        return True

    def cpu_factor(self, load: Load, measured: float) -> float:
        """What to plan with where CPU attention takes ``measured`` times its price: one of few, or 1 where closed forms
        tell no difference."""
        parts = round(math.log(measured) / math.log(FACTOR_STEP))
        factor = round(FACTOR_STEP**parts, 3)
        if not parts or abs(rate(load, self._costs.corrected(factor)) / rate(load, self._costs) - 1) < MATTERS:
            return 1.0
        return factor

    def ask(self, question: LayoutQuestion, view: StepView) -> None:
        kept = replace(question, load=question.load.coarse())
        exact = self._known.get(kept)
        found = (kept, exact) if exact is not None else self._nearest(question)
        self._wanted = kept if exact is None and question.load.gpu_rows else None
        if found is not None:
            self.recalled += 1
            self._ready = Answer(*found[1], found[0].load, "memory")
            return
        self.estimated += 1
        costs = self._costs.corrected(question.cpu_factor)
        layout = at_once(question.load, costs, question.limits, question.min_gain, question.split)
        self._ready = Answer(layout, None, question.load, "a closed form")

    def take(self, view: StepView) -> Answer | None:
        """The layout to use from now on, with its prediction; None: the one in use goes on."""
        answer, self._ready = self._ready, None
        if self._open is None:
            self._hand_on(view)
            return answer
        found = self._chooser.take()
        if found is None:
            return answer
        question, cost_before_ns = self._open
        self._open = None
        self._rest_until_ns = view.now_ns + round((self._chooser.cpu_ns - cost_before_ns) / SHARE)
        while len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[question] = found
        if self._wanted != question:
            return answer  # the load has changed meanwhile
        self._wanted = None
        return Answer(*found, question.load, "a simulation")

    def _hand_on(self, view: StepView) -> None:
        if self._rest_until_ns is None:
            self._rest_until_ns = view.now_ns + round(FIRST_NS / SHARE)
        if self._wanted is not None and view.now_ns >= self._rest_until_ns:
            self.asked += 1
            self._chooser.ask(self._wanted)
            self._open = self._wanted, self._chooser.cpu_ns

    def _nearest(self, question: LayoutQuestion) -> tuple[LayoutQuestion, tuple[Layout, Prediction]] | None:
        """What was answered for a load like this one under the same circumstances, the latest first."""
        for known in reversed(self._known):
            if question.near(known):
                return known, self._known[known]
        return None
