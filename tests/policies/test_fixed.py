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
from hybridattn.policies.base import Decision, DispatchView, LayerView, RequestView, TierView
from hybridattn.policies.fixed import AsyncOverlap, CpuOnly, FixedFraction, GpuOnly, SyncOffload
from hybridattn.policies.registry import POLICIES, make_policy

COSTS = Costs(ModelCost(shape("llama3.1-8b"), "fp16"), machine("a10", "epyc-7r32-16c", "pcie4-x16"))
GIVEN = {"costs": COSTS, "predict": lambda load, layout, costs, thorough: None}
AT = LayerView(layer=3, num_layers=8, gpu_rows=4, now_ns=0)


def micro_batch(ready, same_step=False):
    return Seen(number=0, size=2, layer=3, ready=ready, same_step=same_step)


def tiers(gpu, cpu):
    return {"gpu": TierView(gpu, 10), "cpu": TierView(cpu, 10)}


def test_gpu_only_never_places_on_the_cpu():
    need = RequestView(0, 3, 4)
    assert GpuOnly().place(need, tiers(3, 10)) == "gpu"
    assert GpuOnly().place(need, tiers(2, 10)) is None
    with pytest.raises(InputError, match="gpu_only"):
        GpuOnly().ask(micro_batch(True), AT)


@pytest.mark.parametrize("policy", [SyncOffload(), AsyncOverlap()])
def test_offload_policies_spill_to_the_cpu_tier(policy):
    need = RequestView(0, 3, 4)
    assert policy.place(need, tiers(3, 10)) == "gpu"
    assert policy.place(need, tiers(2, 3)) == "cpu"
    assert policy.place(need, tiers(2, 2)) is None
    assert policy.place(RequestView(0, 3, 11), tiers(10, 10)) is None  # could never end there


def test_sync_offload_waits_and_async_overlap_skips():
    assert SyncOffload().ask(micro_batch(False), AT) is Decision.WAIT
    assert SyncOffload().ask(micro_batch(True), AT) is Decision.JOIN
    assert AsyncOverlap().ask(micro_batch(False), AT) is Decision.SKIP
    assert AsyncOverlap().ask(micro_batch(True), AT) is Decision.JOIN


def test_same_step_joins_can_be_switched_off():
    strict = AsyncOverlap(same_step=False)
    assert strict.ask(micro_batch(True, same_step=True), AT) is Decision.SKIP
    assert strict.ask(micro_batch(True, same_step=False), AT) is Decision.JOIN


def test_max_wait_waits_for_what_may_join_and_no_longer_than_it_says():
    patient = AsyncOverlap(max_wait_us=1.5)
    assert patient.ask(micro_batch(False), AT) is Decision.WAIT and patient.max_wait_ns(micro_batch(False), AT) == 1500
    assert patient.ask(micro_batch(True), AT) is Decision.JOIN
    strict = AsyncOverlap(same_step=False, max_wait_us=1.5)
    assert strict.ask(micro_batch(False, same_step=True), AT) is Decision.SKIP
    for bad in (-1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match=f"max_wait_us must be .* got {bad}"):
            AsyncOverlap(max_wait_us=bad)


def test_idle_rows_leave_together_while_there_is_room_for_a_micro_batch():
    policy = AsyncOverlap(max_micro_batches=2)
    assert policy.dispatch(DispatchView(idle_rows=5, micro_batches=1, gpu_rows=3)) == (5,)
    assert policy.dispatch(DispatchView(idle_rows=5, micro_batches=2, gpu_rows=3)) == ()
    assert policy.dispatch(DispatchView(idle_rows=0, micro_batches=0, gpu_rows=3)) == ()


def test_bounded_offload_and_micro_batches_take_no_more_rows_than_they_may():
    assert SyncOffload(max_rows=3).dispatch(DispatchView(5, 0, 4)) == (3,)
    assert AsyncOverlap(max_rows=4).dispatch(DispatchView(5, 1, 4, flying=((0, 3),))) == (1,)
    assert AsyncOverlap(max_rows=3).dispatch(DispatchView(5, 1, 4, flying=((0, 3),))) == ()


def test_equal_micro_batches_leave_one_per_step():
    policy = AsyncOverlap(max_micro_batches=3, equal=True)
    assert policy.dispatch(DispatchView(9, 0, 4)) == (3,)
    assert policy.dispatch(DispatchView(6, 1, 4, flying=((0, 3),))) == (3,)
    assert policy.dispatch(DispatchView(3, 3, 4, flying=((0, 3), (1, 3), (2, 3)))) == ()


def test_cpu_only_uses_one_tier_and_two_micro_batches_in_turn():
    policy = CpuOnly()
    assert policy.place(RequestView(0, 3, 4), tiers(9, 2)) is None
    assert policy.place(RequestView(0, 3, 4), tiers(0, 9)) == "cpu"
    assert policy.dispatch(DispatchView(5, 0, 0)) == (3, 2)
    assert policy.dispatch(DispatchView(5, 1, 0)) == (5,)
    waiting, back = micro_batch(False)._replace(number=1), micro_batch(True)._replace(number=2, layer=6)
    assert policy.detour((waiting, back), AT) == 2
    assert policy.detour((waiting, back._replace(layer=4)), AT) is None  # the GPU comes by there next


def test_a_fixed_fraction_is_waited_for():
    policy = FixedFraction(0.25)
    assert "".join(policy.allowed(i)[0][0] for i in range(8)) == "gggcgggc"
    assert policy.ask(micro_batch(False), AT) is Decision.WAIT


def test_policies_are_found_by_name_and_by_import_path():
    assert {type(make_policy(name, **GIVEN)) for name in POLICIES} == set(POLICIES.values())
    assert make_policy("async_overlap", max_micro_batches=7).max_micro_batches == 7
    assert isinstance(make_policy("hybridattn.policies.fixed:SyncOffload"), SyncOffload)
    ready = GpuOnly()
    assert make_policy(ready) is ready


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nonsense", {}, "policy 'nonsense' is unknown; choose one of .*async_overlap, .*gpu_only, .*sync_offload"),
        ("no.such:Thing", {}, "policy 'no.such:Thing' cannot be imported"),
        (":Thing", {}, "policy ':Thing' cannot be imported: ValueError: Empty module name"),
        (".such:Thing", {}, "policy '.such:Thing' cannot be imported: TypeError: the 'package' argument is required"),
        ("os:getcwd", {}, "not a subclass"),
        ("async_overlap", {"speed": 3}, "policy 'async_overlap' has no option 'speed'"),
        ("async_overlap", {"cpu_fraction": 1.5}, "cpu_fraction must lie in 0..1, got 1.5"),
        ("gpu_only", {"cpu_fraction": 0.5}, "cpu_fraction 0.5 asks for the CPU tier, which policy 'gpu_only' does not"),
        ("async_overlap", {"max_micro_batches": 0}, "max_micro_batches must be at least 1, got 0"),
    ],
)
def test_unusable_policies_are_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        make_policy(name, **options)


def test_every_policy_that_uses_the_cpu_decides_something_at_every_layer():
    for cls in POLICIES.values():
        if "cpu" in cls.tiers:
            for ready in (True, False):
                assert isinstance(make_policy(cls.name, **GIVEN).ask(micro_batch(ready), AT), Decision)
        assert make_policy(cls.name, **GIVEN).detour((), AT) is None


def test_control_rooms_import_no_torch():
    code = (
        "import sys, hybridattn.policies.registry, hybridattn.cost, hybridattn.devices.sim, hybridattn.engine.engine, "
        "hybridattn.engine.replay, hybridattn.planning.planner, hybridattn.workload, hybridattn.metrics; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numba', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
