"""The adaptive policy: chooses a layout by short simulations, lets the layout's own policy decide, watches the outcome.

    begin:  load changed? --> predict every layout --> best that keeps the limits --> its policy decides
            a window has ended: measured rate below 95 % of the predicted one? --> that layout counts for less, plan

The fixed policies are among the layouts, and GPU-only always is, so it falls back on them where nothing else pays.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from hybridattn.core.errors import InputError
from hybridattn.core.records import LayoutRecord
from hybridattn.core.stages import CPU_TIER
from hybridattn.cost.costs import Costs
from hybridattn.policies.base import (
    ColdView,
    Decision,
    DispatchView,
    LayerView,
    MicroBatchView,
    RequestView,
    StepView,
    TierView,
)
from hybridattn.policies.chooser import Answer, Elsewhere, Here
from hybridattn.policies.delegate import Delegate
from hybridattn.policies.estimate import move_ns, rate
from hybridattn.policies.guard import Guard
from hybridattn.policies.layouts import Layout, hidden_rows, policy_of
from hybridattn.policies.load import LEAST_CONTEXT, Limits, Load, LoadMeter, Prediction
from hybridattn.policies.planning import AsyncChooser, LayoutQuestion, Predict, choose

MAX_WAIT_STEPS = 64  # without CPU rows, while some wait, after which they run whatever the plan says
WORTH = 1.02  # by how much the rate must rise for a request to move up
LEARNT = 0.08  # by how much CPU attention may differ from what it was planned with
MOST_CHOICES = 1024  # the latest, that are remembered


class Plan(NamedTuple):
    """What the latest layout was chosen for, in which step, and what CPU attention took over its price by then."""

    step: int
    load: Load
    measured: float
    cpu_factor: float  # what it was planned with
    costs: Costs  # corrected by it


class Adaptive(Delegate):
    """A layout by planning, decisions by the layout's own policy.

    Parameters
    ----------
    costs : Costs
        Cost model; a misjudged CPU is put right by what the executor measures.
    predict : callable ``(load, layout, costs, thorough) -> Prediction``, or an AsyncChooser
        A short simulation of a layout (``hybridattn.planning.predict.by_simulation``), waited for; or who chooses
        elsewhere.
    gpu_limit, cpu_limit : float, optional
        Longest time per output token of GPU and CPU rows, in multiples of the GPU-only one.
    min_gain : float
        Predicted gain over GPU-only below which the CPU tier stays unused.
    guard : bool
        Compare measured with predicted throughput and fall back.
    split : bool
        Requests over both tiers are one of the layouts (policy ``split``).
    plan_steps : int
        Steps between the start of a plan and its use: what planning takes, as a stated constant.

    Attributes
    ----------
    layout : the one in use, None before the first plan
    plans : layouts asked for so far
    used : in how many steps each layout decided
    choices : the latest changes of the layout
    moves_block : where a copy of a request takes less time than the token that it would miss in a step
    """

    name = "adaptive"
    hooks = frozenset({"begin", "detour", "move_up", "cold_pages"})
    forecasts = True

    def __init__(
        self,
        costs: Costs | None = None,
        predict: Predict | AsyncChooser | None = None,
        gpu_limit: float | None = None,
        cpu_limit: float | None = None,
        min_gain: float = 1.0,
        guard: bool = True,
        plan_steps: int = 0,
        split: bool = False,
    ) -> None:
        super().__init__()
        if costs is None or predict is None:
            raise InputError(
                f"policy '{self.name}' needs costs and predict: a cost model and a way to try layouts on it, "
                "which LLM and the experiments make from a profile"
            )
        self.costs: Costs = costs
        self.limits = Limits(gpu_limit, cpu_limit)
        self.min_gain = min_gain
        self.layout: Layout | None = None
        self.plans = 0
        self.used: Counter[Layout] = Counter()
        self.choices: deque[LayoutRecord] = deque(maxlen=MOST_CHOICES)
        self.policy = policy_of(Layout("gpu_only"), costs)
        self._split = split
        if not split:
            self.hooks = self.hooks - {"cold_pages"}
        self._predict = predict if callable(predict) else None
        self._chooser = Here(costs, predict, plan_steps) if callable(predict) else Elsewhere(costs, predict)
        self._guard = Guard()
        self._guards = guard
        self._meter = LoadMeter()
        self._plan: Plan | None = None
        self._change: Answer | None = None  # of the layout, since the latest step began
        self._view = StepView(0, 0, 0, 0, 0, 0, 0, 0.0, 1.0)  # of the latest step
        self._pays: dict[tuple[int, int], bool] = {}  # to move up, by rows of the tiers, under the latest plan
        self._cpu_rows = 0  # on the CPU tier, those placed since the step began included
        self._idle_steps = 0  # without CPU rows, while some wait
        self._forced = -1  # number of the latest micro-batch that runs only because it waited for too long

    @property
    def expected(self) -> Prediction | None:
        """What was predicted of the layout in use."""
        return self._guard.expected

    @property
    def uses_cpu(self) -> bool:
        """The layout in use lets CPU rows take part."""
        return self.layout is not None and self.layout.kind != "gpu_only"

    # -- the layout --------------------------------------------------------------------------------------------------

    def begin(self, view: StepView) -> None:
        self._view = view
        self._cpu_rows = view.cpu_rows
        self._meter.count(view)
        self._use_answer(view)
        load = self._meter.load(view)
        if load is not None and self._chooser.free and self._outdated(load, view):
            self._ask(load, view)
            self._use_answer(view)
        if self._change is not None:  # also one that was made while requests were placed
            layout, expected, planned, by = self._change
            rate_per_s = expected.tokens_per_s if expected is not None else None
            self.choices.append(LayoutRecord(view.number, view.now_ns, str(layout), str(planned), by, rate_per_s))
            self._change = None
        if self.layout is not None:
            self.used[self.layout] += 1
        self.policy.begin(view)

    @property
    def steps_by_layout(self) -> dict[str, int]:
        return {str(layout): steps for layout, steps in self.used.most_common()}

    def __repr__(self) -> str:
        """What was chosen, how often, and by whom."""
        if not self.used:
            return f"<{self.name}: no layout, nobody of the CPU tier takes part>"
        layouts = ", ".join(f"{layout} in {steps}" for layout, steps in self.steps_by_layout.items())
        return f"<{self.name}: {layouts} steps; {self._chooser}>"

    def _outdated(self, load: Load, view: StepView) -> bool:
        """There is no plan for this load, the CPU is not what it was taken for, or the layout falls short."""
        plan = self._plan
        if plan is None:
            return True
        if view.number - plan.step >= self._chooser.settle_steps:
            if not load.like(plan.load):
                self._guard.forget()
                return True
            if abs(view.cpu_factor / plan.measured - 1) > LEARNT:
                if self._chooser.cpu_factor(load, view.cpu_factor) != plan.cpu_factor:
                    return True
        return self._guards and self._guard.falls_short(load, view)

    def _ask(self, load: Load, view: StepView) -> None:
        self.plans += 1
        discount = tuple(self._guard.discount.items())
        factor = self._chooser.cpu_factor(load, view.cpu_factor)
        self._plan = Plan(view.number, load, view.cpu_factor, factor, self.costs.corrected(factor))
        self._pays.clear()
        self.moves_block = move_ns(load, self._plan.costs) * rate(load, self._plan.costs) < 1
        question = LayoutQuestion(load, factor, self.limits, self.min_gain, discount, self._split)
        self._chooser.ask(question, view)

    def _use_answer(self, view: StepView) -> None:
        answer = self._chooser.take(view)
        if answer is None or self._plan is None:
            return
        layout, expected = answer.layout, answer.expected
        plan, costs = self._plan, self._plan.costs
        self._guard.watch(layout, expected, plan.load, view, self._scale(answer, plan))
        if layout != self.layout:
            self._change = answer
        if layout != self.layout or costs is not self.policy.costs:
            self.layout, self.policy = layout, policy_of(layout, costs, plan.load.context, self.limits.gpu)

    @staticmethod
    def _scale(answer: Answer, plan: Plan) -> float:
        """What the rate of the plan's load is over that of the load which was answered, by closed forms."""
        if answer.expected is None or answer.load == plan.load or not (answer.load.gpu_rows and plan.load.gpu_rows):
            return 1.0
        return rate(plan.load, plan.costs) / rate(answer.load, plan.costs)

    def _decide_first(self, gpu_rows: int, cpu_rows: int, tokens: int) -> None:
        """A layout before the first step that anybody of the CPU tier takes part in."""
        self._ask(Load(gpu_rows, cpu_rows, max(LEAST_CONTEXT, tokens)), self._view)
        self._use_answer(self._view)

    def choose(self, load: Load, costs: Costs) -> tuple[Layout, Prediction]:
        """The layout for ``load`` by this policy's predictions and limits, and by what its guard learnt."""
        if self._predict is None:
            raise InputError("this policy's layouts are chosen elsewhere: it cannot be asked for one directly")
        return choose(load, costs, self._predict, self.limits, self.min_gain, self._guard.discount, self._split)

    # -- placement ---------------------------------------------------------------------------------------------------

    def place(self, request: RequestView, tiers: dict[str, TierView]) -> str | None:
        tier = super().place(request, tiers)
        if tier != CPU_TIER or request.blocks_max > tiers["gpu"].total:
            return tier
        if self.layout is None and request.gpu_rows:
            self._decide_first(request.gpu_rows, request.waiting, request.tokens)
        if self.layout is None or not self.uses_cpu or self.layout.kind == "split":
            return None  # it waits for the GPU, or has its oldest pages on the CPU tier
        rows = self.layout.max_rows
        if self.limits.any and rows is not None and self._cpu_rows >= rows:
            return None
        self._cpu_rows += 1
        return tier

    def cold_pages(self, view: ColdView) -> tuple[int, int]:
        """Pages may go down under the layout ``split``."""
        return self.policy.cold_pages(view)

    def move_up(self, gpu_rows: int, cpu_rows: int) -> bool:
        """By closed forms, at the context of the latest plan."""
        if self._plan is None or not cpu_rows:
            return False
        found = self._pays.get((gpu_rows, cpu_rows))
        if found is None:
            context, costs = self._plan.load.context, self._plan.costs
            now = rate(Load(gpu_rows, cpu_rows, context), costs, self.min_gain)
            found = rate(Load(gpu_rows + 1, cpu_rows - 1, context), costs, self.min_gain) > WORTH * now
            self._pays[gpu_rows, cpu_rows] = found
        return found

    def move_down(self, gpu_rows: int, tokens: int) -> bool:
        """Where the CPU tier takes part."""
        if self.layout is None and gpu_rows > 1:
            self._decide_first(gpu_rows - 1, 1, tokens)
        return self.uses_cpu

    # -- rows on the CPU tier that the layout does not serve -----------------------------------------------------------

    def dispatch(self, view: DispatchView) -> tuple[int, ...]:
        sizes = super().dispatch(view)
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

    def ask(self, micro_batch: MicroBatchView, at: LayerView) -> Decision:
        if self.uses_cpu:
            return super().ask(micro_batch, at)
        if micro_batch.ready:
            return Decision.JOIN
        # one of an earlier layout goes on as it comes; one that waited for its turn is through in one step
        return Decision.WAIT if micro_batch.number == self._forced else Decision.SKIP


class Auto(Adaptive):
    """Adaptive where CPU help is predicted to gain at least 2 %, GPU-only elsewhere: with ample memory it submits
    exactly the ops that ``gpu_only`` would."""

    name = "auto"

    def __init__(
        self,
        costs: Costs | None = None,
        predict: Predict | AsyncChooser | None = None,
        gpu_limit: float | None = None,
        cpu_limit: float | None = None,
        split: bool = False,
    ) -> None:
        super().__init__(costs, predict, gpu_limit, cpu_limit, min_gain=1.02, split=split)
