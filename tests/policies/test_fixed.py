"""Policies are pure: decisions from frozen views, no device anywhere."""

from __future__ import annotations

import subprocess
import sys

import pytest
from seen import Seen

from hybridattn.core.errors import InputError
from hybridattn.cost.catalog import shape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.policies.base import LaunchView, LayerView, Policy, RequestView, TierView, Verb
from hybridattn.policies.fixed import AsyncOverlap, CpuOnly, FixedFraction, GpuOnly, SyncOffload
from hybridattn.policies.registry import POLICIES, make_policy

COSTS = Costs(ModelCost(shape("llama3.1-8b"), "fp16"), machine("a10", "epyc-7r32-16c", "pcie4-x16"))
GIVEN = {"costs": COSTS, "predict": lambda load, layout, costs, thorough: None}
AT = LayerView(layer=3, num_layers=8, gpu_rows=4, now_ns=0)


def cohort(ready, same_pass=False):
    return Seen(number=0, size=2, layer=3, ready=ready, same_pass=same_pass)


def tiers(gpu, cpu):
    return {"gpu": TierView(gpu, 10), "cpu": TierView(cpu, 10)}


def test_gpu_only_never_places_on_the_cpu():
    need = RequestView(0, 3, 4)
    assert GpuOnly().place(need, tiers(3, 10)) == "gpu"
    assert GpuOnly().place(need, tiers(2, 10)) is None
    with pytest.raises(InputError, match="gpu_only"):
        GpuOnly().ask(cohort(True), AT)


@pytest.mark.parametrize("policy", [SyncOffload(), AsyncOverlap()])
def test_offload_policies_spill_to_the_cpu_tier(policy):
    need = RequestView(0, 3, 4)
    assert policy.place(need, tiers(3, 10)) == "gpu"
    assert policy.place(need, tiers(2, 3)) == "cpu"
    assert policy.place(need, tiers(2, 2)) is None
    assert policy.place(RequestView(0, 3, 11), tiers(10, 10)) is None  # could never end there


def test_sync_offload_waits_and_async_overlap_skips():
    assert SyncOffload().ask(cohort(False), AT) is Verb.WAIT
    assert SyncOffload().ask(cohort(True), AT) is Verb.JOIN
    assert AsyncOverlap().ask(cohort(False), AT) is Verb.SKIP
    assert AsyncOverlap().ask(cohort(True), AT) is Verb.JOIN


def test_same_pass_joins_can_be_switched_off():
    strict = AsyncOverlap(same_pass=False)
    assert strict.ask(cohort(True, same_pass=True), AT) is Verb.SKIP
    assert strict.ask(cohort(True, same_pass=False), AT) is Verb.JOIN


def test_patience_waits_for_what_may_join_and_no_longer_than_it_says():
    patient = AsyncOverlap(patience_us=1.5)
    assert patient.ask(cohort(False), AT) is Verb.WAIT and patient.patience_ns(cohort(False), AT) == 1500
    assert patient.ask(cohort(True), AT) is Verb.JOIN
    strict = AsyncOverlap(same_pass=False, patience_us=1.5)
    assert strict.ask(cohort(False, same_pass=True), AT) is Verb.SKIP
    for bad in (-1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match=f"patience_us must be .* got {bad}"):
            AsyncOverlap(patience_us=bad)


def test_idle_rows_leave_together_while_there_is_room_for_a_cohort():
    policy = AsyncOverlap(max_cohorts=2)
    assert policy.launch(LaunchView(idle_rows=5, cohorts=1, gpu_rows=3)) == (5,)
    assert policy.launch(LaunchView(idle_rows=5, cohorts=2, gpu_rows=3)) == ()
    assert policy.launch(LaunchView(idle_rows=0, cohorts=0, gpu_rows=3)) == ()


def test_bounded_offload_and_cohorts_take_no_more_rows_than_they_may():
    assert SyncOffload(max_rows=3).launch(LaunchView(5, 0, 4)) == (3,)
    assert AsyncOverlap(max_rows=4).launch(LaunchView(5, 1, 4, flying=((0, 3),))) == (1,)
    assert AsyncOverlap(max_rows=3).launch(LaunchView(5, 1, 4, flying=((0, 3),))) == ()


def test_equal_cohorts_leave_one_per_pass():
    policy = AsyncOverlap(max_cohorts=3, equal=True)
    assert policy.launch(LaunchView(9, 0, 4)) == (3,)
    assert policy.launch(LaunchView(6, 1, 4, flying=((0, 3),))) == (3,)
    assert policy.launch(LaunchView(3, 3, 4, flying=((0, 3), (1, 3), (2, 3)))) == ()


def test_cpu_only_uses_one_tier_and_two_cohorts_in_turn():
    policy = CpuOnly()
    assert policy.place(RequestView(0, 3, 4), tiers(9, 2)) is None
    assert policy.place(RequestView(0, 3, 4), tiers(0, 9)) == "cpu"
    assert policy.launch(LaunchView(5, 0, 0)) == (3, 2)
    assert policy.launch(LaunchView(5, 1, 0)) == (5,)
    waiting, back = cohort(False)._replace(number=1), cohort(True)._replace(number=2, layer=6)
    assert policy.detour((waiting, back), AT) == 2
    assert policy.detour((waiting, back._replace(layer=4)), AT) is None  # the GPU comes by there next


def test_a_fixed_fraction_is_waited_for():
    policy = FixedFraction(0.25)
    assert "".join(policy.allowed(i)[0][0] for i in range(8)) == "gggcgggc"
    assert policy.ask(cohort(False), AT) is Verb.WAIT


def test_policies_are_found_by_name_and_by_import_path():
    assert {type(make_policy(name, **GIVEN)) for name in POLICIES} == set(POLICIES.values())
    assert make_policy("async_overlap", max_cohorts=7).max_cohorts == 7
    assert isinstance(make_policy("hybridattn.policies.fixed:SyncOffload"), SyncOffload)
    ready = GpuOnly()
    assert make_policy(ready) is ready


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nonsense", {}, "policy 'nonsense' is unknown; choose one of .*async_overlap, .*gpu_only, .*sync_offload"),
        ("no.such:Thing", {}, "policy 'no.such:Thing' cannot be imported"),
        ("os:getcwd", {}, "not a subclass"),
        ("async_overlap", {"speed": 3}, "policy 'async_overlap' has no option 'speed'"),
        ("async_overlap", {"cpu_fraction": 1.5}, "cpu_fraction must lie in 0..1, got 1.5"),
        ("gpu_only", {"cpu_fraction": 0.5}, "cpu_fraction 0.5 asks for the CPU tier, which policy 'gpu_only' does not"),
        ("async_overlap", {"max_cohorts": 0}, "max_cohorts must be at least 1, got 0"),
    ],
)
def test_unusable_policies_are_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        make_policy(name, **options)


def test_every_policy_that_uses_the_cpu_decides_something_at_every_layer():
    for cls in POLICIES.values():
        if "cpu" in cls.tiers:
            for ready in (True, False):
                assert isinstance(make_policy(cls.name, **GIVEN).ask(cohort(ready), AT), Verb)
        assert cls.detour is Policy.detour or make_policy(cls.name, **GIVEN).detour((), AT) is None


def test_control_rooms_import_no_torch():
    code = (
        "import sys, hybridattn.policies.registry, hybridattn.cost, hybridattn.devices.sim, hybridattn.runtime.engine, "
        "hybridattn.runtime.llm, hybridattn.workload, hybridattn.metrics; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numba', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
