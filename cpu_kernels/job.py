"""Jobs of a worker pool: polled, waited for, cancelled."""

from __future__ import annotations

import time
from numbers import Real
from typing import Any, Protocol

from cpu_kernels.codegen.fields import JOB_WORDS, Fault
from cpu_kernels.codegen.fields import Job as Word
from cpu_kernels.pool_state import SLICE_S

FOREVER_S = 1e9  # 32 years
POLLS_PER_LOOK = 512  # a poll costs less than a look at the workers' threads
_DONE = int(Word.DONE)  # a plain integer: enum members cost time on each submit


class WorkerError(RuntimeError):
    """A job did not give a result."""


class JobCancelled(WorkerError):
    """The job was cancelled; its output is to be discarded."""


class PoolClosed(WorkerError):
    """The pool was closed before the job ran, or before it was submitted."""


class JobOwner(Protocol):
    """What a job asks of its pool."""

    def _settle(self, job: Job) -> None: ...

    def _sleep_on(self, job: Job, timeout_s: float) -> None: ...

    def _cancel(self, job: Job) -> None: ...

    def _end_if_deserted(self) -> None: ...


class Job:
    """A submitted attention. Made by `WorkerPool.submit`.

    `done` never blocks and costs about 100 ns; `wait` is bounded. After the end, `start_ns` and `end_ns` hold the
    workers' CLOCK_MONOTONIC times (the clock of `time.perf_counter_ns`), `error` the reason of a failure.
    """

    __slots__ = ("_pool", "_words", "_index", "_done_at", "_sequence", "_alive", "_plan", "_space", "_settled",
                 "_error", "_start_ns", "_end_ns", "_polls", "_lost", "__weakref__")  # fmt: skip

    def __init__(
        self, pool: JobOwner, words: memoryview, index: int, sequence: int, plan: Any, space: Any, alive: Any
    ) -> None:
        self._pool, self._words, self._index = pool, words, index
        self._done_at, self._sequence = index * JOB_WORDS + _DONE, sequence
        self._plan, self._space, self._alive = plan, space, alive
        self._settled = self._lost = False
        self._polls = 0
        self._error: WorkerError | None = None
        self._start_ns: int | None = None
        self._end_ns: int | None = None

    def done(self) -> bool:
        """Whether the job has ended: computed, failed or cancelled."""
        if self._settled:
            return True
        if self._words[self._done_at] < self._sequence:
            self._polls += 1
            if not self._polls % POLLS_PER_LOOK:
                self._pool._end_if_deserted()
            return self._settled
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
        if not isinstance(timeout_s, Real) or timeout_s != timeout_s:
            raise TypeError(f"timeout_s is {timeout_s!r}, expected a number of seconds")
        limit = time.monotonic() + min(timeout_s, FOREVER_S)
        while not self.done():
            left = limit - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"job {self._sequence} did not end within {timeout_s} s")
            self._pool._sleep_on(self, min(left, SLICE_S))
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


def error_of(code: int, cancelled: bool, sequence: int) -> WorkerError | None:
    if cancelled:
        return JobCancelled(f"job {sequence} was cancelled")
    if code == Fault.CLOSED:
        return PoolClosed(f"the pool was closed before job {sequence} ended")
    if code == Fault.LATE:
        return WorkerError(f"job {sequence} did not end in time")
    if code:
        return WorkerError(f"job {sequence} failed: injected fault {Fault(code).name.lower()!r}")
    return None
