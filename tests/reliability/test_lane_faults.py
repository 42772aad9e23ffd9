"""Faults at every lane: each ends in bounded time with the project's error, gives every block back, and harms no other
engine. On the simulated device with the toy model (every op, every kind of fault), then on the host device.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time

import hang_clock
import pytest
from toy_stages import reference

from hybridattn import SamplingParams
from hybridattn.core.errors import DeviceError, HybridAttnError, InputError, StallError
from hybridattn.core.op import CPU, D2H, GPU, H2D, Op, Work
from hybridattn.devices.host import HostDevice
from hybridattn.engine.engine import Engine
from hybridattn.models.host_tier import HostRows, HostTier
from hybridattn.policies.fixed import SyncOffload
from hybridattn.policies.registry import POLICIES, make_policy

SECOND = 1_000_000_000
TOKENS = [[5, 6, 7], [8, 9]]
FREE = {"gpu": 8, "cpu": 8}
OPS = ("linear", "attention", "send_qkv", "cpu_attention", "fetch_output", "load_kv", "offload_kv")


def spoiled(rig, faulty_device, name, fault, at, policy="async_overlap"):
    """(engine, requests, right answers) with the ``at``-th op of ``name`` spoiled."""
    engine = rig.build(
        rig.policies[policy](), 3, gpu=4, cpu=8, max_num_batched_tokens=20, op_timeout_ns=10**6,
        make_device=lambda price: faulty_device(price, name, at, fault),
    )  # fmt: skip
    jobs = rig.jobs(3, 5, longest=60, most=8)
    requests = [engine.add(p, n) for p, n in jobs]
    return engine, requests, [reference(p, n, rig.layers) for p, n in jobs]


@pytest.mark.parametrize("at", [1, 2, 9])
@pytest.mark.parametrize("fault", ["raise", "hang"])
@pytest.mark.parametrize("name", OPS)
def test_a_fault_of_any_op_ends_the_engine_and_frees_everything(rig, faulty_device, name, fault, at):
    engine, requests, _ = spoiled(rig, faulty_device, name, fault, at)
    started_ns = engine.device.now_ns()
    with pytest.raises(DeviceError) as caught:
        for _ in range(3000):
            engine.step()
    assert engine.device.hit is not None
    assert "on lane" in str(caught.value) and " of request" in str(caught.value)
    assert isinstance(caught.value, StallError) == (fault == "hang")
    assert engine.device.now_ns() - started_ns < 10**8  # virtual: the time-out is 10**6
    rig.check_empty(engine)
    assert engine.broken is not None
    records = engine.take_records().requests
    assert sorted(r.request_id for r in records) == sorted(r.request_id for r in requests)
    assert {r.finish_reason for r in records if r.failed} == {"error"}
    with pytest.raises(HybridAttnError, match="this engine stopped earlier"):
        engine.add([1], 1)
    fresh = rig.build(rig.policies["async_overlap"](), 3)
    again = fresh.add([1, 2, 3], 4)
    rig.finish(fresh)
    assert rig.outputs([again]) == [reference([1, 2, 3], 4, rig.layers)]


@pytest.mark.parametrize("at", [1, 2, 9])
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("policy", ["sync_offload", "async_overlap", "all_on_cpu"])
def test_a_delayed_op_changes_times_and_nothing_else(rig, faulty_device, policy, name, at):
    engine, requests, want = spoiled(rig, faulty_device, name, "slow", at, policy)
    rig.finish(engine)
    assert rig.outputs(requests) == want


# -- the host device -------------------------------------------------------------------------------------------------


def check_broken(llm):
    """What every fault leaves behind."""
    assert llm.engine.broken is not None and llm.free_blocks() == FREE and llm.engine.unfinished == 0
    reasons = {r.finish_reason for r in llm.take_records().requests}
    assert "error" in reasons and reasons <= {"error", "length"}  # who had ended before the fault keeps its answer
    with pytest.raises(HybridAttnError, match="this engine stopped earlier"):
        llm.generate(TOKENS)


def check_next_one_works(open_tiny):
    with open_tiny() as llm:
        assert [len(o.token_ids) for o in llm.generate(TOKENS, SamplingParams(max_tokens=4))] == [4, 4]


def boom(*args):
    raise ArithmeticError("no such number")


@pytest.mark.parametrize(
    ("target", "lane"), [("_linear", GPU), ("_last", GPU), ("send_qkv", D2H), ("fetch_output", H2D)]
)
@pytest.mark.parametrize("kind", ["raise", "hang"])
def test_a_fault_on_a_lane_of_the_host_ends_in_bounded_time(open_tiny, monkeypatch, target, lane, kind):
    """What raises must be heard of before any time-out, and what hangs is the only op that meets one."""
    release, clock = threading.Event(), hang_clock.install(monkeypatch)

    def hang(*args):
        clock.begin()
        release.wait(30)

    close_s = 0.3 if kind == "hang" else 30.0
    with open_tiny(op_timeout_s=hang_clock.LIMIT_S, device_options={"close_timeout_s": close_s}) as llm:
        hang_clock.patient_pool(llm)
        owner = llm.stages if target.startswith("_") else llm.stages.exchange
        monkeypatch.setattr(owner, target, boom if kind == "raise" else hang)
        started = time.perf_counter()
        with pytest.raises(DeviceError, match=r"on lane .* of requests? r\d") as caught:
            llm.generate(TOKENS, SamplingParams(max_tokens=8))
        assert kind == "raise" or lane in (GPU, H2D) or CPU in str(caught.value)  # a stall is seen behind the copy
        assert time.perf_counter() - started < 20  # bounded; generous, because the machine may be busy
        assert isinstance(caught.value, StallError) == (kind == "hang")
        check_broken(llm)
    release.set()
    check_next_one_works(open_tiny)


def test_a_failed_attention_of_gpu_rows_surfaces(open_tiny, monkeypatch):
    with open_tiny(cpu_fraction=0.0) as llm:
        attend, calls = HostRows.attend, iter(range(100))

        def faulty(rows, layer):
            attend(rows, layer)
            if next(calls) == 7:
                boom()

        monkeypatch.setattr(HostRows, "attend", faulty)
        with pytest.raises(DeviceError, match="'attention' on lane gpu.compute .* failed: no such number"):
            llm.generate(TOKENS)


def test_a_failed_hand_down_surfaces(open_tiny, monkeypatch):
    offload_kv = HostTier.offload_kv
    with open_tiny(cpu_fraction=1.0) as llm:
        monkeypatch.setattr(
            HostTier, "offload_kv", lambda tier, layer, *rest: boom if layer == 1 else offload_kv(tier, layer, *rest)
        )
        with pytest.raises(DeviceError, match="'offload k,v' on lane gpu.d2h .* failed: no such number"):
            llm.generate(TOKENS)


@pytest.mark.parametrize("nth", [3, 100])
@pytest.mark.parametrize("where", ["_linear", "submit"])
def test_the_third_or_hundredth_allocation_is_refused(open_tiny, monkeypatch, where, nth):
    """In an op (``_linear`` makes tensors), and in the driver, which makes plans and asks the pool for descriptors."""
    with open_tiny() as llm:
        owner = llm.stages if where == "_linear" else llm.device
        real, count = getattr(owner, where), iter(range(1, 10**6))

        def scarce(*args, **kwargs):
            if next(count) == nth:
                raise MemoryError("cannot allocate 4096 bytes")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, where, scarce)
        # The driver may meet an op behind the failed one first, which then names its own error.
        with pytest.raises(DeviceError, match="cannot allocate 4096 bytes|on lane gpu.compute"):
            llm.generate(TOKENS, SamplingParams(max_tokens=60))
        check_broken(llm)
    check_next_one_works(open_tiny)


@pytest.mark.parametrize("nth", [1, 2])
def test_memory_refused_while_opening_leaves_no_thread(open_tiny, monkeypatch, nth):
    from cpu_kernels import pages

    before, real, count = set(threading.enumerate()), pages.allocate, iter(range(1, 10))

    def scarce(*args, **kwargs):
        if next(count) == nth:
            raise MemoryError("a KV pool needs 5 bytes, but only 4 bytes of memory are available")
        return real(*args, **kwargs)

    monkeypatch.setattr(pages, "allocate", scarce)
    with pytest.raises(InputError, match="too little memory .* needs 5 bytes, but only 4"):
        open_tiny()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("lane", [GPU, D2H, H2D, CPU])
def test_a_lane_whose_thread_cannot_start_says_so_at_its_first_op(monkeypatch, lane):
    """A cpu that went offline, a cpuset that changed: nobody waits a minute for a thread that is not there."""
    refused = threading.local()
    real = os.sched_setaffinity

    def pin(pid, cpus):
        if threading.current_thread().name.startswith(f"hybridattn {lane}"):
            refused.here = True
            raise OSError(errno.EINVAL, "Invalid argument")
        real(pid, cpus)

    monkeypatch.setattr(os, "sched_setaffinity", pin)
    device = HostDevice(gpu_memory_bytes=1 << 20, close_timeout_s=1.0)
    try:
        future = device.submit(Op("work", lane, Work("other", 0, 0, 1), lambda: 1, requests=("r7",)))
        with pytest.raises(
            DeviceError, match=rf"'work' on lane {lane} of request r7 .*'hybridattn {lane}.*' could not"
        ):
            future.wait(20 * SECOND)
        with pytest.raises(DeviceError, match="could not start"):
            device.drain(SECOND)
    finally:
        device.close()


def test_workers_that_died_are_an_error_at_once_and_not_a_hang(open_tiny):
    from cpu_kernels.codegen.fields import Ctl

    with open_tiny(cpu_fraction=1.0) as llm:
        llm.generate(TOKENS)
        llm.take_records()
        shared = llm.device.pool._shared
        shared.control[Ctl.STOP] = 1
        shared.ring_bell(Ctl.SIGNAL)
        for thread in shared.threads:
            thread.join(10)
            assert not thread.is_alive()
        with pytest.raises(DeviceError, match=r"cpu.attention at layer 0 of requests r2, r3 .* no living worker"):
            llm.generate(TOKENS)
        check_broken(llm)
    check_next_one_works(open_tiny)


def late(real, coin):
    def copy(*args):
        time.sleep(coin.choice([0, 0, 0.003]))
        real(*args)

    return copy


def test_copies_that_are_late_at_random_change_no_token(open_tiny):
    params = SamplingParams(max_tokens=8)
    with open_tiny(cpu_fraction=0.0) as llm:
        want = [o.token_ids for o in llm.generate(TOKENS, params)]
    for policy in ("sync_offload", "async_overlap"):
        with open_tiny(policy=policy, cpu_fraction=1.0) as llm:
            coin, exchange = random.Random(policy), llm.stages.exchange
            for name in ("send_qkv", "fetch_output"):
                setattr(exchange, name, late(getattr(exchange, name), coin))
            assert [o.token_ids for o in llm.generate(TOKENS, params)] == want


def test_an_op_behind_a_failed_one_names_the_one_that_failed():
    """Through any number of ops and lanes."""
    device = HostDevice(gpu_memory_bytes=1 << 20)
    try:
        work, chain = Work("other", 0, 0, 1), []
        first = device.submit(Op("first", GPU, work, boom, requests=("r3",)))
        for name, lane in (("down", D2H), ("attend", CPU), ("again", CPU)):
            chain.append(device.submit(Op(name, lane, work, lambda: 1), (chain[-1] if chain else first,)))
        for future in chain:
            with pytest.raises(DeviceError) as caught:
                future.wait(10 * SECOND)
            cause = "op 'first' on lane gpu.compute of request r3 failed: no such number"
            assert str(caught.value) == f"{future.op.describe()} failed: {cause}"
    finally:
        device.close()


def test_a_stall_without_anything_in_flight_names_the_request(rig):
    """The other kind of stall: unfinished work, but a policy that lets nobody in."""
    policy = rig.policies["gpu_only"]()
    policy.place = lambda request, tiers: None
    engine: Engine = rig.build(policy)
    engine.add([1, 2], 3)
    with pytest.raises(StallError, match="request r0 is waiting with nothing in flight and nothing to schedule"):
        engine.run()
    rig.check_empty(engine)


def test_a_policy_that_raises_ends_the_call_and_frees_everything(open_tiny):
    with open_tiny(policy="sync_offload") as llm:
        llm.policy.ask = boom
        with pytest.raises(DeviceError, match="a step was cut short by ArithmeticError: no such number"):
            llm.generate(TOKENS)
        check_broken(llm)
    check_next_one_works(open_tiny)


class OfAUser(SyncOffload):
    """Somebody's policy with a mistake."""

    def __init__(self, mistake=""):
        super().__init__(cpu_fraction=0.5)
        if mistake:
            raise KeyError(mistake)

    def ask(self, micro_batch, at):
        raise ArithmeticError("no such number")


def test_a_mistake_in_somebodys_policy_is_told_with_its_place(open_tiny, monkeypatch):
    with open_tiny(policy=OfAUser(), cpu_fraction=None) as llm:
        with pytest.raises(
            DeviceError, match=r"in ask\(\) of policy 'sync_offload' \(test_lane_faults.py:\d+\): no such"
        ):
            llm.generate(TOKENS)
    monkeypatch.setitem(POLICIES, "of_a_user", OfAUser)
    with pytest.raises(InputError, match="policy 'of_a_user' cannot be made: KeyError: 'typo'"):
        make_policy("of_a_user", mistake="typo")
