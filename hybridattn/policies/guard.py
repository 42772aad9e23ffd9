"""The guard of an adaptive policy: does a layout bring what was predicted?"""

from __future__ import annotations

from hybridattn.policies.base import StepView
from hybridattn.policies.layouts import Layout
from hybridattn.policies.load import Load, Prediction

WINDOW = 48  # steps over which it measures
SHORT = 0.95  # of the predicted rate: below it a layout falls short


class Guard:
    """Measured against predicted rate of the layout in use, window by window.

        step      |-- WINDOW steps --|-- WINDOW steps --|
        measured        98 %               91 %  -> falls short: a new plan, in which this layout counts for 91 %

    Attributes
    ----------
    discount : what the predicted rate of a layout counts for, where it fell short
    expected : prediction of the layout in use; None: there is none
    """

    __slots__ = ("_layout", "_load", "_mark", "_rate", "_slow", "discount", "expected")

    def __init__(self) -> None:
        self.discount: dict[Layout, float] = {}
        self.expected: Prediction | None = None
        self._layout: Layout | None = None
        self._load: Load | None = None
        self._mark: StepView | None = None  # where the window began
        self._rate = 0.0  # tokens per second that the layout should bring
        self._slow = 0.0  # of the window's steps: how much longer the GPU's own work takes than it should, in all

    def watch(
        self, layout: Layout, expected: Prediction | None, load: Load, view: StepView, scale: float = 1.0
    ) -> None:
        """``layout`` is in use from now on, chosen for ``load``, whose rate is ``scale`` times the predicted one."""
        self._layout, self.expected, self._load, self._mark = layout, expected, load, view
        self._rate = expected.tokens_per_s * scale if expected is not None else 0.0
        self._slow = 0.0

    def forget(self) -> None:
        """What was learnt of layouts was learnt under another load."""
        self.discount.clear()

    def falls_short(self, load: Load, view: StepView) -> bool:
        """A window ends now and its rate was too low: there should be a new plan.

        The layout counts for less in it, unless the prediction was for other prompts than there are by now.
        """
        mark, layout, planned = self._mark, self._layout, self._load
        if mark is None or layout is None or planned is None or not self._rate or layout.kind == "gpu_only":
            return False
        self._slow += max(0.0, view.gpu_factor - 1)
        steps = view.number - mark.number
        if steps < WINDOW or view.now_ns <= mark.now_ns:
            return False
        rate = (view.tokens - mark.tokens) / (view.now_ns - mark.now_ns) * 1e9
        reached = rate * (1 + self._slow / steps) / self._rate  # what slows down everything is not the layout's fault
        self._mark, self._slow = view, 0.0
        if reached >= SHORT:
            return False
        if load.prompt_per_token == planned.prompt_per_token:
            self.discount[layout] = reached * self.discount.get(layout, 1.0)
        return True
