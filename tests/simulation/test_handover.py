"""What lanes that are threads cost on the virtual clock: late starts and a driver that wakes up late."""

from __future__ import annotations

import pytest

from hybridattn.core.op import CPU, D2H, GPU, LANES, SKIPPED, WAITED, Op, Work
from hybridattn.cost.machine import driver_of
from hybridattn.cost.profile import Profile, Quantity
from hybridattn.cost.table import Sample
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
    ticket = sim.submit(op(GPU, 50))
    ticket.wait(1000)
    assert sim.now_ns() == 57
    ticket.wait(1000)  # it has ended: nobody sleeps
    sim.wait_any([ticket], 1000)
    assert sim.now_ns() == 57
    sim.wait_any([sim.submit(op(GPU, 50))], 1000)
    assert sim.now_ns() == 57 + 50 + 7


def test_layers_do_not_pass_in_one_step_where_handing_over_costs():
    assert device(record=False).resolves
    assert not device(record=False, wake_ns=1).resolves
    assert not device(record=False, handover_ns={CPU: 1}).resolves


def test_the_driver_of_a_profile_is_what_was_measured():
    names = ["submit", "poll", "wake", *(f"handover.{lane}" for lane in LANES)]
    quantities = {name: Quantity(i + 1.0, "ns", "measured", "here") for i, name in enumerate(names)}
    sample = Sample(GPU, "linear", 1, 0, 1.0, 1, 1)
    profile = Profile(
        "here", "machine", "measured", "f", quantities=quantities, samples=(sample,), axes={"a/b": ("rows",)}
    )
    made = driver_of(profile)
    assert [made[f"{name}_ns"] for name in ("submit", "poll", "wake")] == [1, 2, 3]
    assert made["handover_ns"] == {lane: i + 4 for i, lane in enumerate(LANES)}
    del quantities["wake"]
    with pytest.raises(Exception, match="has no wake"):
        driver_of(profile)
