"""The cpu.attention lane of the CUDA device: from "copied to the host" to "being computed" without Python.

    gpu.d2h     |send(l)|
    handover            |push| <- a word that is written behind the send, or a host call of a stream that waits for it
    pool                     |attention(l)| ... sequence number
    driver      ... layer l+1 ............. done()? reads the number, ~100 ns

The job's descriptor is filled when the op is submitted. Three ways, the first that works here:

    bell    the stream of the copies writes a word that the pool's workers look at (one counter, so one stream)
    stream  a host call of a stream of its own, the pool's own native push with that descriptor
    poll    the driver pushes while it polls, as on the host device; so do ops without a native form. Order is kept.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import Any

from cpu_kernels import WorkerPool
from hybridattn.core.errors import InputError
from hybridattn.core.op import D2H, SKIPPED, WAITED, NativeJob, Op
from hybridattn.devices.cpu_lane import CpuLane
from hybridattn.devices.cuda_future import HandoverFuture, StreamFuture
from hybridattn.devices.cuda_runtime import CudaRuntime, Stream

HANDOVERS = ("auto", "bell", "stream", "poll")
PROBE_S = 2.0


class _Preparing:
    """Looks like the pool to an op's ``native``, but only fills the descriptor: a stream will push it."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def submit(self, *args: Any, **options: Any) -> NativeJob:
        return self._pool.prepare(*args, **options)


class HandoverLane(CpuLane):
    """A ``CpuLane`` whose native jobs are pushed by a stream where that is possible."""

    def __init__(self, runtime: CudaRuntime, pool: WorkerPool, cpus: tuple[int, ...], way: str, copies: Stream) -> None:
        super().__init__(pool, cpus)
        self.way = way
        self.stream = copies if way == "bell" else runtime.open_stream()
        self._runtime, self._copies = runtime, copies
        self._jobs = pool
        self._preparing = _Preparing(pool)

    def push(self, future: Any) -> None:
        if self.takes(future.op) and all(isinstance(t, StreamFuture) and t.error is None for t in future.after):
            self._by_stream(future)
        else:
            future.queue()
            super().push(future)

    def takes(self, op: Op) -> bool:
        """Whether a stream can push the job of ``op``: it is native, and nothing is queued that it would overtake."""
        if self.way == "poll" or op.native is None or self._closing:
            return False
        return not (
            self._pending[WAITED] or self._pending[SKIPPED] or (self._closure is not None and not self._closure.done())
        )

    def push_behind_copies(self, future: HandoverFuture) -> None:
        """The job of ``future``, which the lane ``takes``, is pushed once all copies down so far have ended."""
        if self.stream is not self._copies:
            self._runtime.follow(self.stream, self._copies)
        self._by_stream(future, follows=True)

    def _by_stream(self, future: HandoverFuture, follows: bool = False) -> None:
        """Push the job from the stream, behind what it comes after; ``follows``: the stream is behind that already."""
        assert future.op.native is not None
        with self._lock:
            try:
                job = future.op.native(self._preparing)
            except Exception as error:  # refused by the pool: the waiters must hear of it
                future.end(error=error)
                return
            future.hand_over(job)
            try:
                for earlier in () if follows else future.after:
                    assert isinstance(earlier, StreamFuture)
                    if earlier.finished is not None and (earlier.op.lane != D2H or self.stream is not self._copies):
                        self._runtime.wait(self.stream, earlier.finished)
                self._ring(job)
            except Exception as error:  # the card has failed since
                future.job = None
                future.end(error=error)
            self._native = future

    def _ring(self, job: Any) -> None:
        if self.way == "bell":
            self._runtime.write_word(self.stream, *self._jobs.arm(job))
        else:
            self._runtime.host_call(self.stream, self._jobs.push_address, self._jobs.descriptor(job))


def handover_of(runtime: CudaRuntime, wanted: str, no_bell: str | None = None) -> tuple[str, str | None]:
    """The way of ``wanted`` that works here, and why not the one before it; InputError where that was asked for."""
    reason = no_bell
    for way, why_not in (("bell", why_no_words), ("stream", why_no_host_call)):
        if wanted in ("auto", way) and not (way == "bell" and no_bell):
            if (found := why_not(runtime)) is None:
                return way, reason
            if wanted == way:
                raise InputError(f"handover '{way}' cannot be used: {found}")
            reason = found
    return "poll", "asked for" if wanted == "poll" else reason


def why_no_host_call(runtime: CudaRuntime) -> str | None:
    """Try one host call that does nothing (``free(NULL)``); why it cannot be used, None if it can."""
    reason = runtime.why_no_host_call()
    if reason is not None:
        return reason
    stream, event = runtime.open_stream(), runtime.event()
    try:
        free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value
        runtime.host_call(stream, free or 0, 0)
        runtime.record(event, stream)
        deadline = time.perf_counter() + PROBE_S
        while not runtime.query(event):
            if time.perf_counter() > deadline:
                return f"a host call that does nothing did not return within {PROBE_S:g} s"
    except RuntimeError as error:
        return str(error)
    return None


def why_no_words(runtime: CudaRuntime) -> str | None:
    """Try one wait for a word and one write of a word; why they cannot be used, None if they can."""
    reason = runtime.why_no_words()
    if reason is not None:
        return reason
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    words = (ctypes.c_uint32 * 2).from_buffer(page)
    address = ctypes.addressof(words)
    stream, event = runtime.open_stream(), runtime.event()
    try:
        runtime.pin(address, mmap.PAGESIZE)
        runtime.wait_word(stream, address, 1)
        runtime.write_word(stream, address + 4, 2)
        runtime.record(event, stream)
        time.sleep(0.002)
        if runtime.query(event) or words[1]:
            return "a stream does not wait for a word"
        words[0] = 1
        deadline = time.perf_counter() + PROBE_S
        while not runtime.query(event):
            if time.perf_counter() > deadline:
                _kept.append(words)
                runtime.write_word(runtime.open_stream(), address, 1)
                return f"a stream that waits for a word did not see it within {PROBE_S:g} s"
        runtime.unpin(address)
    except RuntimeError as error:
        return str(error)
    return None if words[1] == 2 else "a stream's write of a word was not seen"


_kept: list[Any] = []  # memory that a stream may still look at
