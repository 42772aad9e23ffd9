"""Time-outs that only what hangs can meet: generous until then, waited for in a moment from then on.

clock    |--- as usual: an op of a busy machine has 30 s ---|hang begins|--- 100-fold: 30 s pass in 0.3 s ---
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hybridattn.devices import live
from hybridattn.devices.lane import HostFuture

LIMIT_S = 30.0
HASTE = 100


class HangClock:
    """Stands for the module ``time`` where the driver waits for lanes; ``begin()`` is called by what hangs."""

    def __init__(self) -> None:
        self._began_ns = 0

    def begin(self) -> None:
        self._began_ns = self._began_ns or time.perf_counter_ns()

    def perf_counter_ns(self) -> int:
        now = time.perf_counter_ns()
        return now + (HASTE - 1) * (now - self._began_ns) if self._began_ns else now


def install(monkeypatch: Any) -> HangClock:
    """The clock of all live devices until the test ends. Waiting threads look at it every 20 ms."""
    clock, block = HangClock(), HostFuture.block
    monkeypatch.setattr(live, "time", clock)
    monkeypatch.setattr(HostFuture, "block", lambda future, seconds: block(future, min(seconds, 0.02)))
    return clock


def patient_pool(llm: Any) -> None:
    """Workers that do not hang have time to stop, however short the time that closing waits for a lane."""
    close: Callable[..., None] = llm.device.pool.close
    llm.device.pool.close = lambda timeout_s: close(timeout_s=LIMIT_S)
