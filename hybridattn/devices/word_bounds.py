"""The bound on waits of streams for words of memory: a worker that hangs or dies must not stop a card.

gpu.h2d    |wait(done word) ..............................|fetch output|   the future fails, with what came after
pool          |attention ...  hangs
watch                                          time is up: done word, error
"""

from __future__ import annotations

import threading
import time
from typing import Any

from cpu_kernels import WorkerPool

_LOOK_S = 0.01


class WordBounds:
    """A thread that ends jobs for which a stream waits and whose time is up, or that have no worker left."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._open: list[tuple[int, Any]] = []
        self._changed = threading.Condition()
        self._ended = False
        self._thread: threading.Thread | None = None

    def add(self, job: Any, timeout_ns: int) -> None:
        """``job`` ends within ``timeout_ns``."""
        with self._changed:
            self._open.append((time.perf_counter_ns() + timeout_ns, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="hybridattn word bounds", daemon=True)
                self._thread.start()
            elif len(self._open) == 1:
                self._changed.notify()

    def stop(self) -> None:
        """Let go of all jobs; the pool fails them when it closes."""
        with self._changed:
            self._ended = True
            self._open.clear()
            self._changed.notify()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._open and not self._ended:
                    self._changed.wait()
                if self._ended:
                    return
                self._pool.end_if_deserted()
                now = time.perf_counter_ns()
                for until, job in self._open:
                    if now > until:
                        self._pool.give_up(job)
                self._open = [entry for entry in self._open if not entry[1].done()]
            time.sleep(_LOOK_S)
