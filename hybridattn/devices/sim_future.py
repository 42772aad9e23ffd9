"""Futures of the simulated device: times that are known from the start, and a clock that says what has passed."""

from __future__ import annotations

from typing import Any, Protocol

from hybridattn.core.device import Span
from hybridattn.core.errors import DeviceError, StallError
from hybridattn.core.op import Op


class Clock(Protocol):
    """What a future needs of its device: the virtual time, and what looking and waiting cost the driver."""

    clock_ns: int
    poll_ns: int

    def advance(self, when_ns: int) -> None: ...
    def wake(self, end_ns: int) -> None: ...


class SimFuture:
    """Resolved at submit; ``done`` compares its end with the clock."""

    __slots__ = ("_device", "end_ns", "lane_free_ns", "op", "ready_ns", "start_ns")

    lane_free_ns: int  # cpu.attention only: end of the op before it
    error: BaseException | None = None  # a priced op runs nothing: it cannot fail and has no result
    result: Any = None

    def __init__(self, device: Clock, op: Op, ready_ns: int, start_ns: int, end_ns: int) -> None:
        self._device = device
        self.op = op
        self.ready_ns = ready_ns
        self.start_ns = start_ns
        self.end_ns = end_ns

    def done(self) -> bool:
        device = self._device
        if device.poll_ns:
            device.advance(device.clock_ns + device.poll_ns)
        return self.end_ns <= device.clock_ns

    def wait(self, timeout_ns: int) -> Any:
        device = self._device
        if self.end_ns > device.clock_ns:
            if self.end_ns > device.clock_ns + timeout_ns:
                device.advance(device.clock_ns + timeout_ns)
                raise StallError(f"{self.op.describe()} did not end within {timeout_ns / 1e9:g} s")
            device.wake(self.end_ns)
        if self.error is not None:
            raise DeviceError(f"{self.op.describe()} failed: {self.error}") from self.error
        return self.result

    def cancel(self) -> None:
        pass

    def span(self) -> Span:
        op = self.op
        return Span(
            op.lane, op.name, self.start_ns, self.end_ns, op.layer, op.work.rows, op.work.num_bytes, self.ready_ns
        )


class RunFuture(SimFuture):
    """A future whose closure runs at its virtual end."""

    __slots__ = ("cancelled", "error", "result")

    def __init__(self, device: Clock, op: Op, ready_ns: int, start_ns: int, end_ns: int) -> None:
        super().__init__(device, op, ready_ns, start_ns, end_ns)
        self.error = None
        self.result = None
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.result = None
