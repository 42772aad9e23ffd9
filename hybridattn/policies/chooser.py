"""Who chooses the layout for an adaptive policy: here, while the step waits, or elsewhere, beside the steps.

Here        begin: ask, simulate, take -> the layout from now on (or from ``plan_steps`` later on)
Elsewhere   begin: ask ... begin: take, nothing yet ... begin: take -> the layout from now on
"""

from __future__ import annotations

from hybridattn.cost.costs import Costs
from hybridattn.policies.base import StepView
from hybridattn.policies.layouts import Layout
from hybridattn.policies.load import Prediction
from hybridattn.policies.planning import AsyncChooser, LayoutQuestion, Predict, alone_on_cpu

Answer = tuple[Layout, Prediction | None]


class Here:
    """Short simulations, which the step waits for. What planning takes is a stated constant: a layout is used
    ``plan_steps`` after it was asked for, the first one at once."""

    def __init__(self, costs: Costs, predict: Predict, plan_steps: int) -> None:
        self._costs = costs
        self._predict = predict
        self._plan_steps = plan_steps
        self._delay = 0
        self._pending: tuple[int, Answer] | None = None  # step from which on it is used

    def free(self, view: StepView) -> bool:
        """A question may be asked now."""
        return self._pending is None

    def ask(self, question: LayoutQuestion, view: StepView) -> None:
        self._pending = view.number + self._delay, question.answer(self._costs, self._predict)
        self._delay = self._plan_steps

    def take(self, view: StepView) -> Answer | None:
        """The layout to use from now on, with its prediction; None: the one in use goes on."""
        if self._pending is None or view.number < self._pending[0]:
            return None
        answer, self._pending = self._pending[1], None
        return answer


class Elsewhere:
    """One question at a time to somebody who answers later, or never again."""

    def __init__(self, chooser: AsyncChooser) -> None:
        self._chooser = chooser
        self._asked = False
        self._at_once: Answer | None = None

    def free(self, view: StepView) -> bool:
        """A question may be asked now. Not while GPU rows only read their prompts: by the time of the answer they
        decode, and the load is another."""
        return not self._asked and (view.gpu_rows > 0 or view.prefill_tokens == 0)

    def ask(self, question: LayoutQuestion, view: StepView) -> None:
        if not question.load.gpu_rows:
            self._at_once = alone_on_cpu(question.load), None
            return
        self._chooser.ask(question)
        self._asked = True

    def take(self, view: StepView) -> Answer | None:
        """The layout to use from now on, with its prediction; None: the one in use goes on."""
        answer, self._at_once = self._at_once, None
        if self._asked:
            answer = self._chooser.take()
            self._asked = answer is None
        return answer
