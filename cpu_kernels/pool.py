"""`WorkerPool`: native worker threads that take attention jobs without touching the interpreter.

::

    driver   submit A   submit B          poll A: done       poll B: not yet      ...goes on; never joins a thread
    worker 0    A.chunk0 A.chunk2 B.chunk1 ...
    worker 1     A.chunk1 A.chunk3 B.chunk0 ...               (no barrier between jobs)

A job is done when its last chunk is; `Job.done` reads one number. Jobs run in submit order within a priority class,
class 0 before class 1.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import threading
import time
import weakref
from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np

from cpu_kernels import isa, jit, topology
from cpu_kernels.codegen.fields import CTL_WORDS, JOB_WORDS, RING_SLOTS, Ctl, Fault
from cpu_kernels.codegen.fields import Job as Word
from cpu_kernels.codegen.worker import EVERYBODY, FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE, build_worker
from cpu_kernels.memory import pin_this_thread

JOB_BYTES = 8 * JOB_WORDS
MAX_JOBS = RING_SLOTS - 64  # the ring keeps room for jobs that ended but that no worker has passed yet
_FUTEX_NUMBER = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98}
_FAULTS = {None: Fault.NONE, "raise": Fault.RAISE, "hang": Fault.HANG}
_SLICE_S = 0.05
# Words REMAINING to RELEASE_SEEN in one write; plain integers, because enum members cost time on each submit.
_HEAD = struct.Struct(f"{Word.RELEASE_SEEN - Word.REMAINING + 1}q")
_HEAD_AT, _RELEASE, _DONE = 8 * int(Word.REMAINING), int(Ctl.RELEASE), int(Word.DONE)


class WorkerError(RuntimeError):
    """A job did not give a result."""


class JobCancelled(WorkerError):
    """The job was cancelled; its output is to be discarded."""


class PoolClosed(WorkerError):
    """The pool was closed before the job ran, or before it was submitted."""


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


@lru_cache(maxsize=1)
def _natives() -> tuple[Any, Any, int]:
    """Return (worker, push, address of push)."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    loaded = jit.load(build_worker(x86), ("worker", "push"), jit.Target(isa.target_cpu("portable")))
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    push = loaded.addresses["push"]
    # A push takes well under a microsecond: keeping the GIL (PYFUNCTYPE) is cheaper than giving it away and back.
    return call(loaded.addresses["worker"]), ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(push), push


def _aligned_words(count: int) -> np.ndarray:
    raw = np.zeros(count + 8, np.int64)
    start = (-raw.ctypes.data % 64) // 8
    return raw[start : start + count]


class _Shared:
    """Memory and threads of a pool; the threads hold this, never the pool, so that an unused pool can go away."""

    def __init__(self, spin_us: float) -> None:
        machine = platform.machine()
        if platform.system() != "Linux" or machine not in _FUTEX_NUMBER:
            raise OSError(f"WorkerPool needs Linux on x86-64 or AArch64, this is {platform.system()} on {machine}")
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.futex_number = _FUTEX_NUMBER[machine]
        self.ctl, self.slab = _aligned_words(CTL_WORDS), _aligned_words(MAX_JOBS * JOB_WORDS)
        self.ctl[Ctl.SPIN_NS] = int(spin_us * 1000)
        self.ctl[Ctl.CLOCK] = ctypes.cast(self.libc.clock_gettime, ctypes.c_void_p).value
        self.ctl[Ctl.SYSCALL] = ctypes.cast(self.libc.syscall, ctypes.c_void_p).value
        self.ctl[Ctl.FUTEX] = self.futex_number
        # Plain memory views read and write single words faster than NumPy indexing does.
        self.bytes = memoryview(self.slab.data).cast("B")
        self.words = self.bytes.cast("q")
        self.slab_at, self.ctl_at = self.slab.ctypes.data, self.ctl.ctypes.data
        self.control = memoryview(self.ctl.data).cast("B").cast("q")
        self.threads: list[threading.Thread] = []
        self.kept: list[Any] = []

    def futex(self, address: int, operation: int, value: int, timeout_s: float | None = None) -> None:
        limit = None
        if timeout_s is not None:
            limit = ctypes.byref(_TimeSpec(int(timeout_s), int(timeout_s % 1 * 1e9)))
        self.libc.syscall(
            ctypes.c_long(self.futex_number), ctypes.c_void_p(address), ctypes.c_long(operation),
            ctypes.c_long(value & 0xFFFFFFFF), limit, None, ctypes.c_long(0),
        )  # fmt: skip

    def ring_bell(self, word: Ctl) -> None:
        """Change a control word and wake its sleepers; the change comes first, so no wake-up is lost."""
        self.control[word] += 1
        self.futex(self.ctl_at + 8 * word, FUTEX_WAKE_PRIVATE, EVERYBODY)

    def stop(self, timeout_s: float) -> bool:
        """Tell all workers to end and wait for them; False if one is still running."""
        self.control[Ctl.STOP] = 1
        limit = time.monotonic() + timeout_s
        for thread in self.threads:
            while thread.is_alive() and time.monotonic() < limit:
                # Python adds to these words without an atomic operation, so a push at the same instant may hide a ring.
                self.ring_bell(Ctl.SIGNAL)
                self.ring_bell(Ctl.RELEASE)
                thread.join(min(_SLICE_S, max(0.0, limit - time.monotonic())))
        return not any(thread.is_alive() for thread in self.threads)


def _worker_thread(shared: _Shared, cpu: int | None) -> None:
    if cpu is not None:
        pin_this_thread(cpu)
    _natives()[0](shared.ctl_at)


def _close_forgotten(shared: _Shared) -> None:
    shared.stop(5.0)


class Job:
    """A submitted attention. Made by `WorkerPool.submit`.

    `done` never blocks and costs about 100 ns; `wait` is bounded. After the end, `start_ns` and `end_ns` hold the
    workers' CLOCK_MONOTONIC times (the clock of `time.perf_counter_ns`), `error` the reason of a failure.
    """

    __slots__ = ("_pool", "_words", "_index", "_done_at", "_sequence", "_alive", "_plan", "_space", "_settled",
                 "_error", "_start_ns", "_end_ns", "__weakref__")  # fmt: skip

    def __init__(self, pool: WorkerPool, index: int, sequence: int, plan: Any, space: Any, alive: Any) -> None:
        self._pool, self._words, self._index = pool, pool._shared.words, index
        self._done_at, self._sequence = index * JOB_WORDS + _DONE, sequence
        self._plan, self._space, self._alive = plan, space, alive
        self._settled = False
        self._error: WorkerError | None = None
        self._start_ns: int | None = None
        self._end_ns: int | None = None

    def done(self) -> bool:
        """Whether the job has ended: computed, failed or cancelled."""
        if self._settled:
            return True
        if self._words[self._done_at] < self._sequence:
            return False
        self._pool._settle(self)
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait until the job has ended.

        Raises
        ------
        TimeoutError
            After `timeout_s` seconds; the job goes on.
        WorkerError
            The job's own error (`JobCancelled`, `PoolClosed`).
        """
        limit = time.monotonic() + timeout_s
        while not self.done():
            left = limit - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"job {self._sequence} did not end within {timeout_s} s")
            self._pool._sleep_on(self, min(left, _SLICE_S))
        if self._error is not None:
            raise self._error

    def cancel(self) -> bool:
        """Ask that the result be discarded; chunks not yet begun are skipped. False if the job had ended already."""
        if self.done():
            return False
        self._pool._cancel(self)
        return True

    @property
    def error(self) -> WorkerError | None:
        """Why there is no result; None while running and after success."""
        self.done()
        return self._error

    @property
    def start_ns(self) -> int | None:
        """When a worker began the job; None before the end, or if none did."""
        self.done()
        return self._start_ns

    @property
    def end_ns(self) -> int | None:
        """When the last worker ended the job; None before the end."""
        self.done()
        return self._end_ns


class WorkerPool:
    """Native attention workers.

    Parameters
    ----------
    num_workers : int, optional
        Default: one per CPU of `cpus`, else per usable physical core (mask and quota respected) less `reserve`.
    cpus : sequence of int, optional
        CPUs to pin to, in order (reused when there are more workers).
    spin_us : float
        How long an idle worker spins before it sleeps.
    reserve : int
        Cores left to the driver when `cpus` is not given.

    Raises
    ------
    ValueError
        For a CPU outside the affinity mask, or a count below 1.
    OSError
        On systems without futexes.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        cpus: Any = None,
        spin_us: float = 50.0,
        *,
        reserve: int = 0,
    ) -> None:
        self.cpus = _choose_cpus(num_workers, cpus, reserve)
        self._shared = _Shared(spin_us)
        self._lock = threading.RLock()
        self._free = list(range(MAX_JOBS - 1, -1, -1))
        self._flying: tuple[deque[Job], deque[Job]] = (deque(), deque())
        self._sequence = 0
        self._closed = False
        self._push, self.push_address = _natives()[1:]
        for number, cpu in enumerate(self.cpus):
            thread = threading.Thread(
                target=_worker_thread, args=(self._shared, cpu), name=f"cpu_kernels-{number}", daemon=True
            )
            self._shared.threads.append(thread)
            thread.start()
        self._finalizer = weakref.finalize(self, _close_forgotten, self._shared)

    @property
    def num_workers(self) -> int:
        return len(self.cpus)

    # ------------------------------------------------------------------ submitting
    def submit(
        self,
        plan: Any,
        q: Any,
        out: Any,
        lse: Any = None,
        *,
        layer: int = 0,
        k_new: Any = None,
        v_new: Any = None,
        priority: int = 0,
        fault: str | None = None,
    ) -> Job:
        """Hand a decode step to the workers; never blocks, may be called from any thread.

        Parameters
        ----------
        plan, q, out, lse, layer, k_new, v_new
            As of `DecodePlan.run`; the job keeps all of them alive until it has ended.
        priority : int
            0 (waited for) runs before 1.
        fault : str, optional
            Test hook: ``"raise"`` makes the job fail, ``"hang"`` makes it hold a worker until `release_faults` or
            `close`, and then fail.

        Raises
        ------
        PoolClosed
            After `close`.
        RuntimeError
            If `MAX_JOBS` jobs are in flight.
        """
        job = self.prepare(plan, q, out, lse, layer=layer, k_new=k_new, v_new=v_new, priority=priority, fault=fault)
        self.start(job)
        return job

    def prepare(
        self,
        plan: Any,
        q: Any,
        out: Any,
        lse: Any = None,
        *,
        layer: int = 0,
        k_new: Any = None,
        v_new: Any = None,
        priority: int = 0,
        fault: str | None = None,
    ) -> Job:
        """Make a job that is not yet handed over: call `start`, or natively ``push_address(descriptor(job))``, once."""
        if priority not in (0, 1):
            raise ValueError(f"priority is {priority}, expected 0 or 1")
        if fault not in _FAULTS:
            raise ValueError(f"fault is {fault!r}, expected None, 'raise' or 'hang'")
        native = plan.native
        index, sequence = self._take_descriptor()
        space = native.take()
        try:
            alive = native.fill(self._shared.bytes, index * JOB_BYTES, q, out, lse, layer, k_new, v_new, space)
        except BaseException:
            native.give(space)
            with self._lock:
                self._free.append(index)
            raise
        self._reset_descriptor(index * JOB_BYTES, native.num_chunks, sequence, priority, _FAULTS[fault])
        job = Job(self, index, sequence, native, space, alive)
        with self._lock:
            self._flying[priority].append(job)
        return job

    def _reset_descriptor(self, at: int, chunks: int, sequence: int, priority: int, fault: Fault) -> None:
        shared = self._shared
        seen = shared.control[_RELEASE]
        _HEAD.pack_into(
            shared.bytes, at + _HEAD_AT,
            chunks, 0, 0, 0, 0, 0, 0, 0,  # REMAINING and the rest of its cache line
            0, 0, 0, 0, 0, 0, sequence, fault, priority, shared.ctl_at, seen,  # DONE ... SEQUENCE to RELEASE_SEEN
        )  # fmt: skip
        shared.words[at // 8] = (chunks << 32) | chunks  # CLAIM: nothing left to claim until the push

    def start(self, job: Job) -> None:
        """Hand over a prepared job."""
        with self._lock:  # not after close has failed what was left
            if self._closed:
                raise PoolClosed("the pool is closed")
            self._push(self.descriptor(job))

    def descriptor(self, job: Job) -> int:
        """Address to give to the native push (a ``void (*)(void *)`` at `push_address`), e.g. as a stream callback."""
        return self._shared.slab_at + job._index * JOB_BYTES

    def _take_descriptor(self) -> tuple[int, int]:
        with self._lock:
            if self._closed:
                raise PoolClosed("the pool is closed")
            self._sweep()
            if not self._free:
                raise RuntimeError(f"{MAX_JOBS} jobs are in flight already; wait for one before submitting more")
            self._sequence += 1
            return self._free.pop(), self._sequence

    def _sweep(self) -> None:
        """Let go of the buffers of jobs that ended (oldest first; stops at one that is still running)."""
        for lane in self._flying:
            while lane and lane[0].done():
                lane.popleft()

    # ------------------------------------------------------------------ ending
    def _settle(self, job: Job) -> None:
        """Take a job's times and error out of its descriptor, then free both."""
        with self._lock:
            if job._settled:
                return
            at = job._index * JOB_WORDS
            words = self._shared.words
            job._start_ns = words[at + Word.START_NS] or None
            job._end_ns = words[at + Word.END_NS] or None
            job._error = _error_of(words[at + Word.ERROR], bool(words[at + Word.CANCELLED]), job._sequence)
            job._plan.give(job._space)
            job._plan = job._space = job._alive = None
            self._free.append(job._index)
            job._settled = True

    def _sleep_on(self, job: Job, timeout_s: float) -> None:
        words = self._shared.words
        words[job._index * JOB_WORDS + Word.WAITERS] = 1
        seen = words[job._done_at]
        if seen < job._sequence and not job._settled:
            address = self._shared.slab_at + job._done_at * 8
            self._shared.futex(address, FUTEX_WAIT_PRIVATE, seen, timeout_s)

    def _cancel(self, job: Job) -> None:
        with self._lock:
            if not job._settled:
                self._shared.words[job._index * JOB_WORDS + Word.CANCELLED] = 1

    def release_faults(self) -> None:
        """Let jobs submitted with ``fault="hang"`` go on (they end with an error)."""
        with self._lock:
            self._shared.ring_bell(Ctl.RELEASE)

    def backlog(self) -> int:
        """Jobs that have not ended."""
        with self._lock:
            return sum(not job.done() for lane in self._flying for job in lane)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the workers after their current chunk and fail all jobs that did not end. May be called again.

        Raises
        ------
        TimeoutError
            If a worker is still computing after `timeout_s` seconds; its jobs have failed all the same.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        stopped = self._shared.stop(timeout_s)
        self._finalizer.detach()
        with self._lock:
            left = [job for lane in self._flying for job in lane if not job.done()]
            if not stopped:
                # A worker still writes to these buffers: they live as long as its thread does.
                self._shared.kept.extend((job._alive, job._space) for job in left)
            for job in left:
                self._fail(job)
            for lane in self._flying:
                lane.clear()
        if not stopped:
            raise TimeoutError(f"a worker did not stop within {timeout_s} s; {len(left)} jobs were failed")

    def _fail(self, job: Job) -> None:
        at = job._index * JOB_WORDS
        words = self._shared.words
        words[at + Word.ERROR] = int(Fault.CLOSED)
        words[at + Word.END_NS] = time.monotonic_ns()
        words[job._done_at] = job._sequence
        self._shared.futex(self._shared.slab_at + job._done_at * 8, FUTEX_WAKE_PRIVATE, EVERYBODY)
        job.done()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _error_of(code: int, cancelled: bool, sequence: int) -> WorkerError | None:
    if cancelled:
        return JobCancelled(f"job {sequence} was cancelled")
    if code == Fault.CLOSED:
        return PoolClosed(f"the pool was closed before job {sequence} ended")
    if code:
        return WorkerError(f"job {sequence} failed: injected fault {Fault(code).name.lower()!r}")
    return None


def _choose_cpus(num_workers: int | None, cpus: Any, reserve: int) -> tuple[int, ...]:
    here = topology.read()
    if cpus is None:
        return topology.worker_cpus(here, num_workers, reserve)
    chosen = tuple(int(c) for c in cpus)
    outside = [c for c in chosen if c not in here.allowed]
    if outside or not chosen:
        raise ValueError(f"cpus {list(chosen)} must be CPUs of the affinity mask {list(here.allowed)}")
    count = len(chosen) if num_workers is None else num_workers
    if count < 1:
        raise ValueError(f"num_workers is {count}, expected at least 1")
    return tuple(chosen[i % len(chosen)] for i in range(count))
