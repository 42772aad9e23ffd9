"""Policies that answer as another one does, to begin with."""

from __future__ import annotations

from collections.abc import Sequence

from hybridattn.policies.base import (
    HOOKS,
    ColdView,
    Decision,
    DispatchView,
    LayerView,
    MicroBatchView,
    Policy,
    PromptView,
    RequestView,
    StepView,
    TierView,
)


class Delegate(Policy):
    """What becomes of CPU rows is decided by ``policy``, which may be replaced whenever a step begins.

    Placement, prompts and planning stay with this class. Its ``hooks`` must hold all that a ``policy`` may have.
    """

    hooks = frozenset({"detour"})
    policy: Policy

    @property
    def dispatch_cap(self) -> int | None:  # type: ignore[override]
        return self.policy.dispatch_cap

    @property
    def takes_detours(self) -> bool:
        return self.policy.takes_detours

    @property
    def next_detour_ns(self) -> int:  # type: ignore[override]
        return self.policy.next_detour_ns

    @property
    def splits_first(self) -> bool:  # type: ignore[override]
        return self.policy.splits_first

    def dispatch(self, view: DispatchView) -> tuple[int, ...]:
        return self.policy.dispatch(view)

    def ask(self, micro_batch: MicroBatchView, at: LayerView) -> Decision:
        return self.policy.ask(micro_batch, at)

    def priority_of(self, number: int) -> int:
        return self.policy.priority_of(number)

    def max_wait_ns(self, micro_batch: MicroBatchView, at: LayerView) -> int | None:
        return self.policy.max_wait_ns(micro_batch, at)

    def no_detour(self, at: LayerView) -> bool:
        return self.policy.no_detour(at)

    def detour(self, micro_batches: Sequence[MicroBatchView], at: LayerView) -> int | None:
        return self.policy.detour(micro_batches, at)


class Wrapper(Delegate):
    """Answers everything as ``policy`` does: the base of a policy that changes one answer, or only listens.

    What a policy is by its class or constructor (name, tiers, hooks, costs, ...) is taken over once.
    """

    hooks = HOOKS

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name = policy.name
        self.tiers = policy.tiers
        self.hooks = policy.hooks
        self.priority = policy.priority
        self.forecasts = policy.forecasts
        self.swap_in_below = policy.swap_in_below
        self.cold_only_when_full = policy.cold_only_when_full
        self.costs = policy.costs
        self.choices = policy.choices
        self.cpu_fraction = policy.cpu_fraction

    @property
    def steps_by_layout(self) -> dict[str, int]:
        return self.policy.steps_by_layout

    @property
    def moves_block(self) -> bool:  # type: ignore[override]
        return self.policy.moves_block

    def allowed(self, index: int) -> tuple[str, ...]:
        return self.policy.allowed(index)

    def place(self, request: RequestView, tiers: dict[str, TierView]) -> str | None:
        return self.policy.place(request, tiers)

    def prompts(self, view: PromptView) -> int:
        return self.policy.prompts(view)

    def move_up(self, gpu_rows: int, cpu_rows: int) -> bool:
        return self.policy.move_up(gpu_rows, cpu_rows)

    def cold_pages(self, view: ColdView) -> tuple[int, int]:
        return self.policy.cold_pages(view)

    def move_down(self, gpu_rows: int, tokens: int) -> bool:
        return self.policy.move_down(gpu_rows, tokens)

    def begin(self, view: StepView) -> None:
        self.policy.begin(view)
