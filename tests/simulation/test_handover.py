"""What lanes that are threads cost on the virtual clock: late starts and a driver that wakes up late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, LANES, SKIPPED, WAITED, Op, Work
from hybridattn.cost.machine import driver_of, late_name
from hybridattn.cost.profile import Profile, Quantity
from hybridattn.cost.table import Sample
from hybridattn.devices.late import in_turn, lateness
from hybridattn.devices.sim import SimDevice


def op(lane, took_ns, priority=SKIPPED):
    return Op("x", lane, Work("other", 0.0, took_ns, 1), priority=priority)


def device(**options):
    return SimDevice(lambda o: o.work.num_bytes, **options)


def test_an_op_begins_late_after_submission_lane_and_predecessors():
    sim = device(handover_ns={GPU: 5, D2H: 100, CPU: 30})
    first = sim.submit(op(GPU, 50))
    second = sim.submit(op(GPU, 20))  # behind its own lane
    down = sim.submit(op(D2H, 10), (first,))  # behind another lane
    attended = sim.submit(op(CPU, 40), (down,))
    times = [(t.start_ns, t.end_ns) for t in (first, second, down, attended)]
    assert times == [(5, 55), (60, 80), (155, 165), (195, 235)]


def test_an_overtaken_op_begins_late_again():
    sim = device(handover_ns={CPU: 30})
    running, skipped = sim.submit(op(CPU, 100)), sim.submit(op(CPU, 50))
    sim.sleep_until_ns(40)
    waited = sim.submit(op(CPU, 10, WAITED))
    assert (running.start_ns, waited.start_ns, skipped.start_ns) == (30, 160, 200)


def test_a_driver_that_waited_goes_on_late_and_one_that_did_not_at_once():
    sim = device(wake_ns=7)
    future = sim.submit(op(GPU, 50))
    future.wait(1000)
    assert sim.now_ns() == 57
    future.wait(1000)  # it has ended: nobody sleeps
    sim.wait_any([future], 1000)
    assert sim.now_ns() == 57
    sim.wait_any([sim.submit(op(GPU, 50))], 1000)
    assert sim.now_ns() == 57 + 50 + 7


def test_ops_of_other_lanes_take_time_of_the_gpus_core_from_the_next_op_there():
    sim = device(steals_ns=3)
    first = sim.submit(op(GPU, 50))
    sim.submit(op(D2H, 10))
    sim.submit(op(CPU, 10))
    second = sim.submit(op(GPU, 50))
    assert (first.end_ns, second.start_ns, second.end_ns) == (50, 50, 50 + 50 + 2 * 3)
    assert not device(record=False, steals_ns=3).resolves


def test_layers_do_not_pass_in_one_step_where_handing_over_costs():
    assert device(record=False).resolves
    assert not device(record=False, wake_ns=1).resolves
    assert not device(record=False, handover_ns={CPU: 1}).resolves


def test_the_driver_of_a_profile_is_what_was_measured():
    names = [
        "submit",
        "poll",
        "micro_batch_op",
        *(late_name(name, i) for name in ("wake", *LANES) for i in range(1, 10)),
    ]
    quantities = {name: Quantity(i + 1.0, "ns", "measured", "here") for i, name in enumerate(names)}
    sample = Sample(GPU, "linear", 1, 0, 1.0, 1, 1)
    profile = Profile(
        "here", "machine", "measured", "f", quantities=quantities, samples=(sample,), axes={"a/b": ("rows",)}
    )
    made = driver_of(profile)
    assert (made["submit_ns"], made["poll_ns"], made["steals_ns"]) == (1, 2, 3)
    assert made["wake_ns"] == tuple(range(4, 13))
    assert made["handover_ns"] == {lane: tuple(range(13 + 9 * i, 22 + 9 * i)) for i, lane in enumerate(LANES)}
    del quantities["wake.3"]
    with pytest.raises(Exception, match="has no wake.3"):
        driver_of(profile)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20), st.integers(0, 5))
def test_several_times_are_taken_in_turn_and_none_is_left_out(values, place):
    turns = in_turn(values, place)
    assert sorted(next(turns) for _ in values) == sorted(values)


def test_two_lanes_do_not_take_their_times_in_step():
    late = lateness(0, {lane: range(1, 10) for lane in LANES})
    orders = {tuple(next(late[lane]) for _ in range(9)) for lane in LANES}
    assert len(orders) == len(LANES)


@pytest.mark.parametrize("given_ns", [{"gpu.other": 1}, {GPU: ()}, {GPU: (3, -1)}])
def test_lateness_is_checked(given_ns):
    with pytest.raises(InputError, match="lateness of"):
        lateness(0, given_ns)
