"""Lanes, the work an op does, and the op itself.

These objects are made in the layer loop, so they are slotted and unchecked; what crosses a room's boundary on its way
to a user is checked where it enters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

GPU = "gpu.compute"
D2H = "gpu.d2h"
H2D = "gpu.h2d"
CPU = "cpu.attention"
LANES = (GPU, CPU, D2H, H2D)
GPU_LANES = frozenset((GPU, D2H, H2D))

WAITED, SKIPPED = 0, 1  # priority classes of the cpu.attention lane, served in this order


class Work:
    """What an op costs, independent of the machine.

    Attributes
    ----------
    kind : str
        ``linear``, ``decode_attention``, ``prefill_attention``, ``copy``, ``head`` or ``other``: selects the price.
    flops : float
        Floating-point operations.
    num_bytes : int
        Bytes read and written on the lane's memory (for a copy: bytes moved).
    rows : int
        Token rows taking part.
    kv_tokens : int
        Keys attended to, summed over rows (0 for anything but attention).
    """

    __slots__ = ("flops", "kind", "kv_tokens", "num_bytes", "rows")

    def __init__(self, kind: str, flops: float, num_bytes: int, rows: int, kv_tokens: int = 0) -> None:
        self.kind = kind
        self.flops = flops
        self.num_bytes = num_bytes
        self.rows = rows
        self.kv_tokens = kv_tokens

    def __repr__(self) -> str:
        return f"Work({self.kind}, {self.flops:.3g} flop, {self.num_bytes} B, {self.rows} rows, {self.kv_tokens} keys)"


class NativeJob(Protocol):
    """A job inside the CPU pool (``cpu_kernels.pool.Job``): polled, never joined."""

    @property
    def error(self) -> BaseException | None: ...
    @property
    def start_ns(self) -> int | None: ...
    @property
    def end_ns(self) -> int | None: ...
    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> Any: ...
    def cancel(self) -> Any: ...


class Op:
    """One unit of work on a lane.

    ``run`` does the work in the lane's thread and its return value becomes the future's result. ``native`` is the
    alternative for ``cpu.attention``: given the pool, it pushes a job into the ring without waiting and returns it.
    A priced op (simulator) has neither.
    """

    __slots__ = ("lane", "layer", "name", "native", "priority", "requests", "run", "work")

    def __init__(
        self,
        name: str,
        lane: str,
        work: Work,
        run: Callable[[], Any] | None = None,
        layer: int = -1,
        requests: tuple[str, ...] = (),
        priority: int = WAITED,
        native: Callable[[Any], NativeJob] | None = None,
    ) -> None:
        self.name = name
        self.lane = lane
        self.work = work
        self.run = run
        self.native = native
        self.layer = layer
        self.requests = requests
        self.priority = priority

    def describe(self) -> str:
        """Name, lane, layer and requests, for error messages."""
        who = f" of request{'s' if len(self.requests) > 1 else ''} {', '.join(self.requests)}" if self.requests else ""
        where = f" at layer {self.layer}" if self.layer >= 0 else ""
        return f"op '{self.name}' on lane {self.lane}{where}{who}"
