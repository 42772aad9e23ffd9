"""The CUDA device: real streams, and the CPU pool of this machine.

    driver      submits; at most run_ahead layers before the GPU; polls numbers and events, joins nothing
    gpu.compute, gpu.d2h, gpu.h2d   one stream each; an op waits for ops of other lanes by their events
    handover    stream of host calls that push prepared jobs into the pool (see ``handover``)
    cpu.attention   native threads

    gpu.compute  |begin| attention(l) |end|begin|  linear(l)  |end|        begin, end: timing events
    gpu.d2h                                       wait(end) |begin| send(l+1) |end|

A closure runs in the driver's thread when its op is submitted and only enqueues. Errors of a closure are known at once;
an error of the GPU itself breaks the device: every future then ends with it.
"""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch

from cpu_kernels import WorkerPool
from cpu_kernels.memory import available_bytes
from hybridattn.core.device import Future, Span, check_after
from hybridattn.core.errors import DeviceError, InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D, Op
from hybridattn.devices.cores import CorePlan, kept_on, plan_cores
from hybridattn.devices.cuda_clock import GpuClock
from hybridattn.devices.cuda_future import HandoverFuture, StreamFuture
from hybridattn.devices.cuda_runtime import CudaRuntime, TorchCuda
from hybridattn.devices.cuda_spans import spans_of
from hybridattn.devices.fingerprint import fingerprint
from hybridattn.devices.handover import HANDOVERS, HandoverLane, handover_of
from hybridattn.devices.lane import inherited
from hybridattn.devices.live import LiveDevice
from hybridattn.devices.word_bounds import WordBounds

_UNSEEN = 32
_START_NS = 30_000_000_000  # longest wait for the idle card when the device opens


class CudaDevice(LiveDevice):
    """Lanes on one CUDA card and this machine's CPU.

    Parameters
    ----------
    index : int
        Which card.
    gpu_memory_bytes : int, optional
        Budget of the GPU tier, weights included (a smaller card is emulated this way). Default: what can be had now.
    handover : str
        ``bell`` (a word in memory), ``stream`` (host calls), ``poll`` (the driver), or ``auto``: the first of these
        that works here. With ``bell`` streams also wait for words: a WAIT then is the card's, not the driver's.
    graphs : bool
        Capture the linear stages as CUDA graphs.
    cores : CorePlan, optional
        ``gpu`` are left to the driver and to CUDA's own threads, ``pool`` compute attention.
    spin_us : int
        How long an idle pool worker looks for work before it sleeps. A push by the card that has to wake it would wait
        for that; a layer of a large model takes about as long.
    record : bool or int
        Keep spans for ``drain``: all, none, or about so many of the latest.
    runtime : CudaRuntime, optional
        Instead of torch's.

    Attributes
    ----------
    handover, why_handover : who hands CPU attention over, and why not the way that comes before (None: it is the first)
    pageable : what could not be page-locked, so that its copies block the driver; such a run is no measure of a card
    waited_ns : for how long the driver has waited for futures so far; the rest of its time it plans and submits
    """

    name = "cuda"
    gpu_tier = "cuda"  # which class of GPU tier a model has here

    def __init__(
        self,
        *,
        index: int = 0,
        gpu_memory_bytes: int | None = None,
        handover: str = "auto",
        graphs: bool = True,
        cores: CorePlan | None = None,
        spin_us: int = 1000,
        record: bool | int = True,
        close_timeout_s: float = 5.0,
        runtime: CudaRuntime | None = None,
    ) -> None:
        if handover not in HANDOVERS:
            raise InputError(f"handover must be one of {', '.join(HANDOVERS)}, got '{handover}'")
        self.cores = cores or _cores()
        with kept_on(self.cores.gpu):  # threads that CUDA starts with its context stay off the pool's cpus
            self.runtime: CudaRuntime = TorchCuda(index) if runtime is None else runtime
            self.torch_device, self.kind = self.runtime.torch_device, self.runtime.kind
            budget = _budget(self.runtime, gpu_memory_bytes)
            super().__init__({"gpu": budget, "cpu": available_bytes() or 0}, record, close_timeout_s)
            self._lock = threading.RLock()  # the lane's worker thread looks at futures too
            try:
                self._streams = {lane: self.runtime.open_stream() for lane in (GPU, D2H, H2D)}
                self._clock = GpuClock(self.runtime, self._streams[GPU], _START_NS)
            except DeviceError:
                raise
            except RuntimeError as error:
                raise DeviceError(f"{self.runtime.gpu_name} has failed and takes no work: {error}") from error
        self.graphs = graphs
        self.broken: BaseException | None = None
        self._events: list[Any] = []  # without a time, that have passed
        self._open: dict[str, deque[StreamFuture]] = {lane: deque() for lane in self._streams}
        self.pageable: list[str] = []
        self.waited_ns = 0
        self._pins: list[weakref.finalize] = []
        self._emulates_size = gpu_memory_bytes is not None
        self._allocated_before = self.runtime.allocated()
        self._torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the driver only enqueues; idle helpers would sit on the pool's cpus
        self.handover, self.why_handover = handover_of(self.runtime, handover)
        self.profile = f"{self.runtime.gpu_name.replace(' ', '_')}+{fingerprint()}"
        self.pool = WorkerPool(num_workers=len(self.cores.pool), cpus=list(self.cores.pool), spin_us=spin_us)
        if self.handover == "bell" and not self.pin(self.pool, *self.pool.memory(), "the pool's words"):
            self.handover, self.why_handover = handover_of(self.runtime, "auto", "the pool's words are pageable")
        self._bounds = WordBounds(self.pool)
        self._cpu = HandoverLane(self.runtime, self.pool, self.cores.pool, self.handover, self._streams[D2H])

    @property
    def clock_spread_ns(self) -> int:
        """How far GPU times may lie from the host's clock."""
        return self._clock.spread_ns

    # -- the contract ------------------------------------------------------------------------------------------------

    def submit(self, op: Op, after: tuple[Future, ...] = ()) -> Future:
        self._refuse_if_closed(op)
        future: HandoverFuture | StreamFuture
        if op.lane == CPU:
            future = HandoverFuture(self, op, after)
            self._cpu.push(future)
        else:
            for earlier in after:
                if earlier.op.lane == CPU and not self._by_word(earlier):
                    check_after(op, (earlier,))
            future = StreamFuture(self, op, after)
            self._enqueue(future, self._put)
        self._keep(future)
        self._cpu.pump()
        return future

    def submit_pass(
        self, ups: Sequence[tuple[Future, Op]], op: Op, after: tuple[Future, ...], downs: Sequence[tuple[Op, Op]]
    ) -> tuple[Future, list[Future]]:
        if self.records or not all([self._cpu.takes(attention) for _, attention in downs]):
            return self._pass_by_ops(ups, op, after, downs)
        self._refuse_if_closed(op)
        for attended, up in ups:
            if not self._by_word(attended):
                check_after(up, (attended,))
        future = StreamFuture(self, op, (*after, *[attended for attended, _ in ups]))
        self._enqueue(future, partial(self._put_pass, [up.run for _, up in ups], [down.run for down, _ in downs]))
        self._keep(future)
        begun: list[Future] = []
        for _, attention in downs:
            handed = HandoverFuture(self, attention, (future,))
            if future.failure is None:
                self._cpu.push_behind_copies(handed)
            else:
                handed.end(error=inherited(future))
            self._keep(handed)
            begun.append(handed)
        return future, begun

    def _pass_by_ops(
        self, ups: Sequence[tuple[Future, Op]], op: Op, after: tuple[Future, ...], downs: Sequence[tuple[Op, Op]]
    ) -> tuple[Future, list[Future]]:
        future = self.submit(op, (*after, *[self.submit(up, (attended,)) for attended, up in ups]))
        return future, [self.submit(attend, (self.submit(down, (future,)),)) for down, attend in downs]

    def waits_for(self, future: Future, timeout_ns: int) -> bool:
        if not self._by_word(future):
            return False
        self._bounds.add(future.job, timeout_ns)  # type: ignore[attr-defined]
        return True

    def _by_word(self, future: Future) -> bool:
        """Whether streams can wait for the end of ``future``: a native job, whose end is a word."""
        return self.handover == "bell" and isinstance(future, HandoverFuture) and future.job is not None

    def _enqueue(self, future: StreamFuture, put: Callable[[StreamFuture], None]) -> None:
        if self.broken is None:
            try:
                put(future)
            except Exception as error:  # the card has failed since, and refuses everything
                self.broken = error
        lane = self._open[future.op.lane]
        with self._lock:
            if self.broken is None:
                lane.append(future)
            else:
                future.settle(self.broken, 0, 0)
        if len(lane) > _UNSEEN:  # nobody asks for these one by one, and their closures hold tensors
            lane[_UNSEEN // 2].done()

    def _put(self, future: StreamFuture) -> None:
        """Waits, the work, and its events, on the stream of its lane: times are taken only to be recorded, and an event
        without one serves again once it has passed."""
        runtime, stream = self.runtime, self._streams[future.op.lane]
        for earlier in future.after:
            self._wait(stream, future.op.lane, earlier)
        if self.records:
            future.begun, future.finished = runtime.event(), runtime.event()
            runtime.record(future.begun, stream)
        else:
            future.finished = self._events.pop() if self._events else runtime.event(timing=False)
        runtime.enqueue(stream, future.execute)
        runtime.record(future.finished, stream)

    def _wait(self, stream: Any, lane: str, earlier: Any) -> None:
        """``stream``, which is the one of ``lane``, waits for the end of ``earlier``."""
        if earlier.op.lane == CPU:
            if not earlier.done():
                self.runtime.wait_word(stream, *self.pool.done_word(earlier.job))
        elif earlier.op.lane != lane and earlier.finished is not None:  # else it is before us, or has ended
            self.runtime.wait(stream, earlier.finished)

    def _put_pass(self, ups: list[Any], downs: list[Any], future: StreamFuture) -> None:
        """The copies of a pass have no futures of their own: streams follow each other."""
        runtime, (gpu, d2h, h2d) = self.runtime, self._streams.values()
        for earlier in future.after:
            self._wait(h2d if earlier.op.lane == CPU else gpu, GPU, earlier)
        for up in ups:
            runtime.enqueue(h2d, partial(future.attempt, up))
        if ups:
            runtime.follow(gpu, h2d)
        future.finished = self._events.pop() if self._events else runtime.event(timing=False)
        runtime.enqueue(gpu, future.execute)
        runtime.record(future.finished, gpu)
        if downs:
            runtime.wait(d2h, future.finished)
        for down in downs:
            runtime.enqueue(d2h, partial(future.attempt, down))

    def wait_any(self, futures: Sequence[Future], timeout_ns: int) -> None:
        began = time.perf_counter_ns()
        try:
            super().wait_any(futures, timeout_ns)
        finally:
            self.waited_ns += time.perf_counter_ns() - began

    def sleep_until_ns(self, when_ns: int) -> None:
        while (left := when_ns - time.perf_counter_ns()) > 0:
            self.pump()
            time.sleep(min(left / 1e9, 0.001))

    def _spans(self, futures: list[Any]) -> list[Span]:
        try:
            self._clock.realign()
            spans = spans_of(futures, self._clock.spread_ns)
            self._clock.restart()
        except DeviceError:
            raise
        except RuntimeError as error:
            self.broken = self.broken or error
            raise DeviceError(f"the card failed after the last op: {error}") from error
        return spans

    def _stop(self) -> None:
        deadline = time.perf_counter() + self._close_timeout_s
        self._cpu.stop()
        self._bounds.stop()
        at_rest = self._at_rest(deadline)
        if not at_rest:
            # A host call may still come and push into the pool's memory, which must then outlive this object.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.pool))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._futures))
        self.pool.close(timeout_s=self._close_timeout_s)
        self._cpu.join(max(0.0, deadline - time.perf_counter()))
        for release in self._pins if at_rest else ():
            release()
        self._pins.clear()
        torch.set_num_threads(self._torch_threads)

    def _at_rest(self, deadline: float) -> bool:
        """Wait, bounded, until all streams are empty."""
        ends = []
        try:
            for stream in (*self._streams.values(), self._cpu.stream):
                ends.append(self.runtime.event())
                self.runtime.record(ends[-1], stream)
            while not all(self.runtime.query(e) for e in ends):
                if time.perf_counter() > deadline:
                    return False
                time.sleep(0.0002)
        except Exception:  # the GPU has failed: nothing runs on it any more
            return False
        return True

    # -- for futures -------------------------------------------------------------------------------------------------

    def passed(self, future: StreamFuture) -> bool:
        with self._lock:
            if future.ended:
                return True
            if not self.seen(future.finished):
                return False
            self._settle_through(future)
            return True

    def _settle_through(self, future: StreamFuture) -> None:
        """The lane is in order: whatever is before ``future`` has ended too, and so has what each came after."""
        lane = self._open[future.op.lane]
        while lane:
            first = lane.popleft()
            for earlier in first.after:
                earlier.done()  # settles it, so that its times are known and its event is free
            if self.broken is not None:
                first.settle(self.broken, 0, 0)
            elif self.records:
                first.settle(None, self._clock.gpu_ns(first.begun), self._clock.gpu_ns(first.finished))
            else:
                self._events.append(first.finished)
                first.seen_ns = time.perf_counter_ns()
                first.settle(None, 0, 0)
            if first is future:
                return

    def seen(self, event: Any) -> bool:
        if self.broken is None:
            try:
                return self.runtime.query(event)
            except Exception as error:  # what a kernel failed with; it cannot be attributed to one op for certain
                self.broken = error
        return True

    def look(self) -> None:
        self.seen(self._clock.anchor)  # once the card has failed, every question is answered so

    def host_ns(self, gpu_ns: int) -> int:
        return self._clock.host_ns(gpu_ns)

    def pump(self) -> None:
        self._cpu.pump()

    # -- for stages --------------------------------------------------------------------------------------------------

    def on(self, lane: str) -> AbstractContextManager[Any]:
        """Inside, uploads and the like go to the stream of ``lane``."""
        return self.runtime.on(self._streams[lane])

    def reserve_weights(self, num_bytes: int) -> None:
        """Book the weights of a model. What lay on the card before this device opened was not free then: it is booked
        only where a smaller card is emulated."""
        since = max(0, self.runtime.allocated() - self._allocated_before)
        self.reserve("gpu", num_bytes if self._emulates_size else min(num_bytes, since), "the weights")

    def pin(self, owner: Any, address: int, num_bytes: int, what: str) -> bool:
        """Page-lock memory of ``owner`` until that goes away or the device closes; where it fails, warn and copy the
        slow way."""
        try:
            self.runtime.pin(address, num_bytes)
        except RuntimeError as error:
            warnings.warn(
                f"{what} ({num_bytes} bytes) could not be pinned and stays pageable, so that its copies block the "
                f"driver: {error}", RuntimeWarning, stacklevel=2,
            )  # fmt: skip
            self.pageable.append(what)
            return False
        release = weakref.finalize(owner, _unpin, weakref.ref(self), address)
        release.atexit = False  # the process ends, and its pins with it
        self._pins = [p for p in self._pins if p.alive] + [release]
        return True

    def stream(self, lane: str) -> Any:
        return self._streams[lane]


def _unpin(device: weakref.ref[CudaDevice], address: int) -> None:
    """The owner of page-locked memory goes away, or the device closes: no copy reads it any more."""
    opened = device()
    if opened is None:
        return
    deadline = time.perf_counter() + opened._close_timeout_s
    if opened._closed or opened._at_rest(deadline):
        with suppress(RuntimeError):  # a card that has failed
            opened.runtime.unpin(address)


def _budget(runtime: CudaRuntime, wanted: int | None) -> int:
    free, total = runtime.memory()
    if wanted is None:
        return free
    if wanted > free:
        raise InputError(f"gpu_memory_bytes {wanted} exceeds the {free} bytes that are free of {total} on the card")
    return wanted


def _cores() -> CorePlan:
    """Two cpus for the driver and CUDA's threads, where there are four or more."""
    plan = plan_cores()
    cpus = (*plan.gpu, *plan.pool) if plan.gpu != plan.pool else plan.gpu
    return plan_cores(cpus, gpu_threads=2) if len(cpus) >= 4 else plan
