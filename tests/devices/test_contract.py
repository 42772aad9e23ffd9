"""One contract over every device: order, no overlap, dependencies, errors, bounds, isolation."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from fake_cuda import FakeCuda
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpu_kernels import topology
from hybridattn.core.errors import DeviceError, InputError, StallError
from hybridattn.core.op import CPU, D2H, GPU, H2D, LANES, SKIPPED, WAITED, Op, Work
from hybridattn.core.trace import violations
from hybridattn.devices.cores import CorePlan
from hybridattn.devices.cuda import CudaDevice
from hybridattn.devices.cuda_presence import why_no_cuda
from hybridattn.devices.host import HostDevice
from hybridattn.devices.registry import open_device
from hybridattn.devices.sim import SimDevice

MS = 1_000_000
SECOND = 1000 * MS


def priced(op):
    return op.work.num_bytes  # the tests write the duration in ns there


def fake_cuda():
    """The CUDA device on a runtime whose streams are threads (test_cuda.py goes through chosen interleavings)."""
    runtime = FakeCuda(threads=True)
    device = CudaDevice(gpu_memory_bytes=1 << 20, runtime=runtime)
    close = device.close

    def close_both():
        close()
        runtime.close()

    device.close = close_both
    return device


KINDS = {
    "cuda_fake": fake_cuda,
    "cuda": lambda: CudaDevice(gpu_memory_bytes=1 << 20),
    "host": lambda: HostDevice(gpu_memory_bytes=1 << 20),
    "sim": lambda: SimDevice(priced, memory_bytes={"gpu": 1 << 20}),
    "sim_execute": lambda: SimDevice(priced, execute=True, memory_bytes={"gpu": 1 << 20}),
}


@pytest.fixture(params=[pytest.param(k, marks=pytest.mark.gpu) if k == "cuda" else k for k in KINDS])
def device(request):
    if request.param == "cuda" and why_no_cuda() is not None:
        pytest.skip(f"no CUDA device here: {why_no_cuda()}")
    made = KINDS[request.param]()
    yield made
    made.close()


def op(name, lane, ms=1.0, run=None, priority=WAITED):
    """An op that takes ``ms`` milliseconds on every device and then calls ``run``."""

    def body():
        if torch.cuda.is_available() and torch.cuda.current_stream() != torch.cuda.default_stream():
            torch.cuda._sleep(int(ms * MS))  # a card's lanes take time on their streams: cycles, at about 1 GHz
        else:
            time.sleep(ms / 1000)
        return run() if run is not None else None

    return Op(name, lane, Work("other", 0, int(ms * MS), 1), body, requests=(f"owner-of-{name}",), priority=priority)


def runs_closures(device):
    return device.kind != "simulated" or device.execute


def test_who_drives_keeps_to_the_cores_that_are_left_to_it_and_gets_its_own_back(device):
    before = os.sched_getaffinity(0)
    kept = before if device.kind == "simulated" else set(device.cores.gpu)
    with pytest.raises(KeyError), device.driving():
        assert os.sched_getaffinity(0) == kept
        raise KeyError
    assert os.sched_getaffinity(0) == before


def test_who_drives_does_not_narrow_what_other_threads_see_of_the_machine():
    device, before, seen = HostDevice(gpu_memory_bytes=1 << 20), topology.read(), []
    go = threading.Event()
    other = threading.Thread(target=lambda: (go.wait(5), seen.append(topology.read())))
    other.start()
    with device.driving():
        go.set()
        other.join(5)
    device.close()
    assert seen == [before] == [topology.read()]


def test_a_driver_whose_cores_are_gone_runs_where_it_may():
    device, before = HostDevice(gpu_memory_bytes=1 << 20), os.sched_getaffinity(0)
    device.cores = CorePlan(gpu=(4095,), pool=device.cores.pool)
    with device.driving():
        assert os.sched_getaffinity(0) == before
    device.close()


def test_every_op_appears_once_and_in_order(device):
    before = None
    for i in range(5):
        down = device.submit(op(f"down{i}", D2H), (before,) if before else ())
        attended = device.submit(op(f"attend{i}", CPU), (down,))
        attended.wait(SECOND)
        up = device.submit(op(f"up{i}", H2D), (attended,))
        before = device.submit(op(f"linear{i}", GPU), (up,))
    spans = device.drain(SECOND)
    assert sorted(s.name for s in spans) == sorted(
        f"{n}{i}" for i in range(5) for n in ("down", "attend", "up", "linear")
    )
    assert violations(spans) == []
    for lane in LANES:
        names = [s.name for s in sorted((s for s in spans if s.lane == lane), key=lambda s: s.start_ns)]
        assert names == sorted(names)
    assert device.drain(SECOND) == []


@given(
    st.lists(
        st.tuples(st.sampled_from(LANES), st.integers(0, 3), st.lists(st.integers(1, 6), max_size=3), st.booleans()),
        max_size=24,
    )
)
@example([(CPU, 1, [], False), (CPU, 0, [], True), (CPU, 1, [1], False), (CPU, 1, [], False)])  # overtook its own past
@settings(max_examples=80, deadline=None)
def test_any_graph_keeps_the_invariants_on_sim(graph):
    for execute in (False, True):
        device = SimDevice(priced, execute=execute)
        futures, ran = [], []
        for i, (lane, ms, back, skipped) in enumerate(graph):
            after = tuple(futures[-b] for b in back if b <= len(futures))
            for future in after:
                if future.op.lane == CPU and lane != CPU:
                    future.wait(SECOND)
            name = str(i)
            work = Work("other", 0, ms * MS, 1)
            made = Op(name, lane, work, lambda n=name, ran=ran: ran.append(n), priority=SKIPPED if skipped else WAITED)
            futures.append(device.submit(made, after))
        spans = device.drain(1000 * SECOND)
        assert violations(spans) == []
        assert len(spans) == len(graph)
        if execute:
            assert sorted(ran, key=int) == [str(i) for i in range(len(graph))]


def test_submitting_never_waits_for_earlier_work(device):
    slow = [device.submit(op(f"slow{lane}", lane, 50)) for lane in LANES]
    more = [
        device.submit(op(f"more{lane}", lane, 1), (t,) if lane in (D2H, CPU) else ())
        for lane, t in zip(LANES, slow, strict=True)
    ]
    assert not any(t.done() for t in slow + more)
    device.drain(SECOND)
    assert all(t.done() for t in slow + more)


def test_results_come_back(device):
    future = device.submit(op("answer", GPU, run=lambda: 42))
    assert future.wait(SECOND) == (42 if runs_closures(device) else None)
    cancelled = device.submit(op("discarded", GPU, run=lambda: 43))
    cancelled.cancel()
    assert cancelled.wait(SECOND) is None


@pytest.mark.parametrize("lane", LANES)
def test_an_error_surfaces_and_hangs_nothing(device, lane):
    if not runs_closures(device):
        pytest.skip("priced ops run nothing, so none can raise")

    def explode():
        raise ValueError("boom")

    ran = []
    bad = device.submit(op("bad", lane, run=explode))
    with pytest.raises(DeviceError, match=f"'bad' on lane {lane} of request owner-of-bad failed: boom"):
        bad.wait(SECOND)
    assert bad.done() and isinstance(bad.error, ValueError)
    child = device.submit(op("child", D2H, run=lambda: ran.append("child")), (bad,))
    with pytest.raises(DeviceError, match="boom"):
        child.wait(SECOND)
    assert ran == []  # what depends on a failed op does not run
    assert device.submit(op("next", lane, run=lambda: "fine")).wait(SECOND) == "fine"
    with pytest.raises(DeviceError, match="'bad'.*boom"):
        device.drain(SECOND)


def test_waits_are_bounded(device):
    slow = device.submit(op("slow", CPU, 200))
    with pytest.raises(
        StallError, match="'slow' on lane cpu.attention of request owner-of-slow did not end within 0.02 s"
    ):
        slow.wait(20 * MS)
    with pytest.raises(StallError, match="owner-of-slow"):
        device.wait_any([slow], 20 * MS)
    with pytest.raises(StallError):
        device.drain(20 * MS)
    slow.wait(SECOND)


def test_wait_any_returns_when_the_first_is_done(device):
    futures = [device.submit(op("first", CPU, 5)), device.submit(op("second", CPU, 300))]
    device.wait_any(futures, SECOND)
    assert futures[0].done() and not futures[1].done()


@pytest.mark.parametrize("lane", [GPU, D2H, H2D])
def test_gpu_lanes_refuse_to_wait_for_unfinished_host_work(device, lane):
    host = device.submit(op("host", CPU, 50))
    with pytest.raises(DeviceError, match="may not wait for unfinished host work"):
        device.submit(op("eager", lane), (host,))
    host.wait(SECOND)
    device.submit(op("late", lane), (host,)).wait(SECOND)


def test_waited_micro_batches_overtake_skipped_ones(device):
    gate = device.submit(op("gate", CPU, 30, priority=SKIPPED))
    others = [device.submit(op(f"skipped{i}", CPU, 2, priority=SKIPPED)) for i in range(2)]
    urgent = [device.submit(op(f"waited{i}", CPU, 2)) for i in range(2)]
    spans = {s.name: s for s in device.drain(SECOND)}
    order = sorted(spans, key=lambda n: spans[n].start_ns)
    # on a real lane the two closures that were handed to the worker before cannot be overtaken any more
    assert order.index("waited0") < order.index("waited1") and order.index("skipped0") < order.index("skipped1")
    assert order[0] == "gate" and order.index("waited1") < order.index("skipped1")
    assert all(t.done() for t in [gate, *others, *urgent])


def test_two_devices_do_not_see_each_other(device):
    other = KINDS["sim_execute"]() if device.kind == "simulated" else HostDevice(gpu_memory_bytes=1 << 20)
    try:
        mine = [device.submit(op(f"mine{i}", GPU)) for i in range(3)]
        theirs = [other.submit(op(f"theirs{i}", GPU)) for i in range(3)]
        device.reserve("gpu", 1 << 19, "a pool")
        assert {s.name for s in device.drain(SECOND)} == {"mine0", "mine1", "mine2"}
        assert {s.name for s in other.drain(SECOND)} == {"theirs0", "theirs1", "theirs2"}
        assert other.memory("gpu").free == 1 << 20
        assert all(t.done() for t in mine + theirs)
    finally:
        other.close()


def test_memory_is_booked_and_refused_with_both_numbers(device):
    device.reserve("gpu", 1 << 19, "a pool")
    assert device.memory("gpu").free == 1 << 19
    with pytest.raises(InputError, match="a second pool needs 1048576 bytes of the gpu tier, but 524288 are free"):
        device.reserve("gpu", 1 << 20, "a second pool")


def test_a_closed_device_refuses_work_and_closing_is_idempotent(device):
    device.close()
    device.close()
    with pytest.raises(DeviceError, match="closed device"):
        device.submit(op("late", GPU))


def test_closing_the_host_drops_what_has_not_started_and_leaves_no_thread():
    before = set(threading.enumerate())
    device = HostDevice()
    running = device.submit(op("running", GPU, 20))
    queued = device.submit(op("queued", GPU, 20))
    behind = device.submit(op("behind", CPU, 1), (queued,))
    device.close()
    assert running.done()
    assert queued.done() and behind.done()
    with pytest.raises(DeviceError, match="dropped|closing"):
        queued.wait(SECOND)
        behind.wait(SECOND)
    assert set(threading.enumerate()) <= before


def test_the_clock_of_the_simulator_is_virtual(device):
    start_ns = device.now_ns()
    device.sleep_until_ns(start_ns + 5 * MS)
    assert device.now_ns() >= start_ns + 5 * MS
    if device.kind == "simulated":
        device.sleep_until_ns(10**15)
        assert device.now_ns() == 10**15


def test_choosing_a_device_fails_loudly():
    with pytest.raises(InputError, match="device 'tpu' is unknown; choose one of host, cuda, sim"):
        open_device("tpu")
    with pytest.raises(InputError, match="device 'sim' computes no text"):
        open_device("sim")
    if why_no_cuda() is not None:
        with pytest.raises(InputError, match="device 'cuda' cannot be used: torch"):
            open_device("cuda")
