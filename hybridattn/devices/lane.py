"""A lane of the host device: one worker thread that runs ops in order."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from hybridattn.core.device import Future
from hybridattn.core.errors import DeviceError
from hybridattn.core.op import NativeJob, Op
from hybridattn.devices.live import await_end, raise_error_of

_SLICE_S = 0.05  # how often a waiting lane looks whether its device was closed


class Inherited(DeviceError):
    """The error of an op behind a failed one; the message names the op that failed."""


def inherited(failed: Future) -> DeviceError:
    """What the ops behind ``failed`` end with: always the first cause, however long the chain."""
    error = failed.error
    if isinstance(error, Inherited):
        return error
    made = Inherited(f"{failed.op.describe()} failed: {error}")
    made.__cause__ = error
    return made


class HostFuture:
    """Ended when its event is set or, once it became a native job, when that job has ended."""

    __slots__ = (
        "_end_ns", "_event", "_start_ns", "after", "cancelled", "failure", "job", "op", "ready_ns", "result",
    )  # fmt: skip

    def __init__(self, op: Op, after: tuple[Future, ...]) -> None:
        self.op = op
        self.after = after
        self.job: NativeJob | None = None
        self.failure: BaseException | None = None
        self.result: Any = None
        self.cancelled = False
        self.ready_ns = 0
        self._start_ns = 0
        self._end_ns = 0
        self._event = self._new_event()

    def _new_event(self) -> threading.Event:
        return threading.Event()

    def done(self) -> bool:
        job = self.job
        return self._event.is_set() if job is None else job.done()

    @property
    def error(self) -> BaseException | None:
        return self.failure if self.job is None else self.job.error

    @property
    def start_ns(self) -> int:
        return self._start_ns if self.job is None else self.job.start_ns or 0

    @property
    def end_ns(self) -> int:
        return self._end_ns if self.job is None else self.job.end_ns or 0

    def wait(self, timeout_ns: int) -> Any:
        await_end(self, timeout_ns)
        raise_error_of(self)
        return self.result

    def block(self, seconds: float) -> None:
        """Sleep until ended, at most ``seconds``; errors and time-outs are for the caller to see."""
        if self.job is None:
            self._event.wait(min(seconds, _SLICE_S))  # also set when the op becomes a job
            return
        try:
            self.job.wait(seconds)
        except Exception:  # the job's own error or its TimeoutError; both are read from the job by the caller
            return

    def cancel(self) -> None:
        self.cancelled = True
        self.result = None

    def become(self, job: NativeJob) -> None:
        """From now on the native job says whether this future ended."""
        self.ready_ns = max((t.end_ns for t in self.after), default=0)
        self.after = ()
        self.job = job
        self._event.set()

    def begin(self) -> None:
        self.ready_ns = max((t.end_ns for t in self.after), default=0)
        self._start_ns = time.perf_counter_ns()

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        now = time.perf_counter_ns()
        self._start_ns = self._start_ns or now
        self._end_ns = now
        self.failure = error
        self.result = None if self.cancelled else result
        self.after = ()  # or every future would keep all its ancestors alive
        self._event.set()


class LaneWorker:
    """Runs the closures of one lane in submission order on a thread of its own.

    ``prepare`` is run first in the new thread (affinity is set before it); ``on_end`` after each op. When either of
    the two preparations fails, the thread stays and every op ends with that error: nobody waits for a dead worker.
    """

    def __init__(
        self, name: str, cpus: tuple[int, ...], prepare: Callable[[], None], on_end: Callable[[HostFuture], None]
    ) -> None:
        self._cpus = cpus
        self._prepare = prepare
        self._on_end = on_end
        self._queue: queue.SimpleQueue[HostFuture | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def push(self, future: HostFuture) -> None:
        self._queue.put(future)

    def _loop(self) -> None:
        unfit = self._unfit()
        while (future := self._queue.get()) is not None:
            if unfit is None:
                self._serve(future)
            else:
                future.end(error=unfit)
            self._on_end(future)
            del future  # the queue may stay empty for long; what the op holds must not

    def _unfit(self) -> DeviceError | None:
        """Prepares the thread; the reason why it cannot work, if any."""
        try:
            if self._cpus:
                os.sched_setaffinity(0, self._cpus)  # 0: this thread
            self._prepare()
        except Exception as error:
            return DeviceError(f"thread '{threading.current_thread().name}' could not start: {error}")
        return None

    def _serve(self, future: HostFuture) -> None:
        for earlier in future.after:
            while not earlier.done() and not self._closing.is_set():
                earlier.block(_SLICE_S)  # type: ignore[attr-defined]
            if self._closing.is_set() and not earlier.done():
                future.end(error=DeviceError(f"{future.op.describe()} was dropped: the device is closing"))
                return
            if earlier.error is not None:
                future.end(error=inherited(earlier))
                return
        if self._closing.is_set():
            future.end(error=DeviceError(f"{future.op.describe()} was dropped: the device is closing"))
            return
        future.begin()
        try:
            result = future.op.run() if future.op.run is not None else None
        except BaseException as error:  # whatever it is, it belongs to the waiters, not to this thread
            future.end(error=error)
        else:
            future.end(result)

    def stop(self) -> None:
        """Ask the thread to end; ops not yet started end with an error."""
        self._closing.set()
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """True when the thread has ended within ``timeout_s``.

        Nothing holds the thread's object then: it goes here, where Ctrl-C is held back, and not amid the caller's code.
        Python runs a callback in its own language when it goes, and forgets a Ctrl-C that comes there.
        """
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
            self._thread = None
        return True
