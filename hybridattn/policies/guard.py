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

    __slots__ = ("_layout", "_load", "_mark", "discount", "expected")

    def __init__(self) -> None:
        self.discount: dict[Layout, float] = {}
        self.expected: Prediction | None = None
        self._layout: Layout | None = None
        self._load: Load | None = None
        self._mark: StepView | None = None  # where the window began

    def watch(self, layout: Layout, expected: Prediction | None, load: Load, view: StepView) -> None:
        """``layout`` is in use from now on, chosen for ``load``."""
        self._layout, self.expected, self._load, self._mark = layout, expected, load, view

    def forget(self) -> None:
        """What was learnt of layouts was learnt under another load."""
        self.discount.clear()

    def falls_short(self, load: Load, view: StepView) -> bool:
        """A window ends now and its rate was too low: there should be a new plan.

        The layout counts for less in it, unless the prediction was for other prompts than there are by now.
        """
        mark, expected, layout, planned = self._mark, self.expected, self._layout, self._load
        if mark is None or expected is None or layout is None or planned is None or layout.kind == "gpu_only":
            return False
        if view.number - mark.number < WINDOW or view.now_ns <= mark.now_ns:
            return False
        rate = (view.tokens - mark.tokens) / (view.now_ns - mark.now_ns) * 1e9
        self._mark = view
        if rate >= SHORT * expected.tokens_per_s:
            return False
        if load.prompt_per_token == planned.prompt_per_token:
            self.discount[layout] = rate / expected.tokens_per_s * self.discount.get(layout, 1.0)
        return True
