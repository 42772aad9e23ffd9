"""The cpu.attention lane of the host device: feeds the native pool without a thread hop in between.

    d2h thread:  |send(l)|-- ends --> pump(): ring push ---.
    pool:                                                   |attention(l)| ... sequence number
    driver:      ... layer l+1 ... done()? reads the number, ~100 ns ...

Whoever makes an op ready (the submitting driver, or the copy lane whose op ended) pushes it into the ring, so no Python
thread has to wake up between the copy and the attention. Ops without a native form (the torch back end, tests) run as
closures on one worker thread; the two kinds keep their order.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from hybridattn.core.errors import DeviceError
from hybridattn.core.op import CPU, SKIPPED, WAITED
from hybridattn.core.weakly import weakly
from hybridattn.devices.lane import HostFuture, LaneWorker, inherited


class CpuLane:
    """Two priority classes, in order within each; a class's head waits for its ``after``."""

    def __init__(self, pool: object, cpus: tuple[int, ...]) -> None:
        self._pool = pool
        self._pending: dict[int, deque[HostFuture]] = {WAITED: deque(), SKIPPED: deque()}
        self._lock = threading.Lock()
        self._closure: HostFuture | None = None  # a closure handed to the worker and not ended
        self._native: HostFuture | None = None  # the latest native job
        self._closing = False
        pump = weakly(self.pump)
        self._worker = LaneWorker(f"hybridattn {CPU}", cpus, lambda: None, lambda future: pump())

    def push(self, future: HostFuture) -> None:
        with self._lock:
            self._pending[future.op.priority].append(future)
        self.pump()

    def pump(self) -> None:
        """Dispatch every head that is ready. Cheap when there is none; called by whoever ends an op."""
        if not (self._pending[WAITED] or self._pending[SKIPPED]):
            return
        with self._lock:
            for pending in self._pending.values():  # waited first
                while pending and self._dispatch(pending[0]):
                    pending.popleft()

    def _dispatch(self, future: HostFuture) -> bool:
        """True when the future left the queue: failed, pushed into the ring or handed to the worker."""
        if self._closing:
            future.end(error=DeviceError(f"{future.op.describe()} was dropped: the device is closing"))
            return True
        if not all(t.done() for t in future.after):
            return False
        failed = next((t for t in future.after if t.error is not None), None)
        if failed is not None:
            future.end(error=inherited(failed))
            return True
        if self._closure is not None and not self._closure.done():
            return False  # keeps the two kinds in order; the worker pumps when it is through
        if future.op.native is not None:
            return self._launch(future)
        if self._native is not None and not self._native.done():
            future.after = (*future.after, self._native)  # the worker waits for it
        self._closure = future
        self._worker.push(future)
        return True

    def _launch(self, future: HostFuture) -> bool:
        assert future.op.native is not None
        try:
            future.become(future.op.native(self._pool))
        except Exception as error:  # refused by the pool: the waiters must hear of it
            future.end(error=error)
        else:
            self._native = future
        return True

    def stop(self) -> None:
        self._closing = True
        self.pump()
        self._worker.stop()

    def join(self, timeout_s: float) -> bool:
        """True when the worker ended and no native job is left, within ``timeout_s``."""
        deadline = time.perf_counter() + timeout_s
        ended = self._worker.join(timeout_s)
        while self._native is not None and not self._native.done() and time.perf_counter() < deadline:
            self._native.block(0.05)
        return ended and (self._native is None or self._native.done())
