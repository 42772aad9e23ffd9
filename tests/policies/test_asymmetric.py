"""NEO's sub-batches and its choice, from views alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.errors import InputError
from hybridattn.cost.catalog import shape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.policies.asymmetric import PATIENCE_PASSES, Asymmetric
from hybridattn.policies.base import CohortView, LaunchView, LayerView, Verb

COSTS = Costs(ModelCost(shape("llama3.1-8b"), "fp16"), machine("a10g", "epyc-7r32-16c", "pcie4-x16"))


def view(idle, gpu_rows=24, context=1000, prefill=(), next_number=0):
    keys = (context,) * idle
    return LaunchView(idle, 0, gpu_rows + len(prefill), keys, gpu_rows * context, tuple(prefill), next_number)


def test_neither_window_is_overfilled_and_both_are_filled():
    riders, followers = Asymmetric(COSTS, choice="always").launch(view(400))
    ga = COSTS.attention_ns(24, 24_000)
    window_0, window_1 = COSTS.linear_ns(followers) + ga, COSTS.linear_ns(24 + riders)
    used_0, used_1 = COSTS.cpu_ns(riders, riders * 1000), COSTS.cpu_ns(followers, followers * 1000)
    assert used_0 <= window_0 and used_1 <= window_1
    one = COSTS.cpu_ns(2, 2000) - COSTS.cpu_ns(1, 1000)
    assert window_0 - used_0 < 2 * one and window_1 - used_1 < 2 * one


def test_a_prompt_in_the_pass_makes_room_for_more_rows():
    few = sum(Asymmetric(COSTS, choice="always").launch(view(400)))
    many = sum(Asymmetric(COSTS, choice="always").launch(view(400, prefill=[(1000, 1000)])))
    assert many > 2 * few


def test_a_cpu_that_is_too_slow_is_left_alone_but_nobody_starves():
    slow = Asymmetric(COSTS.corrected(50.0))
    sizes = [slow.launch(view(10)) for _ in range(2 * PATIENCE_PASSES)]
    assert sum(map(bool, sizes)) == 2  # once every PATIENCE_PASSES passes, whatever the choice says
    assert sizes[0] == ()


@pytest.mark.parametrize(("factor", "pays"), [(0.2, True), (6.0, False)])
def test_both_choices_agree_far_from_the_threshold(factor, pays):
    for choice in ("neo", "eq6"):
        assert bool(Asymmetric(COSTS.corrected(factor), choice=choice).launch(view(400))) is pays


def test_riders_are_waited_for_and_followers_take_a_detour_at_every_layer():
    policy = Asymmetric(COSTS, choice="always")
    assert len(policy.launch(view(400, next_number=10))) == 2
    at = LayerView(3, 32, 24, 0)
    rider, follower = (CohortView(n, 5, 3, False, True, 0) for n in (10, 11))
    assert policy.ask(rider, at) is Verb.WAIT and policy.ask(follower, at) is Verb.SKIP
    assert policy.detour((rider._replace(layer=4), follower), at) == 11
    assert policy.detour((rider._replace(layer=4), follower._replace(layer=4)), at) is None


def test_without_gpu_rows_two_cohorts_take_turns():
    policy = Asymmetric(COSTS)
    assert policy.launch(LaunchView(9, 0, 0)) == (5, 4)
    assert policy.launch(LaunchView(4, 1, 0, flying=((0, 5),))) == (4,)
    assert policy.launch(LaunchView(4, 2, 0, flying=((0, 5), (1, 4)))) == ()


@given(idle=st.integers(1, 300), gpu_rows=st.integers(1, 60), context=st.integers(1, 8000), most=st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_sizes_are_what_there_is_at_most(idle, gpu_rows, context, most):
    sizes = Asymmetric(COSTS, choice="always", max_rows=most).launch(view(idle, gpu_rows, context))
    assert sum(sizes) <= min(idle, most) and all(n > 0 for n in sizes) and len(sizes) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [({"choice": "best"}, "choice must be one of neo, eq6, always, got 'best'"), ({"max_rows": 0}, "max_rows must be")],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Asymmetric(COSTS, **options)
