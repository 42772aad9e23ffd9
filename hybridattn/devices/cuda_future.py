"""Futures of the CUDA device: of ops on a stream, and of CPU jobs that a stream hands over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from hybridattn.core.deferred import Deferred
from hybridattn.core.device import Future
from hybridattn.core.op import NativeJob, Op
from hybridattn.devices.cuda_runtime import Event
from hybridattn.devices.lane import HostFuture
from hybridattn.devices.live import await_end, raise_error_of

_HANDED = threading.Event()  # of all whose job a stream pushes
_HANDED.set()
_SPIN_NS = 1_000_000  # waits for the GPU are mostly shorter than a sleep's own error


class Owner(Protocol):
    """What futures need of their device."""

    broken: BaseException | None
    waited_ns: int
    records: bool

    def passed(self, future: StreamFuture) -> bool:
        """Whether the stream has come by the future's end; settles it and all before it on its lane if so."""
        ...

    def seen(self, event: Event) -> bool:
        """Whether an event has passed; True, and the device is broken, where asking shows that the GPU has failed."""
        ...

    def look(self) -> None:
        """See whether the GPU has failed."""
        ...

    def host_ns(self, gpu_ns: int) -> int: ...

    def pump(self) -> None:
        """Push on whatever waits for the driver."""
        ...


def ready_of(after: tuple[Any, ...]) -> tuple[int, int]:
    """When the last of ``after`` ended, each clock for itself: (GPU time of stream ops, host time of the others)."""
    gpu = max((t.gpu_end_ns for t in after if isinstance(t, StreamFuture)), default=0)
    return gpu, max((t.end_ns for t in after if not isinstance(t, StreamFuture)), default=0)


def on_the_host(ready: tuple[int, int], owner: Owner) -> int:
    """What ``ready_of`` gave, as one time of the host's clock."""
    return max(owner.host_ns(ready[0]) if ready[0] else 0, ready[1])


class StreamFuture:
    """Ended when its closing event has passed. Until then it keeps its op, and so all that the op's kernels use.

    Where nothing is recorded its times are those at which the driver saw that it had ended.
    """

    __slots__ = (
        "_owner", "_ready", "after", "begun", "cancelled", "ended", "failure", "finished", "gpu_end_ns",
        "gpu_start_ns", "op", "result", "seen_ns",
    )  # fmt: skip

    def __init__(self, owner: Owner, op: Op, after: tuple[Future, ...]) -> None:
        self._owner = owner
        self.op = op
        self.after = after
        self.begun: Event | None = None
        self.finished: Event | None = None
        self.ended = False
        self.cancelled = False
        self.failure: BaseException | None = None
        self.result: Any = None
        self.gpu_start_ns = self.gpu_end_ns = self.seen_ns = 0
        self._ready = (0, 0)

    @property
    def error(self) -> BaseException | None:
        return self.failure

    @property
    def start_ns(self) -> int:
        return self.seen_ns or self._owner.host_ns(self.gpu_start_ns)

    @property
    def end_ns(self) -> int:
        return self.seen_ns or self._owner.host_ns(self.gpu_end_ns)

    @property
    def ready_ns(self) -> int:
        """When the last future of ``after`` ended; valid once done."""
        return on_the_host(self._ready, self._owner)

    def execute(self) -> None:
        """Run the closure."""
        self.result = self.attempt(self.op.run)

    def attempt(self, run: Callable[[], Any] | None) -> Any:
        """Run a closure of the op or of a copy beside it, unless one of these, or what the op comes after, failed."""
        for earlier in self.after:
            if earlier.error is not None:
                self.failure = self.failure or earlier.error
        if self.failure is None and run is not None:
            try:
                return run()
            except Exception as error:  # it belongs to the waiters
                self.failure = error
        return None

    def done(self) -> bool:
        return self.ended or self._owner.passed(self)

    def settle(self, failure: BaseException | None, gpu_start_ns: int, gpu_end_ns: int) -> None:
        """The end: read what the host could not read before, and let go of what the op used."""
        self.gpu_start_ns, self.gpu_end_ns = gpu_start_ns, gpu_end_ns
        if self._owner.records:
            self._ready = ready_of(self.after)
        self.failure = self.failure or failure
        for earlier in self.after:  # one may have failed while the stream waited
            self.failure = self.failure or earlier.error
        self.after = ()  # or every future would keep all its ancestors alive
        self.begun = self.finished = None
        if isinstance(self.result, Deferred):
            try:
                self.result = None if self.failure is not None or self.cancelled else self.result.finish()
            except Exception as error:
                self.result, self.failure = None, error
        if self.cancelled or self.failure is not None:
            self.result = None
        self.op.run = None  # the closure holds tensors
        self.ended = True

    def wait(self, timeout_ns: int) -> Any:
        self._owner.waited_ns += await_end(self, timeout_ns)
        raise_error_of(self)
        return self.result

    def block(self, seconds: float) -> None:
        """Spin until ended, at most ``seconds`` and at most a millisecond; then give the core away once."""
        until = time.perf_counter_ns() + min(int(seconds * 1e9), _SPIN_NS)
        while not self.done():
            self._owner.pump()
            if time.perf_counter_ns() > until:
                time.sleep(0.00005)
                return

    def cancel(self) -> None:
        self.cancelled = True
        if self.ended:
            self.result = None


class HandoverFuture(HostFuture):
    """A cpu.attention op. Its job is pushed by a stream, natively, or else as on the host device.

    The host device's future knows its job only once the job is in the ring. Here the job may be prepared long before a
    stream comes by and pushes it, and it never ends if the GPU stops first.
    """

    __slots__ = ("_owner", "_ready")

    def __init__(self, owner: Owner, op: Op, after: tuple[Future, ...]) -> None:
        self._owner = owner
        super().__init__(op, after)

    def _new_event(self) -> threading.Event:
        return _HANDED

    def queue(self) -> None:
        """Not a stream but the driver will push the job, or a thread runs the closure: somebody may sleep meanwhile."""
        self._event = threading.Event()

    @property
    def ready_ns(self) -> int:
        return on_the_host(self._ready, self._owner)

    @ready_ns.setter
    def ready_ns(self, when_ns: int) -> None:
        """The host's future writes one number; what came by a stream is kept on the stream's own clock."""
        gpu, cpu = ready_of(self.after) if self._owner.records else (0, 0)
        self._ready = (gpu, cpu) if gpu else (0, when_ns)

    def hand_over(self, job: NativeJob) -> None:
        """A stream will push ``job``; ``after`` stays until then, for its times and errors."""
        self.job = job

    def done(self) -> bool:
        if super().done():
            self._settle()
            return True
        if self._owner.broken is not None:
            self.job = None
            self.end(error=self._owner.broken)  # no stream will push anything any more
            return True
        return False

    def wait(self, timeout_ns: int) -> Any:
        self._owner.waited_ns += await_end(self, timeout_ns)
        return super().wait(timeout_ns)

    def _settle(self) -> None:
        if self.after:  # handed over by a stream: nobody has looked at these before
            for earlier in self.after:
                if earlier.done():
                    self.failure = self.failure or earlier.error
            self.ready_ns = 0
            self.after = ()
        self.op.run = self.op.native = None  # closures hold tensors

    @property
    def error(self) -> BaseException | None:
        return self.failure or super().error

    def block(self, seconds: float) -> None:
        """As on the host, but look after the streams in between: they may have work for the driver."""
        self._owner.look()
        self._owner.pump()
        super().block(min(seconds, 0.001))
