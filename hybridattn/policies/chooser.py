"""Who chooses the layout for an adaptive policy: here, while the step waits, or elsewhere, beside the steps.

Here        begin: ask, simulate, take -> the layout from now on (or from ``plan_steps`` later on)
Elsewhere   begin: ask; a closed form's layout at once ... begin: take, nothing yet ... begin: take -> the simulated one
            begin: ask of a load that was answered before -> that answer at once
"""

from __future__ import annotations

from hybridattn.cost.costs import Costs
from hybridattn.policies.base import StepView
from hybridattn.policies.estimate import at_once
from hybridattn.policies.layouts import Layout
from hybridattn.policies.load import Prediction
from hybridattn.policies.planning import AsyncChooser, LayoutQuestion, Predict

Answer = tuple[Layout, Prediction | None]

SHARE = 0.05  # of one core that planning beside the steps may take
MOST_KNOWN = 256  # answers that are remembered


class Here:
    """Short simulations, which the step waits for. What planning takes is a stated constant: a layout is used
    ``plan_steps`` after it was asked for, the first one at once."""

    def __init__(self, costs: Costs, predict: Predict, plan_steps: int) -> None:
        self._costs = costs
        self._predict = predict
        self._plan_steps = plan_steps
        self._delay = 0
        self._pending: tuple[int, Answer] | None = None  # step from which on it is used

    def __str__(self) -> str:
        return "chosen by simulations that the step waited for"

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
    """One question at a time to somebody who answers later, or never again; meanwhile a closed form decides.

    Answers are remembered, and questions come so seldom that answering takes at most ``SHARE`` of one core: after an
    answer that took a second, nobody is asked for the next twenty.

    Attributes
    ----------
    asked, recalled, estimated : questions that were handed on, answered from memory, and answered by the closed form
    """

    def __init__(self, costs: Costs, chooser: AsyncChooser) -> None:
        self.asked = self.recalled = self.estimated = 0
        self._costs = costs
        self._chooser = chooser
        self._ready: Answer | None = None
        self._wanted: LayoutQuestion | None = None  # has a closed form's answer so far
        self._open: tuple[LayoutQuestion, int] | None = None  # handed on, and what answers had cost by then
        self._known: dict[LayoutQuestion, Answer] = {}
        self._rest_until_ns = 0

    def __str__(self) -> str:
        return f"chosen {self.estimated} times by closed forms, {self.recalled} from memory, {self.asked} simulated"

    def free(self, view: StepView) -> bool:
        """A question may be asked now. Not while GPU rows only read their prompts: the next steps are about others."""
        return self._ready is None and (view.gpu_rows > 0 or view.prefill_tokens == 0)

    def ask(self, question: LayoutQuestion, view: StepView) -> None:
        self._wanted = None
        self._ready = self._recall(question)
        if self._ready is not None:
            self.recalled += 1
            return
        self.estimated += 1
        costs = self._costs.corrected(question.cpu_factor)
        self._ready = at_once(question.load, costs, question.limits, question.min_gain), None
        if question.load.gpu_rows:
            self._wanted = question

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
        if self._wanted is None or not self._wanted.near(question):
            return answer  # the load has changed meanwhile
        self._wanted = None
        return found

    def _hand_on(self, view: StepView) -> None:
        if self._wanted is not None and view.now_ns >= self._rest_until_ns:
            self.asked += 1
            self._chooser.ask(self._wanted)
            self._open = self._wanted, self._chooser.cpu_ns

    def _recall(self, question: LayoutQuestion) -> Answer | None:
        """What was answered for a load like this one under the same circumstances, the latest first."""
        for known in reversed(self._known):
            if question.near(known):
                return self._known[known]
        return None
