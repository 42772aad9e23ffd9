"""The CUDA device's state machine on a fake runtime whose streams advance in an order that a seed chooses."""

from __future__ import annotations

import gc
import os
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cuda import GIB, FakeCuda

from cpu_kernels import KVPages, plan_decode
from cpu_kernels.pages import pack
from cpu_kernels.reference import decode_reference
from hybridattn.core.deferred import Deferred
from hybridattn.core.device import Span
from hybridattn.core.errors import DeviceError, InputError, StallError
from hybridattn.core.op import CPU, D2H, GPU, H2D, SKIPPED, Op, Work
from hybridattn.core.trace import violations
from hybridattn.devices import cuda_runtime
from hybridattn.devices.cores import plan_cores
from hybridattn.devices.cuda import CudaDevice
from hybridattn.devices.cuda_clock import GpuClock
from hybridattn.devices.cuda_runtime import TorchCuda, loaded_library
from hybridattn.devices.cuda_spans import spans_of
from hybridattn.devices.cuda_words import Words

SECOND = 1_000_000_000
SEEDS = range(12)


@pytest.fixture
def opened():
    """``opened(runtime, **options)`` -> device; all are closed at the end."""
    devices = []

    def open_one(runtime, **options):
        devices.append(CudaDevice(runtime=runtime, **options))
        return devices[-1]

    yield open_one
    for device in devices:
        device.close()


def op(name, lane, run=None, native=None, priority=0):
    return Op(name, lane, Work("other", 0, 0, 1), run, native=native, requests=(f"owner-of-{name}",), priority=priority)


class Attention:
    """One native decode step over two rows whose queries come down from the "card"."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.pages = KVPages(2, 1, 16, 16, "fp32")
        self.k, self.v = (rng.standard_normal((2, 1, 16, 16)).astype(np.float32) for _ in range(2))
        pack(self.pages, 0, [0, 1], self.k, self.v)
        self.table, self.lens = np.array([[0], [1]], np.int32), np.array([16, 7], np.int32)
        self.plan = plan_decode(self.pages, self.table, self.lens, 2, slot_mapping=[-1, -1])
        self.on_gpu, self.q = (np.full((2, 2, 16), np.nan, np.float32) for _ in range(2))
        self.out = np.full((2, 2, 16), np.nan, np.float32)
        self.query = rng.standard_normal((2, 2, 16)).astype(np.float32)

    def submit(self, device):
        """linear writes q, send copies it down, cpu.attention attends: the future of the last."""
        made = device.submit(op("linear", GPU, lambda: self.on_gpu.__setitem__(..., self.query)))
        sent = device.submit(op("send", D2H, lambda: self.q.__setitem__(..., self.on_gpu)), (made,))
        native = lambda pool: pool.submit(self.plan, self.q, self.out)  # noqa: E731
        return device.submit(op("attention", CPU, native=native), (sent,))

    def right(self):
        truth, _ = decode_reference(self.query, self.k, self.v, self.table, self.lens)
        return bool(np.allclose(self.out, truth, atol=1e-5))


# -- hand-over -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handover", ["bell", "stream", "poll"])
@pytest.mark.parametrize("seed", SEEDS)
def test_attention_starts_after_the_copy_whoever_hands_over(opened, seed, handover):
    runtime = FakeCuda(seed, words=handover == "bell")
    device = opened(runtime, handover=handover)
    attention = Attention()
    future = attention.submit(device)
    future.wait(5 * SECOND)
    assert attention.right()
    assert runtime.host_calls == (handover == "stream") and runtime.rings == 2 * (handover == "bell")  # one probed
    device.submit(op("fetch", H2D), (future,)).wait(SECOND)
    spans = device.drain(SECOND)
    assert violations(spans) == [] and len(spans) == 4


def passed(device, attention, native=None, fetch=None):
    """A micro-batch passes a linear stage: what its attention gave comes up, and what is made of it goes down to the
    next one. The futures of the stage and of that attention; whether all was done in order, once they have ended."""
    up, then = np.full_like(attention.out, np.nan), Attention()
    first = attention.submit(device)
    assert device.handover != "bell" or device.waits_for(first, 5 * SECOND)
    first.wait(5 * SECOND) if device.handover != "bell" else None
    native = native or (lambda pool: pool.submit(then.plan, then.q, then.out))
    linear = op("linear", GPU, lambda: then.on_gpu.__setitem__(..., then.query + 0 * up))
    made, (future,) = device.submit_pass(
        [(first, op("fetch", H2D, fetch or (lambda: up.__setitem__(..., attention.out))))],
        linear, (device.submit(op("attention", GPU)),),
        [(op("send", D2H, lambda: then.q.__setitem__(..., then.on_gpu)), op("attention", CPU, native=native))],
    )  # fmt: skip
    return made, future, lambda: then.right() and np.array_equal(up, attention.out)


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("handover", ["bell", "stream", "poll"])
def test_a_pass_keeps_its_order(opened, handover, record):
    for seed in range(6):
        device = opened(FakeCuda(seed, words=handover == "bell"), handover=handover, record=record)
        _, future, right = passed(device, Attention())
        future.wait(5 * SECOND)
        assert right() and violations(device.drain(SECOND)) == []


@pytest.mark.parametrize("lane", [GPU, D2H, H2D])
def test_a_pass_needs_the_waits_of_every_stream(opened, lane):
    for seed in range(60):
        device = opened(FakeCuda(seed, words=True), record=False)
        device.runtime.deaf = {device.stream(lane)}
        device.runtime.forget = ("words",) if lane == H2D else ()
        _, future, right = passed(device, Attention())
        future.wait(5 * SECOND)
        if not right():
            return
    pytest.fail(f"the waits of {lane} can be taken out without being seen")


def test_what_fails_in_a_pass_fails_what_comes_behind(opened):
    device = opened(FakeCuda(1, words=True), record=False)
    made, future, _ = passed(device, Attention(), native=lambda pool: 1 / 0)
    made.wait(SECOND)
    with pytest.raises(DeviceError, match="division by zero"):
        future.wait(SECOND)
    made, future, _ = passed(device, Attention(), fetch=lambda: 1 / 0)
    for failed in (made, future):
        with pytest.raises(DeviceError, match="division by zero"):
            failed.wait(SECOND)


def test_without_a_record_events_take_no_time_and_serve_again(opened):
    runtime = FakeCuda(3)
    device = opened(runtime, record=False)
    made, event = [], runtime.event
    runtime.event = lambda timing=True: made.append(timing) or event(timing)
    for _ in range(20):
        before = time.perf_counter_ns()
        last = device.submit(op("copy", D2H), (device.submit(op("linear", GPU)),))
        last.wait(SECOND)
        assert before <= last.start_ns <= last.end_ns <= time.perf_counter_ns()
    assert device.drain(SECOND) == []
    assert True not in made and len(made) <= 4


def test_without_waits_the_same_check_fires(opened):
    """The mutation of the test above: some order of the streams must now give a wrong result."""
    wrong = 0
    for seed in SEEDS:
        device = opened(FakeCuda(seed, forget=("waits",)))
        attention = Attention()
        attention.submit(device).wait(5 * SECOND)
        wrong += not attention.right()
    assert wrong > 0


def test_host_calls_are_optional_and_auto_says_which(opened):
    rings = opened(FakeCuda(words=True))
    assert rings.handover == "bell" and rings.why_handover is None
    calls = opened(FakeCuda())
    assert calls.handover == "stream" and calls.why_handover == "this fake has no words"
    with pytest.raises(InputError, match="handover 'bell' cannot be used: this fake has no words"):
        CudaDevice(runtime=FakeCuda(), handover="bell")
    deaf = opened(FakeCuda(words=True, forget=("words",)))
    assert deaf.handover == "stream" and deaf.why_handover == "a stream does not wait for a word"
    assert opened(FakeCuda(host_call=False)).handover == "poll"
    with pytest.raises(InputError, match="handover 'stream' cannot be used: this fake has none"):
        CudaDevice(runtime=FakeCuda(host_call=False), handover="stream")
    refused = opened(FakeCuda(forget=("host calls",)))
    assert refused.handover == "poll" and refused.why_handover == "the host call was refused with CUDA error 801"
    with pytest.raises(InputError, match="handover must be one of auto, bell, stream, poll, got 'magic'"):
        CudaDevice(runtime=FakeCuda(), handover="magic")


def fetched(device, future, out):
    """A copy of ``out`` that a stream makes once ``future`` has ended, and what it copied."""
    assert device.waits_for(future, SECOND)
    seen = np.full_like(out, np.nan)
    return device.submit(op("fetch", H2D, lambda: seen.__setitem__(..., out)), (future,)), seen


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_waits_for_attention_while_the_driver_goes_on(opened, seed):
    runtime = FakeCuda(seed, words=True)
    device = opened(runtime)
    gate, attention = Attention(), Attention()
    gate.q[...] = 0
    held = device.pool.submit(gate.plan, gate.q, gate.out, fault="hang")  # each worker that there may be is busy
    more = [device.pool.submit(gate.plan, gate.q, gate.out, fault="hang") for _ in range(device.pool.num_workers - 1)]
    fetch, seen = fetched(device, attention.submit(device), attention.out)
    after = device.submit(op("linear", GPU, lambda: seen.sum()), (fetch,))
    for _ in range(50):
        assert not fetch.done()  # and asking does not block
    device.pool.release_faults()
    assert np.isfinite(after.wait(5 * SECOND)) and attention.right() and np.array_equal(seen, attention.out)
    assert violations(device.drain(SECOND)) == [] and held.done() and all(job.done() for job in more)


def test_without_waits_for_words_the_same_check_fires(opened):
    runtime = FakeCuda(1, words=True)
    device = opened(runtime)
    runtime.forget = ("words",)
    attention = Attention()
    native = lambda pool: pool.submit(attention.plan, attention.q, attention.out, fault="hang")  # noqa: E731
    fetch, seen = fetched(device, device.submit(op("attention", CPU, native=native)), attention.out)
    while not device.runtime.query(fetch.finished):
        pass
    assert np.isnan(seen).all()
    device.pool.release_faults()


def test_a_worker_that_hangs_releases_the_stream_within_the_bound(opened):
    """The op that waited, and whatever came after it, fail with the attention's error."""
    device = opened(FakeCuda(2, words=True))
    attention = Attention()
    native = lambda pool: pool.submit(attention.plan, attention.q, attention.out, fault="hang")  # noqa: E731
    hung = device.submit(op("attention", CPU, native=native))
    assert device.waits_for(hung, SECOND // 10)
    fetch = device.submit(op("fetch", H2D), (hung,))
    behind = device.submit(op("linear", GPU), (fetch,))
    with pytest.raises(DeviceError, match="did not end in time"):
        behind.wait(20 * SECOND)
    assert "did not end in time" in str(hung.error) and "did not end in time" in str(fetch.error)
    device.pool.release_faults()


def test_workers_that_died_release_the_stream_at_once(opened):
    device = opened(FakeCuda(3, words=True))
    attention = Attention()
    future = attention.submit(device)  # the stream has not come by
    device.pool._shared.stop(5.0)
    fetch, _ = fetched(device, future, attention.out)
    with pytest.raises(DeviceError, match="the pool was closed"):
        fetch.wait(20 * SECOND)


def test_native_jobs_and_closures_keep_their_order(opened):
    device = opened(FakeCuda(3))
    order = []
    first = Attention()
    native = first.submit(device)
    closure = device.submit(op("closure", CPU, lambda: order.append(first.right())))
    second = Attention()
    later = second.submit(device)
    for future in (native, closure, later):
        future.wait(5 * SECOND)
    assert order == [True] and second.right()
    assert violations(device.drain(SECOND)) == []


def test_a_failed_copy_fails_the_attention_behind_it(opened):
    device = opened(FakeCuda(0))
    attention = Attention()

    def explode():
        raise ArithmeticError("no copy")

    sent = device.submit(op("send", D2H, explode))
    native = lambda pool: pool.submit(attention.plan, attention.q, attention.out)  # noqa: E731
    future = device.submit(op("attention", CPU, native=native), (sent,))
    with pytest.raises(DeviceError, match="'attention' on lane cpu.attention of request owner-of-attention.*no copy"):
        future.wait(5 * SECOND)


# -- buffers -------------------------------------------------------------------------------------------------------


def ring(device, rounds, wait_for_reader):
    """A pinned ring of two buffers: written by d2h, read by h2d; returns what the readers saw."""
    buffers, seen, readers = [[None], [None]], [], []
    for i in range(rounds):
        buffer = buffers[i % 2]
        after = (readers[i - 2],) if i >= 2 and wait_for_reader else ()
        written = device.submit(op(f"write{i}", D2H, lambda b=buffer, n=i: b.__setitem__(0, n)), after)
        readers.append(device.submit(op(f"read{i}", H2D, lambda b=buffer: seen.append(b[0])), (written,)))
    device.drain(5 * SECOND)
    return seen


@pytest.mark.parametrize("seed", SEEDS)
def test_a_buffer_is_not_written_again_before_its_reader_is_done(opened, seed):
    assert ring(opened(FakeCuda(seed)), 6, wait_for_reader=True) == list(range(6))


def test_early_reuse_is_caught(opened):
    """The mutation: without waiting for the reader, or without waits at all, some order shows the damage."""
    early = [ring(opened(FakeCuda(seed)), 6, wait_for_reader=False) for seed in SEEDS]
    unwaited = [ring(opened(FakeCuda(seed, forget=("waits",))), 6, wait_for_reader=True) for seed in SEEDS]
    assert any(seen != list(range(6)) for seen in early)
    assert any(seen != list(range(6)) for seen in unwaited)


# -- futures -------------------------------------------------------------------------------------------------------


def test_a_deferred_result_is_read_once_and_only_after_the_end(opened):
    device = opened(FakeCuda(1))
    memory, reads = [0], []

    def later():
        memory[0] = 41
        return Deferred(lambda: reads.append(1) or memory[0] + 1)

    future = device.submit(op("sample", GPU, later))
    assert reads == []
    assert future.wait(SECOND) == 42 and future.wait(SECOND) == 42 and reads == [1]


def test_a_deferred_result_that_raises_is_the_ops_error(opened):
    device = opened(FakeCuda(1))

    def fail():
        raise ArithmeticError("not finite")

    future = device.submit(op("sample", GPU, lambda: Deferred(fail)))
    with pytest.raises(DeviceError, match="'sample' on lane gpu.compute .* failed: not finite"):
        future.wait(SECOND)
    future = device.submit(op("sample", GPU, lambda: Deferred(fail)))
    future.cancel()
    assert future.wait(SECOND) is None


def test_ended_ops_let_go_of_their_closures_and_ancestors(opened):
    device = opened(FakeCuda(2))
    futures = []
    for i in range(200):
        lane = (GPU, D2H)[i % 2]
        futures.append(device.submit(op(f"op{i}", lane, lambda: None), tuple(futures[-1:])))
    futures[-1].wait(SECOND)
    assert all(t.op.run is None and t.after == () for t in futures)
    spans = device.drain(SECOND)
    assert len(spans) == 200 and violations(spans) == []
    assert all(a.end_ns == b.ready_ns for a, b in zip(spans, spans[1:], strict=False))


def test_a_fault_of_the_gpu_reaches_every_future_in_bounded_time(opened):
    runtime = FakeCuda(0)
    device = opened(runtime, close_timeout_s=0.2)
    attention = Attention()
    waiting = attention.submit(device)
    other = device.submit(op("other", H2D))
    runtime.failure = RuntimeError("an illegal memory access was encountered")
    for future in (other, waiting):
        with pytest.raises(DeviceError, match="illegal memory access"):
            future.wait(5 * SECOND)
    with pytest.raises(DeviceError, match="illegal memory access"):
        device.submit(op("late", GPU)).wait(SECOND)


def test_a_stream_that_stands_still_ends_in_a_stall(opened):
    runtime = FakeCuda(0)
    device = opened(runtime, close_timeout_s=0.2)
    runtime.advance = lambda steps: None
    attention = Attention()
    started = time.perf_counter()
    with pytest.raises(StallError, match="'attention' on lane cpu.attention of request owner-of-attention"):
        attention.submit(device).wait(SECOND // 20)
    with pytest.raises(StallError):
        device.drain(SECOND // 20)
    device.close()
    assert time.perf_counter() - started < 20  # bounded; generous, because the machine may be busy


def test_priorities_reach_the_pool(opened):
    device = opened(FakeCuda(0), handover="poll")
    seen = []
    for priority in (0, SKIPPED):
        native = lambda pool, p=priority: seen.append(p) or attend_at(pool, p)  # noqa: E731
        device.submit(op("attention", CPU, native=native, priority=priority)).wait(5 * SECOND)
    assert seen == [0, SKIPPED]


def attend_at(pool, priority):
    attention = Attention()
    attention.q[...] = 0
    return pool.submit(attention.plan, attention.q, attention.out, priority=priority)


# -- clock and trace -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drift", [0.0, 50e-6, -0.02])
def test_the_clocks_are_aligned_within_the_stated_spread(drift):
    runtime = FakeCuda(0, offset_ns=987_654_321_000, drift=drift)
    clock = GpuClock(runtime, runtime.open_stream(), SECOND)
    event = runtime.event()
    time.sleep(0.15)
    before = time.perf_counter_ns()
    runtime.record(event, runtime.streams[0])
    while not runtime.query(event):
        pass
    after = time.perf_counter_ns()
    time.sleep(0.05)
    clock.realign()
    at = clock.host_ns(clock.gpu_ns(event))
    assert before - 2 * clock.spread_ns <= at <= after + 2 * clock.spread_ns
    assert 0 < clock.spread_ns


def test_an_idle_stream_that_does_not_move_stops_the_opening():
    runtime = FakeCuda(0)
    runtime.query = lambda event: False
    with pytest.raises(StallError, match="an event on an idle stream did not pass within 0.01 s"):
        GpuClock(runtime, runtime.open_stream(), SECOND // 100)


class Ended:
    def __init__(self, name, lane, start, end, ready=0):
        self.op, self.start_ns, self.end_ns, self.ready_ns = op(name, lane), start, end, ready


def test_clock_error_is_put_right_and_a_real_violation_stays():
    near = spans_of([Ended("a", GPU, 0, 10_000), Ended("b", D2H, 9_500, 12_000, ready=10_000)], spread_ns=500)
    assert violations(near) == [] and isinstance(near[0], Span)
    far = spans_of([Ended("a", GPU, 0, 10_000), Ended("b", D2H, 1_000, 12_000, ready=10_000)], spread_ns=500)
    assert len(violations(far)) == 1


def test_the_trace_names_card_and_host(opened):
    device = opened(FakeCuda())
    assert device.profile.startswith("Fake_GPU+") and device.kind == "emulated" and device.clock_spread_ns > 0


# -- memory --------------------------------------------------------------------------------------------------------


def test_the_driver_counts_how_long_it_waits(opened):
    device = opened(FakeCuda(1))
    ended = device.submit(op("first", GPU))
    ended.wait(SECOND)
    before = device.waited_ns
    assert before > 0
    ended.wait(SECOND)
    assert device.waited_ns == before  # it had ended
    futures = [device.submit(op("second", D2H)), device.submit(op("third", CPU, run=lambda: None))]
    device.wait_any(futures, SECOND)
    assert device.waited_ns > before
    before = device.waited_ns
    slow = device.submit(op("fourth", CPU, run=lambda: time.sleep(0.01)))
    slow.wait(SECOND)
    assert device.waited_ns >= before


def test_a_smaller_card_is_emulated_by_bytes(opened):
    assert opened(FakeCuda(free=GIB)).memory("gpu").total == GIB
    device = opened(FakeCuda(free=GIB), gpu_memory_bytes=1 << 20)
    assert device.memory("gpu").total == 1 << 20
    with pytest.raises(InputError, match="a pool needs 2097152 bytes of the gpu tier, but 1048576 are free on cuda"):
        device.reserve("gpu", 2 << 20, "a pool")
    with pytest.raises(InputError, match="gpu_memory_bytes 2147483648 exceeds the 1073741824 bytes that are free"):
        CudaDevice(runtime=FakeCuda(free=GIB), gpu_memory_bytes=2 * GIB)


def test_pinned_memory_is_given_back_and_pageable_memory_is_announced(opened):
    runtime, slab = FakeCuda(), np.zeros(100)
    device = opened(runtime)
    assert device.pin(slab, 4096, 100, "a slab") and runtime.pinned == {4096: 100}
    device.close()
    assert runtime.pinned == {} and device.pageable == []
    device = opened(FakeCuda(pins=False))
    with pytest.warns(RuntimeWarning, match=r"a slab \(100 bytes\) could not be pinned and stays pageable.*lockable"):
        assert not device.pin(slab, 4096, 100, "a slab")
    assert device.pageable == ["a slab"]


def test_a_pin_ends_with_the_memory_that_it_is_for(opened):
    """Else the next model finds its memory pinned already where it gets the same addresses."""
    runtime = FakeCuda()
    device = opened(runtime)
    for _ in range(2):
        pages = KVPages(2, 1, 16, 16, "fp32")
        assert device.pin(pages, 4096, 100, "a pool")
        del pages
        assert runtime.pinned == {}


def test_weights_that_lay_on_the_card_before_are_not_booked_again(opened):
    runtime = FakeCuda(free=1000)
    runtime.held = 300  # of a model that was loaded before: the 1000 bytes are free beside it
    device = opened(runtime)
    device.reserve_weights(300)
    assert device.memory("gpu").free == 1000
    runtime.held += 400  # loaded after
    device.reserve_weights(400)
    assert device.memory("gpu").free == 600
    small = opened(runtime, gpu_memory_bytes=800)
    small.reserve_weights(300)
    assert small.memory("gpu").free == 500


def test_a_card_that_has_failed_refuses_a_device_and_a_drain_with_an_error_of_ours(opened):
    runtime = FakeCuda()
    device = opened(runtime)
    device.submit(op("linear", GPU)).wait(SECOND)
    runtime.failure = RuntimeError("an illegal memory access")
    with pytest.raises(DeviceError, match="the card failed after the last op: an illegal memory access"):
        device.drain(SECOND)
    with pytest.raises(DeviceError, match="Fake GPU has failed and takes no work: an illegal memory access"):
        CudaDevice(runtime=runtime)


def test_the_context_is_made_on_the_cores_of_the_gpu_lane(opened, monkeypatch):
    """CUDA's threads inherit the mask of the thread that makes the context."""
    seen, cores = [], plan_cores()

    class Looks(FakeCuda):
        def open_stream(self):
            seen.append(tuple(sorted(os.sched_getaffinity(0))))
            return super().open_stream()

    before = os.sched_getaffinity(0)
    device = opened(Looks(), cores=cores)
    assert seen and set(seen[:3]) == {tuple(sorted(device.cores.gpu))}
    assert os.sched_getaffinity(0) == before


def test_torch_keeps_no_idle_helpers_while_a_card_computes(opened):
    before = torch.get_num_threads()
    device = opened(FakeCuda())
    assert torch.get_num_threads() == 1
    device.close()
    assert torch.get_num_threads() == before


class StubTorch:
    """The few calls into torch that can be refused, on a machine without a card."""

    def __init__(self, cards, code, free=0, reserved=0, allocated=0):
        self.cuda, self.code, self.calls = self, code, []
        self.mem_get_info = lambda device: (free, 40 * GIB)
        self.memory_reserved = lambda device: reserved
        self.memory_allocated = lambda device: allocated
        self.device_count = lambda: cards
        self.get_device_name = lambda device: "Stub"
        self.cudart = lambda: self

    def device(self, name):
        return nullcontext(name)

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802  # CUDA's name
        self.calls.append((address, num_bytes, flags))
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        self.calls.append(address)
        return self.code


def test_what_cuda_refuses_is_said(monkeypatch):
    monkeypatch.setattr(cuda_runtime, "torch", StubTorch(cards=1, code=0))
    with pytest.raises(InputError, match="CUDA device 1 does not exist: torch sees 1"):
        TorchCuda(1)
    card = TorchCuda(0)
    card.pin(4096, 10)
    card.unpin(4096)
    assert cuda_runtime.torch.calls == [(4096, 10, 0), 4096]
    assert card.kind == "measured" and card.torch_device == "cuda:0" and card.gpu_name == "Stub"
    assert card.memory() == (0, 40 * GIB)
    assert card.why_no_host_call() == "neither libcudart nor libcuda is loaded in this process"
    with pytest.raises(RuntimeError, match="no host call: neither"):
        card.host_call(None, 1, 0)
    monkeypatch.setattr(cuda_runtime, "torch", StubTorch(cards=1, code=2))
    with pytest.raises(RuntimeError, match="pinning 10 bytes failed with CUDA error 2"):
        card.pin(4096, 10)


def test_what_can_be_had_of_a_card_counts_torchs_cache_and_keeps_a_margin(monkeypatch):
    stub = StubTorch(1, 0, free=20 * GIB, reserved=6 * GIB, allocated=2 * GIB)
    monkeypatch.setattr(cuda_runtime, "torch", stub)
    card = TorchCuda(0)
    assert card.memory() == (24 * GIB - 40 * GIB * 3 // 100, 40 * GIB)
    assert card.allocated() == 2 * GIB


def test_a_refusal_is_forgotten_by_the_runtime(monkeypatch):
    """Else torch raises it at the next kernel, which has done nothing wrong."""
    forgotten = []
    library = SimpleNamespace(cudaGetLastError=lambda: forgotten.append(1), cudaLaunchHostFunc=Refuses())
    monkeypatch.setattr(cuda_runtime, "torch", StubTorch(cards=1, code=712))
    monkeypatch.setattr(cuda_runtime, "_runtime_library", lambda: library)
    card = TorchCuda(0)
    for what in (lambda: card.pin(4096, 10), lambda: card.unpin(4096), lambda: card.host_call(STREAM, 1, 0)):
        with pytest.raises(RuntimeError, match="with CUDA error 712"):
            what()
    assert len(forgotten) == 3


class Refuses:
    """A native function that says 712 to everything."""

    def __call__(self, *arguments):
        return 712


STREAM = SimpleNamespace(cuda_stream=0)


class Recorder:
    """torch's graph and stream, as far as a capture uses them."""

    log: list

    def __init__(self, log, ends=True):
        self.log, self.ends = log, ends

    def capture_begin(self, pool, capture_error_mode):
        self.log.append(("begin", pool, gc.isenabled()))

    def capture_end(self):
        self.log.append("end")
        if not self.ends:
            raise RuntimeError("capture was invalidated")

    def replay(self):
        pass


def capturing(monkeypatch, log, ends=True):
    stub = StubTorch(1, 0)
    pools = iter(range(9))
    stub.graph_pool_handle = lambda: next(pools)
    stub.CUDAGraph = lambda: Recorder(log, ends)
    stub.stream = nullcontext
    monkeypatch.setattr(cuda_runtime, "torch", stub)
    return TorchCuda(0), SimpleNamespace(synchronize=lambda: None)


def test_a_pool_of_graphs_lives_as_long_as_one_of_them(monkeypatch):
    log = []
    card, stream = capturing(monkeypatch, log)
    first = card.capture(stream, [lambda: None] * 2)
    second = card.capture(stream, [lambda: None])
    del first, second
    card.capture(stream, [lambda: None])
    assert [entry[1] for entry in log if entry != "end"] == [0, 0, 0, 1]
    assert not any(entry[2] for entry in log if entry != "end") and gc.isenabled()  # no collection inside a capture


def test_a_failed_capture_says_what_failed_and_not_that_it_was_lost(monkeypatch):
    card, stream = capturing(monkeypatch, [], ends=False)
    calls = []

    def run():
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("of the stage")

    with pytest.raises(ValueError, match="of the stage"):
        card.capture(stream, [run])
    assert gc.isenabled()


def test_a_loaded_library_is_found_in_the_memory_map(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 00:00 1   /usr/lib/with space/libcudart.so.12\n7f02-7f03 rw-p 0 00:00 0\n")
    assert loaded_library("libcudart.so", maps) == "/usr/lib/with space/libcudart.so.12"
    assert loaded_library("libcuda.so", maps) is None


class Driver:
    """A driver library whose streams are lists of what was put on them."""

    def __init__(self, code=0, missing=()):
        self.code, self.log = code, []
        for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
            if name not in missing:
                setattr(self, name, self.call(name))

        def pointer(found, host, flags):
            found._obj.value = host + (1 << 40)  # the card sees it elsewhere
            return 0

        self.cuMemHostGetDevicePointer_v2 = pointer

    def call(self, name):
        def put(stream, address, value, flags):
            self.log.append((name, stream, address, value, flags))
            return self.code

        return put


def test_words_are_waited_for_and_written_at_the_cards_address():
    driver = Driver()
    words = Words(driver)
    assert words.why_not is None
    words.wait(7, 4096, 3)
    words.write(8, 4100, 4)
    at = 1 << 40
    assert driver.log == [
        ("cuStreamWaitValue32_v2", 7, at + 4096, 3, 0), ("cuStreamWriteValue32_v2", 8, at + 4100, 4, 0),
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match="a wait for memory was refused with CUDA error 801"):
        Words(Driver(801)).wait(7, 4096, 3)
    assert "no waits for memory" in (Words(Driver(missing=("cuStreamWaitValue32_v2",))).why_not or "")
    assert Words().why_not == "libcuda is not loaded in this process"
