"""The local rule, planning, limits and guard of the adaptive policy, with predictions made up by the test."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seen import Seen

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import InputError
from hybridattn.core.request import DeclaredTokens
from hybridattn.cost.catalog import shape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.policies.adaptive import MAX_WAIT_STEPS, Adaptive, Auto
from hybridattn.policies.base import Decision, DispatchView, LayerView, RequestView, StepView, TierView
from hybridattn.policies.chooser import SETTLE_STEPS
from hybridattn.policies.guard import WINDOW
from hybridattn.policies.layouts import Layout, fixed_layouts, hidden_rows, policy_of, rule_layouts
from hybridattn.policies.load import Limits, Load
from hybridattn.policies.rule import Rule

COSTS = Costs(ModelCost(shape("llama3.1-8b"), "fp16"), machine("a10", "epyc-7r32-16c", "pcie4-x16"))
US = 1000


@dataclass(frozen=True)
class Guess:
    tokens_per_s: float
    gpu_tpot_ns: float | None = 1e6
    cpu_tpot_ns: float | None = 1e6


def passing(number=0, now_ns=0, tokens=0.0, gpu_rows=24, cpu_rows=96, cpu_factor=1.0, waiting=0):
    return StepView(
        number, now_ns, gpu_rows, gpu_rows * 1000, cpu_rows, cpu_rows * 1000, 0, tokens, cpu_factor, waiting
    )


def planner(scores, default=100.0, **options):
    """An adaptive policy whose predictions come from ``scores``: a layout's kind to its Guess."""
    asked = []

    def predict(load, layout, costs, thorough):
        asked.append(layout)
        return scores.get(layout.kind, Guess(default))

    return Adaptive(COSTS, predict, **options), asked


# -- the rule --------------------------------------------------------------------------------------------------------


def ready(number=0, rows=40, layer=9, is_ready=True, return_ns=0):
    return Seen(number, rows, layer, is_ready, kv_tokens=rows * 1000, return_ns=return_ns)


def at(layer=3, gpu_free_us=1000, cpu_free_us=0):
    return LayerView(layer, 32, 24, gpu_free_us * US // 2, 24_000, 24, gpu_free_us * US, cpu_free_us * US)


def rule(**options):
    made = Rule(COSTS, **options)
    made.begin(passing())
    return made


def test_what_is_ready_joins_and_what_returns_under_the_gpus_attention_is_waited_for():
    policy = rule()
    assert policy.ask(ready(layer=3), at()) is Decision.JOIN
    early = ready(layer=3, is_ready=False, return_ns=900 * US)
    assert policy.ask(early, at(gpu_free_us=1000)) is Decision.WAIT
    assert policy.ask(early._replace(return_ns=50_000 * US), at(gpu_free_us=1000)) is Decision.SKIP


def test_a_wait_needs_a_starving_cpu_a_short_remainder_and_a_budget():
    micro_batch = ready(layer=3, is_ready=False, return_ns=1100 * US)
    assert rule().ask(micro_batch, at(cpu_free_us=1100)) is Decision.WAIT
    assert rule().ask(micro_batch, at(cpu_free_us=9000)) is Decision.SKIP  # the CPU has more to do behind it
    assert rule(stretch=1e-6).ask(micro_batch, at(cpu_free_us=1100)) is Decision.SKIP  # no budget
    assert (
        rule().ask(micro_batch._replace(size=1, kv_tokens=1000), at(cpu_free_us=1100)) is Decision.SKIP
    )  # one row is not worth it


def test_waits_are_bounded_by_the_prediction():
    micro_batch = ready(layer=3, is_ready=False, return_ns=1100 * US)
    where = at(gpu_free_us=1000)
    longest = rule().max_wait_ns(micro_batch, where)
    assert 1100 * US - where.now_ns < longest < 2 * (1100 * US - where.now_ns)


def test_a_large_micro_batch_takes_a_detour_when_the_cpu_runs_dry_and_a_small_one_does_not():
    assert rule(omega=0.5).detour((ready(rows=40),), at()) == 0
    assert rule(omega=0.5).detour((ready(rows=2),), at()) is None
    assert not rule(omega=0.5).no_detour(at()) and rule(omega=0.5).no_detour(
        at(cpu_free_us=100_000)
    )  # it has enough to do
    assert rule(omega=0.5).detour((ready(rows=40, layer=4),), at()) is None  # the GPU comes by there next
    assert rule(omega=0.5, stretch=1e-6).detour((ready(rows=40),), at()) is None


def test_small_micro_batches_that_stand_together_share_a_detour_that_each_alone_is_not_worth():
    few = [ready(number, rows=8) for number in range(4)]
    assert rule(omega=0.5).detour((few[0],), at()) is None
    assert rule(omega=0.5).detour(tuple(few), at()) == 0
    apart = tuple(c._replace(layer=9 + c.number) for c in few)
    assert rule(omega=0.5).detour(apart, at()) is None
    late = tuple(c._replace(ready=c.number == 0) for c in few)  # those that are not ready do not count
    assert rule(omega=0.5).detour(late, at()) is None


def test_the_budget_of_a_step_is_its_stretch():
    policy = rule(omega=1.0, stretch=0.1)
    spent = 0
    while (number := policy.detour((ready(rows=40),), at())) is not None:
        assert number == 0
        spent += COSTS.linear_ns(40)
    assert 0 < spent <= 0.1 * COSTS.step_ns(24, 24_000)


@given(
    idle=st.integers(0, 60), flying=st.lists(st.integers(1, 30), max_size=4), micro_batches=st.integers(1, 8),
    waited=st.integers(0, 10), most=st.one_of(st.none(), st.integers(1, 40)),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_launches_stay_within_what_is_idle_and_allowed(idle, flying, micro_batches, waited, most):
    total = idle + sum(flying)
    policy = Rule(COSTS, micro_batches, waited_rows=waited, max_rows=most)
    policy.begin(passing(cpu_rows=total))
    sizes = policy.dispatch(DispatchView(idle, len(flying), 24, flying=tuple(enumerate(flying)), next_number=9))
    assert all(n > 0 for n in sizes) and sum(sizes) <= idle
    assert sum(sizes) + sum(flying) <= max(sum(flying), most or total)
    if idle and not flying:
        assert sizes  # nobody is left out when nothing is under way


# -- planning --------------------------------------------------------------------------------------------------------


def test_the_best_prediction_wins_and_plans_are_kept_while_the_load_is_alike():
    policy, asked = planner({"rule": Guess(150.0), "sync_offload": Guess(140.0)})
    policy.begin(passing())
    assert policy.layout.kind == "rule" and policy.plans == 1
    count = len(asked)
    policy.begin(passing(1, cpu_rows=100))
    assert len(asked) == count
    policy.begin(passing(2, cpu_rows=200))
    assert policy.plans == 1  # not so soon
    policy.begin(passing(SETTLE_STEPS, cpu_rows=200))
    assert policy.plans == 2


def test_layouts_that_break_a_limit_are_not_used():
    fast = Guess(200.0, gpu_tpot_ns=1.3e6)
    policy, _ = planner({"rule": fast, "sync_offload": Guess(150.0, 1.2e6), "gpu_only": Guess(100.0)}, gpu_limit=1.25)
    policy.begin(passing())
    assert policy.layout.kind == "sync_offload"
    late = Guess(200.0, cpu_tpot_ns=16e6)
    policy, _ = planner({"rule": late, "gpu_only": Guess(100.0)}, default=90.0, cpu_limit=15.0)
    policy.begin(passing())
    assert policy.layout.kind == "gpu_only"


@pytest.mark.parametrize(("limit", "kind"), [(1.25, "sync_offload"), (1.3, "rule")])
def test_a_plan_leaves_a_little_room_below_a_limit(limit, kind):
    """A load is rounded before it is planned for: what is predicted at the limit would exceed it as often as not."""
    guesses = {"rule": Guess(200.0, 1.245e6), "sync_offload": Guess(150.0, 1.2e6), "gpu_only": Guess(100.0)}
    policy, _ = planner(guesses, gpu_limit=limit)
    policy.begin(passing())
    assert policy.layout.kind == kind


def test_the_guard_plans_again_without_what_falls_short():
    policy, _ = planner({"rule": Guess(150.0), "sync_offload": Guess(140.0)})
    policy.begin(passing())
    second = 10**9
    policy.begin(passing(WINDOW, now_ns=second, tokens=148.0))
    assert policy.layout.kind == "rule"  # within 5 %
    used = policy.layout
    policy.begin(passing(2 * WINDOW, now_ns=2 * second, tokens=148.0 + 75.0))
    assert policy.plans == 2 and policy.layout != used


def test_a_prediction_for_other_prompts_is_made_anew_and_not_held_against_the_layout():
    policy, _ = planner({"rule": Guess(150.0), "sync_offload": Guess(140.0)})
    policy.begin(passing(tokens=1000.0))
    used, some = policy.layout, 600  # prompt tokens: half a one for each token made, which is still a load alike
    policy.begin(passing(WINDOW, 10**9, 1075.0)._replace(prefill_tokens=some))
    assert policy.plans == 2 and policy.layout == used and not policy._guard.discount


def test_without_the_guard_it_believes_its_predictions():
    policy, _ = planner({"rule": Guess(150.0)}, guard=False)
    policy.begin(passing())
    policy.begin(passing(2 * WINDOW, now_ns=10**9, tokens=1.0))
    assert policy.plans == 1


def test_a_cpu_that_turns_out_slower_is_planned_for_anew():
    policy, _ = planner({"rule": Guess(150.0)})
    policy.begin(passing())
    policy.begin(passing(1, cpu_factor=1.2))
    assert policy.plans == 1  # not while it is still learning
    policy.begin(passing(SETTLE_STEPS, cpu_factor=1.3))
    assert policy.plans == 2 and policy.policy.costs.cpu_ns(8, 8000) > COSTS.cpu_ns(8, 8000)


def test_a_plan_may_take_its_time():
    policy, _ = planner({"rule": Guess(150.0)}, plan_steps=5)
    policy.begin(passing())
    policy.begin(passing(8, cpu_rows=200))
    used = policy.policy
    policy.begin(passing(12, cpu_rows=200))
    assert policy.plans == 2 and policy.policy is used
    policy.begin(passing(13, cpu_rows=200, cpu_factor=1.01))
    assert policy.plans == 2 and policy.expected == Guess(150.0)


# -- placement -------------------------------------------------------------------------------------------------------


def tiers(gpu, cpu):
    return {"gpu": TierView(gpu, 10), "cpu": TierView(cpu, 100)}


def test_the_cpu_tier_is_used_only_where_it_is_predicted_to_pay():
    good, _ = planner({"rule": Guess(150.0)})
    bad, _ = planner({"gpu_only": Guess(200.0)})
    need = RequestView(0, 3, 4)
    assert good.place(need, tiers(0, 50)) is None  # nothing planned yet
    for policy in (good, bad):
        policy.begin(passing(cpu_rows=0, waiting=5))
        assert policy.place(need, tiers(5, 50)) == "gpu"
    assert good.place(need, tiers(0, 50)) == "cpu"
    assert bad.place(need, tiers(0, 50)) is None
    assert bad.place(RequestView(0, 3, 40), tiers(0, 50)) == "cpu"  # it fits nowhere else


def test_rows_on_the_cpu_tier_do_not_starve_under_a_gpu_only_plan():
    policy, _ = planner({"gpu_only": Guess(200.0)})
    policy.begin(passing())
    dispatched = [policy.dispatch(DispatchView(4, 0, 24)) for _ in range(2 * MAX_WAIT_STEPS)]
    assert [s for s in dispatched if s] == [(4,), (4,)]
    assert policy.ask(ready(is_ready=False), at()) is Decision.WAIT  # through in one step
    assert policy.ask(ready(7, is_ready=False), at()) is Decision.SKIP  # in flight from an earlier plan
    assert policy.ask(ready(7), at()) is Decision.JOIN


def test_max_wait_launches_no_more_rows_than_hide_behind_the_gpus_attention():
    policy, _ = planner({"gpu_only": Guess(200.0)})
    policy.begin(passing(cpu_rows=400))
    view = DispatchView(400, 0, 24, (1000,) * 400, 24_000)
    (dispatched,) = [s for s in (policy.dispatch(view) for _ in range(MAX_WAIT_STEPS)) if s]
    assert dispatched == (hidden_rows(COSTS, 24, 1000)[0],) and 0 < dispatched[0] < 400


def test_what_was_chosen_for_what_and_how_often_can_be_read():
    policy, _ = planner({"rule": Guess(150.0)})
    assert "no layout" in repr(policy) and policy.steps_by_layout == {}
    policy.begin(passing())
    policy.begin(passing(1))
    policy.begin(passing(SETTLE_STEPS, gpu_rows=8, cpu_rows=8))
    (layout,) = {str(policy.layout)}
    assert policy.steps_by_layout == {layout: 3} and f"{layout} in 3 steps" in repr(policy)
    (change,) = policy.choices  # the second plan has chosen the same
    assert str(change) == f"{layout} for 24 + 96 rows of 992 tokens, by a simulation, 150 tokens/s predicted"


def test_auto_wants_two_per_cent():
    def predict(load, layout, costs, thorough):
        return Guess({"gpu_only": 100.0, "rule": 101.5}.get(layout.kind, 90.0))

    auto, adaptive = Auto(COSTS, predict), Adaptive(COSTS, predict)
    for policy in (auto, adaptive):
        policy.begin(passing())
    assert auto.layout.kind == "gpu_only" and adaptive.layout.kind == "rule"


def test_every_layout_has_its_policy():
    layouts = fixed_layouts(COSTS, 24, 96, 1000) + rule_layouts(COSTS, 24, 96, 1000)
    assert {a.kind for a in layouts} == {"gpu_only", "asymmetric", "async_overlap", "sync_offload", "rule"}
    assert len({str(a) for a in layouts}) == len(layouts)
    for layout in layouts:
        assert policy_of(layout, COSTS).name == layout.kind


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adaptive(), "policy 'adaptive' needs costs and predict"),
        (lambda: Limits(gpu=0.5), "limit gpu must be at least 1"),
        (lambda: Load(0, 0, 5), "load of 0 GPU rows and 0 CPU rows"),
        (lambda: Load(1, 0, 5, -1.0), "prompt_per_token must not be negative"),
        (lambda: Layout("fastest"), "layout kind 'fastest' is none of"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


# -- from the first step on, and without settling --------------------------------------------------------------------


class Silent:
    """Somebody elsewhere who never answers: closed forms have to do."""

    def __init__(self):
        self.cpu_ns, self.known = 0, {}

    def ask(self, question): ...

    def take(self):
        return None


def test_the_first_request_that_finds_the_gpu_tier_full_is_placed_by_a_closed_form():
    policy = Adaptive(COSTS, Silent())
    assert policy.place(RequestView(0, 3, 4, 100, 8, 0), tiers(5, 50)) == "gpu" and policy.layout is None
    assert policy.place(RequestView(1, 3, 4, 100, 7, 24), tiers(0, 50)) == "cpu"
    assert policy.uses_cpu
    policy.begin(passing(3, 10**9, cpu_rows=7)._replace(gpu_kv_tokens=2400, cpu_kv_tokens=700))
    assert (policy.choices[0].step, policy.choices[0].at_ns) == (3, 10**9)  # when it first decides
    assert str(policy.choices[0]) == "sync_offload for 24 + 7 rows of 100 tokens, by a closed form"


def test_a_full_gpu_tier_moves_requests_down_only_where_the_cpu_takes_part():
    assert Adaptive(COSTS, Silent()).move_down(24, 100)
    dear = COSTS.corrected(1000.0)
    assert not Adaptive(dear, Silent()).move_down(24, 100) and not Adaptive(COSTS, Silent()).move_down(1, 100)


def test_what_only_looks_a_layout_up_does_not_wait_for_a_load_to_settle():
    policy = Adaptive(COSTS, Silent())
    policy.begin(passing(cpu_rows=2))
    policy.begin(passing(1, cpu_rows=96))
    assert policy.plans == 2
    policy.begin(passing(2, cpu_rows=97))
    assert policy.plans == 2


def test_detours_are_prepared_for_only_by_a_layout_that_takes_them():
    for kind, takes in (("rule", True), ("sync_offload", False)):
        policy, _ = planner({kind: Guess(150.0)})
        policy.begin(passing())
        assert policy.layout.kind == kind and policy.takes_detours is takes


def test_what_slows_down_the_gpu_as_well_is_not_held_against_a_layout():
    for gpu_factor, plans in ((2.0, 1), (1.0, 2)):
        policy, _ = planner({"rule": Guess(150.0)})
        policy.begin(passing())
        for step in range(1, WINDOW + 1):
            policy.begin(passing(step, step * 10**7, step * 0.8)._replace(gpu_factor=gpu_factor))
        assert policy.plans == plans


@given(rows=st.integers(0, 500), cpu_rows=st.integers(1, 500), context=st.integers(1, 10**5))
@settings(max_examples=60, deadline=None)
def test_a_coarse_load_is_near_and_its_own_coarse_one(rows, cpu_rows, context):
    coarse = Load(rows, cpu_rows, context, 0.5).coarse()
    assert coarse.coarse() == coarse
    for a, b in ((rows, coarse.gpu_rows), (cpu_rows, coarse.cpu_rows), (context, coarse.context)):
        assert max(a, b) <= 1.26 * min(a, b)


def test_a_layout_of_all_cpu_rows_has_no_bound():
    """Those that come next take part at once."""
    found = fixed_layouts(COSTS, 24, 96, 1000)
    assert Layout("sync_offload") in found and all((a.max_rows or 0) < 96 for a in found)


def test_requests_over_both_tiers_are_a_layout_where_they_are_asked_for():
    """Whatever a simulation says of it: what is held here is that the layout is offered, served and counted."""
    costs, offered = COSTS, []

    def predict(load, layout, costs, thorough):
        offered.append(layout.kind)
        return Guess(200.0 if layout.kind == "split" else 100.0)

    for split in (False, True):
        policy = Adaptive(costs, predict, split=split)
        config = EngineConfig(20, 60, 16, max_model_len=400, max_num_seqs=16, max_num_batched_tokens=512)
        engine = Engine(PricedStages(costs.cost.shape, "fp16"), SimDevice(costs.pricing, record=False), policy, config)
        for _ in range(8):
            engine.add(DeclaredTokens(100), 30)
        most = 0
        while engine.unfinished:
            engine.step()
            most = max(most, sum(bool(r.pages.cold and r.pages.hot) for r in engine.scheduler.queues.running))
        assert (most > 0, "split" in offered, Layout("split") in policy.used) == (split, split, split)
        assert all(r.finish_reason == "length" for r in engine.take_records().requests)
