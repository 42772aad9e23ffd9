"""NEO's sub-batches and its choice, from views alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seen import Seen

from hybridattn.core.errors import InputError
from hybridattn.cost.catalog import shape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.policies.asymmetric import MAX_WAIT_STEPS, WIDTH, Asymmetric
from hybridattn.policies.base import Decision, DispatchView, LayerView, PromptView

COSTS = Costs(ModelCost(shape("llama3.1-8b"), "fp16"), machine("a10g", "epyc-7r32-16c", "pcie4-x16"))


def view(idle, gpu_rows=24, context=1000, prefill=(), next_number=0):
    kv_tokens = (context,) * idle
    return DispatchView(idle, 0, gpu_rows + len(prefill), kv_tokens, gpu_rows * context, tuple(prefill), next_number)


def test_neither_window_is_overfilled_and_both_are_filled():
    rows_0, rows_1 = Asymmetric(COSTS, choice="always").dispatch(view(400))
    ga = COSTS.attention_ns(24, 24_000)
    window_0, window_1 = COSTS.linear_ns(rows_1) + ga, COSTS.linear_ns(24 + rows_0)
    used_0, used_1 = COSTS.cpu_ns(rows_0, rows_0 * 1000), COSTS.cpu_ns(rows_1, rows_1 * 1000)
    assert used_0 <= window_0 and used_1 <= window_1
    one = COSTS.cpu_ns(2, 2000) - COSTS.cpu_ns(1, 1000)
    assert window_0 - used_0 < 2 * one and window_1 - used_1 < 2 * one


def test_a_prompt_in_the_step_makes_room_for_more_rows():
    few = sum(Asymmetric(COSTS, choice="always").dispatch(view(400)))
    many = sum(Asymmetric(COSTS, choice="always").dispatch(view(400, prefill=[(1000, 1000)])))
    assert many > 2 * few


def test_a_cpu_that_is_too_slow_is_left_alone_but_nobody_starves():
    slow = Asymmetric(COSTS.corrected(50.0))
    sizes = [slow.dispatch(view(10)) for _ in range(2 * MAX_WAIT_STEPS)]
    assert sum(map(bool, sizes)) == 2  # once every MAX_WAIT_STEPS steps, whatever the choice says
    assert sizes[0] == ()


@pytest.mark.parametrize(("factor", "pays"), [(0.2, True), (6.0, False)])
def test_both_choices_agree_far_from_the_threshold(factor, pays):
    for choice in ("neo", "eq6"):
        assert bool(Asymmetric(COSTS.corrected(factor), choice=choice).dispatch(view(400))) is pays


def test_sub_batch_0_is_waited_for_and_sub_batch_1_takes_a_detour_at_every_layer():
    policy = Asymmetric(COSTS, choice="always")
    assert len(policy.dispatch(view(400, next_number=10))) == 2
    at = LayerView(3, 32, 24, 0)
    first, second = (Seen(n, 5, 3, False, True) for n in (10, 11))
    assert policy.ask(first, at) is Decision.WAIT and policy.ask(second, at) is Decision.DETOUR
    assert policy.ask(first._replace(ready=True), at) is Decision.JOIN


def test_without_gpu_rows_two_micro_batches_take_turns():
    policy = Asymmetric(COSTS)
    assert policy.dispatch(DispatchView(9, 0, 0)) == (5, 4)
    assert policy.dispatch(DispatchView(4, 1, 0, flying=((0, 5),))) == (4,)
    assert policy.dispatch(DispatchView(4, 2, 0, flying=((0, 5), (1, 4)))) == ()


@given(idle=st.integers(1, 300), gpu_rows=st.integers(1, 60), context=st.integers(1, 8000), most=st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_sizes_are_what_there_is_at_most(idle, gpu_rows, context, most):
    sizes = Asymmetric(COSTS, choice="always", max_rows=most).dispatch(view(idle, gpu_rows, context))
    assert sum(sizes) <= min(idle, most) and all(n > 0 for n in sizes) and len(sizes) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [({"choice": "best"}, "choice must be one of neo, eq6, always, got 'best'"), ({"max_rows": 0}, "max_rows must be")],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Asymmetric(COSTS, **options)


def prompt_view(candidates, idle, gpu_rows=24, context=1000):
    return PromptView((1000,) * candidates, gpu_rows, gpu_rows * context, (), (context,) * idle)


def test_prompts_for_the_cpu_tier_are_read_as_long_as_they_hide_cpu_rows():
    policy = Asymmetric(COSTS)
    wanted = [policy.prompts(prompt_view(20, idle)) for idle in (0, 10, 100, 200, 400, 3000)]
    assert wanted == sorted(wanted)
    assert wanted[0] == 1  # one fills the GPU
    assert 1 < wanted[3] < 20 and wanted[-1] == 20
    assert policy.prompts(prompt_view(0, 100)) == 0


def test_the_prompts_wanted_hide_the_rows_that_are_dispatched_and_half_as_many_do_not():
    idle = 400
    wanted = Asymmetric(COSTS).prompts(prompt_view(20, idle))
    for prompts, all_fit in ((wanted, True), (wanted // 2, False)):
        dispatched = Asymmetric(COSTS, choice="always").dispatch(view(idle, prefill=[(1000, 1000)] * prompts))
        assert (sum(dispatched) == idle) is all_fit


def test_a_gpu_that_is_full_of_rows_reads_prompts_only_to_hide_cpu_rows():
    policy = Asymmetric(COSTS.corrected(0.3))
    assert policy.prompts(prompt_view(20, 0, gpu_rows=WIDTH, context=2000)) == 0
    busy = prompt_view(20, 0, gpu_rows=WIDTH, context=2000)._replace(idle_kv_tokens=(500,) * 900)
    assert 0 < policy.prompts(busy) < 20


def test_what_was_decided_with_the_prompts_holds_for_the_launch_and_only_for_that():
    slow = Asymmetric(COSTS.corrected(50.0))
    assert slow.prompts(prompt_view(20, 10)) == 1
    assert slow.dispatch(view(10, prefill=[(1000, 1000)])) == ()
    fast = Asymmetric(COSTS)
    fast.prompts(prompt_view(20, 200))
    assert sum(fast.dispatch(view(200, prefill=[(1000, 1000)] * 3))) > 0


@pytest.mark.parametrize("choice", ["eq6", "always"])
def test_other_choices_read_all_prompts(choice):
    assert Asymmetric(COSTS, choice=choice).prompts(prompt_view(20, 0)) == 20


def test_a_decision_without_cpu_rows_is_not_kept_for_a_later_step():
    policy = Asymmetric(COSTS)
    assert policy.prompts(prompt_view(20, 0)) == 1
    later = view(200, prefill=[(1000, 1000)] * 3)  # a step that had no prompts to choose from
    assert policy.dispatch(later) == Asymmetric(COSTS).dispatch(later) != ()
