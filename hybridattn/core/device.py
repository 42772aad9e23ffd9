"""The device contract: where lanes live. The executor and every policy are written once against it.

    submit(op, after)     never blocks on earlier work
    future.done()         never blocks; True when the op ended, well or badly
    future.wait(bound)    bounded; raises the op's error, or StallError when the bound passes

A lane is in order and its ops do not overlap. An op starts after every future in ``after`` ended. If one of those
failed, the op fails with the same error and does not run. A GPU-lane op whose ``after`` holds an unfinished
``cpu.attention`` future is refused, but where ``waits_for`` said that the stream itself can wait for it; poll or wait
first. (Such an op may run although the future then fails; it fails with the same error all the same.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from hybridattn.core.errors import DeviceError
from hybridattn.core.op import CPU, GPU_LANES, Op


class Future(Protocol):
    """What submitting an op returns."""

    op: Op
    result: Any

    @property
    def start_ns(self) -> int:
        """Valid once done()."""
        ...

    @property
    def end_ns(self) -> int: ...

    @property
    def error(self) -> BaseException | None: ...

    def done(self) -> bool: ...

    def wait(self, timeout_ns: int) -> Any:
        """Wait at most ``timeout_ns``; returns the result, raises the op's error or ``StallError``."""
        ...

    def cancel(self) -> None:
        """Discard the result. The op may still run; what it uses is free only once the future ended."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """An op that has ended: ``[start_ns, end_ns)`` on its lane."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    layer: int = -1
    rows: int = 0
    num_bytes: int = 0
    ready_ns: int = 0  # when the last future of `after` ended (0: it waited for nothing)

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a tier."""

    total: int
    free: int


class Device(Protocol):
    """A machine with the four lanes of ``hybridattn.core.op.LANES``."""

    name: str
    kind: str  # "measured", "emulated" or "simulated": goes into every row, so that they never mix
    profile: str  # fingerprint of the profile that prices ops, or of this machine

    def submit(self, op: Op, after: tuple[Future, ...] = ()) -> Future: ...

    def driving(self) -> AbstractContextManager[None]:
        """Around a step: until its end the calling thread drives, on the cores that are kept for that."""
        ...

    def now_ns(self) -> int: ...

    def sleep_until_ns(self, when_ns: int) -> None: ...

    def wait_any(self, futures: Sequence[Future], timeout_ns: int) -> None:
        """Return when one of ``futures`` is done; ``StallError`` naming them when the bound passes."""
        ...

    def waits_for(self, future: Future, timeout_ns: int) -> bool:
        """Whether ops of the GPU's lanes may come after ``future``, a ``cpu.attention`` that has not ended: then it
        ends within ``timeout_ns``, in an error if need be, so that no stream stands still for longer."""
        ...

    def drain(self, timeout_ns: int) -> list[Span]:
        """Wait for all submitted ops, then return the spans since the last drain; raises the first op's error."""
        ...

    def memory(self, tier: str) -> Memory: ...

    def reserve(self, tier: str, num_bytes: int, what: str) -> None:
        """Book ``num_bytes`` of a tier; refuses more than there is, with both numbers."""
        ...

    def close(self) -> None:
        """Bounded; idempotent. Ops not yet started are dropped with an error."""
        ...


@runtime_checkable
class PassDevice(Device, Protocol):
    """A device that takes a linear stage together with the copies around it in one call."""

    def submit_pass(
        self,
        ups: Sequence[tuple[Future, Op]],
        op: Op,
        after: tuple[Future, ...],
        downs: Sequence[tuple[Op, Op]],
    ) -> tuple[Future, list[Future]]:
        """``op`` of gpu.compute comes after ``after`` and after copies up, each behind the ``cpu.attention`` whose
        output it brings; behind it come copies down, and behind each of those a new ``cpu.attention``.

        Returns the futures of ``op`` and of the new attentions. An error of a copy is that of ``op``.
        """
        ...


class DecodeStep(NamedTuple):
    """The ops of a step of decode rows alone: the first stage, attention and linear stage of a layer, the last stage.

    All layers cost the same: ``attention`` runs ``num_layers`` times and ``linear`` once less.
    """

    first: Op
    attention: Op
    linear: Op
    last: Op
    num_layers: int


@runtime_checkable
class PricedDevice(Device, Protocol):
    """A device whose ops only have a price, so that many of them may pass in one call (``executor.fast_path``).

    Attributes
    ----------
    resolves : nobody looks at single ops (no spans, no closures, no late threads): false, every op is submitted
    submit_ns, poll_ns : what a submission and a poll cost the driver
    gpu_free_ns : when gpu.compute will have done all it was given
    """

    resolves: bool
    submit_ns: int
    poll_ns: int

    @property
    def gpu_free_ns(self) -> int: ...

    def stretch(
        self,
        attention: Op,
        linear: Op,
        count: int,
        ahead: deque[Future],
        run_ahead: int,
        timeout_ns: int,
        until_ns: int | None,
    ) -> tuple[int, Future | None]:
        """Up to ``count`` layers at which nothing is decided; how many passed, and the last linear stage's future.

        The driver stays at most ``run_ahead`` layers ahead, in ``ahead``. With ``until_ns`` it also waits for the end
        of each attention, and stops before the layer at which that is at or past ``until_ns``.
        """
        ...

    def step_alone(self, step: DecodeStep) -> None:
        """A whole step, to whose end the driver waits."""
        ...


def check_after(op: Op, after: Iterable[Future]) -> None:
    """Refuse a GPU-lane op that would have to wait for unfinished host work (see the module's docstring)."""
    if op.lane not in GPU_LANES:
        return
    for future in after:
        if future.op.lane == CPU and not future.done():
            raise DeviceError(
                f"{op.describe()} may not wait for unfinished host work ({future.op.describe()}): poll it first"
            )
