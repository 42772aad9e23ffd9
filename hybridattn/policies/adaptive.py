"""The adaptive policy: plans a layout by short simulations, serves it by the four verbs, and watches what comes of it.

    begin:  load changed? --> predict every layout --> best that keeps the limits --> its policy decides the verbs
            every WINDOW steps: measured rate below 95 % of the predicted one? --> that layout counts for less, plan

Where a step must not wait for that, a planner predicts elsewhere, and the layout in use goes on until it has answered:

    begin:  load changed? --> ask ... begin: an answer? no ... begin: an answer? yes --> use it

The fixed policies are among the layouts, and GPU-only always is, so it falls back on them where nothing else pays.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridattn.core.errors import InputError
from hybridattn.core.stages import CPU_TIER
from hybridattn.cost.costs import Costs
from hybridattn.policies.base import (
    DispatchView,
    LayerView,
    MicroBatchView,
    Policy,
    RequestView,
    StepView,
    TierView,
    Verb,
)
from hybridattn.policies.layouts import Layout, hidden_rows, policy_of
from hybridattn.policies.load import Limits, Load, Prediction
from hybridattn.policies.planning import Planner, Predict, Question, alone_on_cpu, choose

WINDOW = 48  # steps over which the guard measures
SHORT = 0.95  # of the predicted rate: below it the guard steps in
MAX_WAIT_STEPS = 64  # without CPU rows, while some wait, after which they run whatever the plan says
SETTLE_STEPS = 8  # after a plan, before a changed load or what was learnt about the CPU leads to the next
MOST_CPU_ROWS = 16  # per GPU row: more are not planned for at a time


class Adaptive(Policy):
    """Layout by planning, verbs by the layout's own policy.

    Parameters
    ----------
    costs : Costs
        Cost model; a misjudged CPU is put right by what the executor measures.
    predict : callable ``(load, layout, costs, thorough) -> Prediction``, or a Planner
        A short simulation of a layout (``hybridattn.planning.predict.by_simulation``), waited for; or who does that
        elsewhere.
    gpu_limit, cpu_limit : float, optional
        Longest time per output token of GPU and CPU rows, in multiples of the GPU-only one.
    min_gain : float
        Predicted gain over GPU-only below which the CPU tier stays unused.
    guard : bool
        Compare measured with predicted throughput and fall back.
    plan_steps : int
        Passes between the start of a plan and its use: what planning takes, as a stated constant.
    """

    name = "adaptive"
    forecasts = True

    def __init__(
        self,
        costs: Costs | None = None,
        predict: Predict | Planner | None = None,
        gpu_limit: float | None = None,
        cpu_limit: float | None = None,
        min_gain: float = 1.0,
        guard: bool = True,
        plan_steps: int = 0,
    ) -> None:
        super().__init__()
        if costs is None or predict is None:
            raise InputError(
                f"policy '{self.name}' needs costs and predict: a cost model and a way to try layouts on it, "
                "which LLM and the experiments make from a profile"
            )
        self.costs: Costs = costs
        self.planner: Planner | None = None if callable(predict) else predict
        self.predict = predict if callable(predict) else _elsewhere
        self._asked = False  # the planner is at work, or has died over it
        self.limits = Limits(gpu_limit, cpu_limit)
        self.min_gain = min_gain
        self.guard = guard
        self.plan_steps = plan_steps
        self.layout: Layout | None = None
        self.expected: Prediction | None = None
        self.plans = 0
        self._inner: Policy = policy_of(Layout("gpu_only"), costs)
        self._load: Load | None = None
        self._next: tuple[int, Layout, Prediction] | None = None  # step from which on it is used
        self._discount: dict[Layout, float] = {}
        self._mark: StepView | None = None  # where the guard's window began
        self._factor = 1.0
        self._planned_at = -SETTLE_STEPS
        self._idle_steps = 0
        self._forced = -1  # number of the latest micro-batch that only patience launched
        self._prompt_tokens = 0
        self._cpu_rows = 0

    # -- planning ----------------------------------------------------------------------------------------------------

    def begin(self, view: StepView) -> None:
        self._prompt_tokens += view.prefill_tokens
        self._cpu_rows = view.cpu_rows
        if self._asked:
            self._look_for_answer(view)
        if self._next is not None and view.number >= self._next[0]:
            self._use(self._next[1], self._next[2], view)
            self._next = None
        rows = min(view.cpu_rows + view.waiting, MOST_CPU_ROWS * max(1, view.gpu_rows))
        if rows and self._next is None and not self._asked and not self._too_early(view):
            load = self._situation(view, rows)
            learnt = abs(view.cpu_factor / self._factor - 1) > 0.08
            settled = view.number - self._planned_at >= SETTLE_STEPS
            if self._load is None or (settled and not load.like(self._load)):
                self._discount.clear()
                self._plan(load, view)
            elif (settled and learnt) or (self.guard and self._falls_short(view, load)):
                self._plan(load, view)
        self._inner.begin(view)

    def _situation(self, view: StepView, rows: int) -> Load:
        kv_tokens = view.gpu_kv_tokens + view.cpu_kv_tokens
        context = max(1, kv_tokens // max(1, view.gpu_rows + view.cpu_rows))
        known = view.tokens > 16 * view.gpu_rows + 4 * rows  # prompts come in lumps: a few steps say little
        per_token = self._prompt_tokens / view.tokens if known else 0.0
        return Load(_coarse(view.gpu_rows), _coarse(rows), _coarse(context), round(2 * per_token) / 2)

    def _plan(self, load: Load, view: StepView) -> None:
        self.plans += 1
        self._planned_at = view.number
        self._load = load
        self._factor = view.cpu_factor
        if self.planner is not None:
            self._ask(load, view)
            return
        layout, expected = self.choose(load, self.costs.corrected(round(view.cpu_factor, 2)))
        if self.plan_steps and self.layout is not None:
            self._next = (view.number + self.plan_steps, layout, expected)
        else:
            self._use(layout, expected, view)

    def _too_early(self, view: StepView) -> bool:
        """An answer that takes a while should not be about a moment: rows of the GPU are about to decode."""
        return self.planner is not None and not view.gpu_rows and view.prefill_tokens > 0

    def _ask(self, load: Load, view: StepView) -> None:
        assert self.planner is not None
        if not load.gpu_rows:
            self._use(alone_on_cpu(load), None, view)
            return
        discount = tuple(self._discount.items())
        self.planner.ask(Question(load, round(view.cpu_factor, 2), self.limits, self.min_gain, discount))
        self._asked = True

    def _look_for_answer(self, view: StepView) -> None:
        assert self.planner is not None
        answer = self.planner.take()
        if answer is not None:
            self._asked = False
            self._use(*answer, view)

    def choose(self, load: Load, costs: Costs) -> tuple[Layout, Prediction]:
        """The layout for ``load`` by this policy's predictions and limits, and by what its guard learnt."""
        return choose(load, costs, self.predict, self.limits, self.min_gain, self._discount)

    def _use(self, layout: Layout, expected: Prediction | None, view: StepView) -> None:
        self.expected = expected
        self._mark = view
        costs = self.costs.corrected(round(self._factor, 2))
        if layout != self.layout or costs is not self._inner.costs:
            self.layout = layout
            self._inner = policy_of(layout, costs)
            self.detours_wait = self._inner.detours_wait
            self.dispatch_cap = self._inner.dispatch_cap
            self.next_detour_ns = 0

    def _falls_short(self, view: StepView, load: Load) -> bool:
        """The guard: measured against predicted rate of the window that ends now; True asks for a new plan.

        The layout counts for less then, unless the prediction was for other prompts than there are by now.
        """
        mark, expected, layout = self._mark, self.expected, self.layout
        if mark is None or expected is None or layout is None or layout.kind == "gpu_only":
            return False
        if view.number - mark.number < WINDOW or view.now_ns <= mark.now_ns:
            return False
        rate = (view.tokens - mark.tokens) / (view.now_ns - mark.now_ns) * 1e9
        self._mark = view
        if rate >= SHORT * expected.tokens_per_s:
            return False
        assert self._load is not None
        if load.prompt_per_token == self._load.prompt_per_token:
            self._discount[layout] = rate / expected.tokens_per_s * self._discount.get(layout, 1.0)
        return True

    # -- placement ---------------------------------------------------------------------------------------------------

    def place(self, request: RequestView, tiers: dict[str, TierView]) -> str | None:
        tier = super().place(request, tiers)
        if tier != CPU_TIER or request.blocks_max > tiers["gpu"].total:
            return tier
        if self.layout is None or self.layout.kind == "gpu_only":
            return None  # it waits for the GPU
        rows = self.layout.max_rows
        if self.limits.any and rows is not None and self._cpu_rows >= rows:
            return None
        self._cpu_rows += 1
        return tier

    # -- verbs -------------------------------------------------------------------------------------------------------

    def dispatch(self, view: DispatchView) -> tuple[int, ...]:
        sizes = self._inner.dispatch(view)
        self.dispatch_cap = self._inner.dispatch_cap
        self._idle_steps = 0 if sizes or view.micro_batches else self._idle_steps + 1
        if not sizes and self._idle_steps >= MAX_WAIT_STEPS and view.idle_rows:
            self._idle_steps = 0
            self._forced = view.next_number
            return (min(view.idle_rows, self._unnoticed(view)),)
        return sizes

    def _unnoticed(self, view: DispatchView) -> int:
        """CPU rows that hide behind the GPU's attention (all of them where the GPU has none); at least one."""
        if not view.gpu_rows or not view.idle_kv_tokens:
            return view.idle_rows
        context = max(1, view.gpu_kv_tokens // view.gpu_rows, sum(view.idle_kv_tokens) // len(view.idle_kv_tokens))
        return max(1, hidden_rows(self.costs, view.gpu_rows, context)[0])

    def priority_of(self, number: int) -> int:
        return self._inner.priority_of(number)

    def ask(self, micro_batch: MicroBatchView, at: LayerView) -> Verb:
        if self.layout is None or self.layout.kind == "gpu_only":
            if micro_batch.ready:
                return Verb.JOIN
            return (
                Verb.WAIT if micro_batch.number == self._forced else Verb.SKIP
            )  # what is still in flight ends in peace
        return self._inner.ask(micro_batch, at)

    def max_wait_ns(self, micro_batch: MicroBatchView, at: LayerView) -> int | None:
        return self._inner.max_wait_ns(micro_batch, at)

    def no_detour(self, at: LayerView) -> bool:
        no_detour = self._inner.no_detour(at)
        self.next_detour_ns = self._inner.next_detour_ns
        return no_detour

    def detour(self, micro_batches: Sequence[MicroBatchView], at: LayerView) -> int | None:
        return self._inner.detour(micro_batches, at)


def _elsewhere(load: Load, layout: Layout, costs: Costs, thorough: bool) -> Prediction:
    raise InputError("this policy has a planner, which predicts elsewhere: it cannot be asked for a layout directly")


def _coarse(count: int) -> int:
    """``count`` to about 3 %: loads that hardly differ are planned for once."""
    step = 1 << max(0, count.bit_length() - 5)
    return round(count / step) * step


class Auto(Adaptive):
    """Adaptive where CPU help is predicted to gain at least 2 %, GPU-only elsewhere: with ample memory it submits
    exactly the ops that ``gpu_only`` would."""

    name = "auto"

    def __init__(
        self,
        costs: Costs | None = None,
        predict: Predict | Planner | None = None,
        gpu_limit: float | None = None,
        cpu_limit: float | None = None,
    ) -> None:
        super().__init__(costs, predict, gpu_limit, cpu_limit, min_gain=1.02)
