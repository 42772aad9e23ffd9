"""`WorkerPool`: native worker threads that take attention jobs without touching the interpreter.

::

    driver   submit A   submit B          poll A: done       poll B: not yet      ...goes on; never joins a thread
    worker 0    A.chunk0 A.chunk2 B.chunk1 ...
    worker 1     A.chunk1 A.chunk3 B.chunk0 ...               (no barrier between jobs)

A job is done when its last chunk is; `Job.done` reads one number. Jobs run in submit order within a priority class,
class 0 before class 1.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from cpu_kernels import topology
from cpu_kernels.arrays import whole
from cpu_kernels.codegen.fields import JOB_WORDS, MAX_NODES, Ctl, Fault
from cpu_kernels.codegen.fields import Job as Word
from cpu_kernels.codegen.worker import EVERYBODY, FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE
from cpu_kernels.job import Job, PoolClosed, error_of
from cpu_kernels.memory import may_pin
from cpu_kernels.pool_state import JOB_BYTES, MAX_JOBS, PoolState, close_forgotten, natives, worker_thread

NO_WORKER = "the pool has no living worker; one that came through a fork has none: make a pool in the new process"
_FAULTS = {None: Fault.NONE, "raise": Fault.RAISE, "hang": Fault.HANG}
# Words REMAINING to RELEASE_SEEN in one write; plain integers, because enum members cost time on each submit.
_HEAD = struct.Struct(f"{Word.RELEASE_SEEN - Word.REMAINING + 1}q")
_HEAD_AT, _RELEASE, _DONE = 8 * int(Word.REMAINING), int(Ctl.RELEASE), int(Word.DONE)


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
        here = topology.read()
        self.cpus = _choose_cpus(here, num_workers, cpus, reserve)
        self._nodes = [here.node_index(cpu) % MAX_NODES for cpu in self.cpus]
        self._shared = PoolState(spin_us, min(MAX_NODES, len(here.numa)))
        self._lock = threading.RLock()
        self._free = list(range(MAX_JOBS - 1, -1, -1))
        self._flying: tuple[deque[Job], deque[Job]] = (deque(), deque())
        self._sequence = self._armed = 0
        self._closed = False
        self._push, self.push_address, self._arm = natives()[1:]
        self._start_workers()
        _pools.add(self)
        self._finalizer = weakref.finalize(self, close_forgotten, self._shared)

    def _start_workers(self) -> None:
        pinned = may_pin()
        if not pinned:
            _warn_unpinned()
        try:
            for number, (cpu, node) in enumerate(zip(self.cpus, self._nodes, strict=True)):
                thread = threading.Thread(
                    target=worker_thread,
                    args=(self._shared, cpu if pinned else None, node),
                    name=f"cpu_kernels-{number}",
                    daemon=True,
                )
                thread.start()
                self._shared.threads.append(thread)
        except RuntimeError:  # the system gives no more threads
            self._shared.stop(5.0)
            raise

    @property
    def num_workers(self) -> int:
        return len(self.cpus)

    # ------------------------------------------------------------------ submitting
    def submit(
        self,
        plan: Any,
        q: Any,
        out: Any = None,
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
            As of `DecodePlan.run`, or for all arrays what `DecodePlan.hand` gave; the job keeps them alive until it
            has ended.
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
        out: Any = None,
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
        try:
            native = plan.native
        except AttributeError:
            raise TypeError(f"plan must be a DecodePlan, got {type(plan).__name__}") from None
        index, sequence = self._take_descriptor()
        space = native.take()
        try:
            alive = native.fill(self._shared.bytes, index * JOB_BYTES, q, out, lse, layer, k_new, v_new, space)
        except BaseException:
            native.give(space)
            with self._lock:
                self._free.append(index)
            raise
        self._reset_descriptor(
            index * JOB_BYTES, native.chunk_ends[-1], native.claims, sequence, priority, _FAULTS[fault]
        )
        job = Job(self, self._shared.words, index, sequence, native, space, alive)
        with self._lock:
            self._flying[priority].append(job)
        return job

    def _reset_descriptor(
        self, at: int, chunks: int, claims: bytes, sequence: int, priority: int, fault: Fault
    ) -> None:
        shared = self._shared
        seen = shared.control[_RELEASE]
        # DONE never goes back: another thread may just be asking for the job that was here before.
        done = shared.words[at // 8 + _DONE]
        _HEAD.pack_into(
            shared.bytes, at + _HEAD_AT,
            chunks, 0, 0, 0, 0, 0, 0, 0,  # REMAINING and the rest of its cache line
            done, 0, 0, 0, 0, 0, sequence, fault, priority, shared.ctl_at, seen,  # DONE ... SEQUENCE to RELEASE_SEEN
        )  # fmt: skip
        shared.bytes[at : at + len(claims)] = claims  # nothing left to claim until the push

    def start(self, job: Job) -> None:
        """Hand over a prepared job."""
        with self._lock:  # not after close has failed what was left
            if self._closed:
                raise PoolClosed("the pool is closed")
            if not self._shared.living():
                raise PoolClosed(NO_WORKER)
            self._push(self.descriptor(job))

    def descriptor(self, job: Job) -> int:
        """Address to give to the native push (a ``void (*)(void *)`` at `push_address`), e.g. as a stream callback."""
        return self._shared.slab_at + job._index * JOB_BYTES

    # ------------------------------------------------------------------ beside a device that reads and writes memory
    def memory(self) -> tuple[int, int]:
        """Address (of a page) and bytes of what a device must reach for `arm` and `done_word`."""
        return self._shared.ctl_at, self._shared.all.nbytes

    def arm(self, job: Job) -> tuple[int, int]:
        """A worker pushes the prepared ``job`` once a device writes the number that is returned, 32 bits, to the
        address that is returned. Jobs are armed, and numbers written, in one order; idle workers spin until then."""
        with self._lock:
            self._armed += 1
            self._arm(self.descriptor(job))
            return self._shared.ctl_at + 8 * Ctl.BELL, self._armed & 0xFFFFFFFF

    def done_word(self, job: Job) -> tuple[int, int]:
        """Address of a 32-bit word, and the number that it reaches (counting on around 2**32) when ``job`` ends."""
        return self._shared.slab_at + 8 * job._done_at, job._sequence & 0xFFFFFFFF

    def give_up(self, job: Job) -> None:
        """``job`` ends now, with an error, for whoever polls it or waits for its `done_word`. A worker that hangs in it
        may still come: its descriptor is not used again."""
        with self._lock:
            if not job.done():
                self._shared.kept.append((job._alive, job._space))
                job._lost, job._space = True, job._plan.workspace()
                self._fail(job, Fault.LATE)

    def end_if_deserted(self) -> None:
        """Fail all jobs if no worker is left that could end them."""
        self._end_if_deserted()

    def _take_descriptor(self) -> tuple[int, int]:
        with self._lock:
            if self._closed:
                raise PoolClosed("the pool is closed")
            if not self._shared.living():
                raise PoolClosed(NO_WORKER)
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
            job._error = error_of(words[at + Word.ERROR], bool(words[at + Word.CANCELLED]), job._sequence)
            job._plan.give(job._space)
            job._plan = job._space = job._alive = None
            if not job._lost:
                self._free.append(job._index)
            job._settled = True

    def _end_if_deserted(self) -> None:
        """Fail what can never end because no worker is left, so that whoever polls or waits goes on."""
        if self._shared.living():
            return
        with self._lock:
            for lane in self._flying:
                for job in [job for job in lane if not job._settled]:
                    if self._shared.words[job._done_at] < job._sequence:
                        self._fail(job)

    def _sleep_on(self, job: Job, timeout_s: float) -> None:
        self._end_if_deserted()
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
        if stopped:
            self._finalizer.detach()
        with self._lock:
            left = [job for lane in self._flying for job in lane if not job.done()]
            if not stopped:
                # A worker still writes to these: they live as long as its thread does, and no other run gets them.
                self._shared.kept.extend((job._alive, job._space) for job in left)
            for job in left:
                if not stopped:
                    job._space = job._plan.workspace()
                self._fail(job)
            for lane in self._flying:
                lane.clear()
        if not stopped:
            raise TimeoutError(f"a worker did not stop within {timeout_s} s; {len(left)} jobs were failed")

    def _fail(self, job: Job, reason: Fault = Fault.CLOSED) -> None:
        at = job._index * JOB_WORDS
        words = self._shared.words
        words[at + Word.ERROR] = int(reason)
        words[at + Word.END_NS] = time.monotonic_ns()
        words[job._done_at] = job._sequence
        self._shared.futex(self._shared.slab_at + job._done_at * 8, FUTEX_WAKE_PRIVATE, EVERYBODY)
        job.done()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_warned: list[bool] = []
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _warn_unpinned() -> None:
    """Once a process: it is no fault, only slower where threads wander between memories."""
    if not _warned:
        _warned.append(True)
        warnings.warn(
            "this system does not let threads choose their CPUs (sched_setaffinity is refused): workers run unpinned",
            RuntimeWarning,
            stacklevel=4,
        )


def _after_fork() -> None:
    """A lock may have been held by a thread that the new process does not have."""
    for pool in list(_pools):
        pool._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _choose_cpus(here: topology.Topology, num_workers: int | None, cpus: Any, reserve: int) -> tuple[int, ...]:
    if cpus is None:
        return topology.worker_cpus(here, num_workers, reserve)
    if not isinstance(cpus, Iterable):
        raise TypeError(f"cpus is {cpus!r}, expected a sequence of CPU numbers")
    chosen = tuple(whole("cpus", c) for c in cpus)
    outside = [c for c in chosen if c not in here.allowed]
    if outside or not chosen:
        raise ValueError(f"cpus {list(chosen)} must be CPUs of the affinity mask {list(here.allowed)}")
    count = len(chosen) if num_workers is None else topology.check_workers(num_workers)
    return tuple(chosen[i % len(chosen)] for i in range(count))
