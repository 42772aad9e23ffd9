"""What devices share whose lanes really run: bounded waits for futures, the record since the last drain, the budget."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hybridattn.core.device import Future, Memory, Span
from hybridattn.core.errors import DeviceError, StallError
from hybridattn.core.op import Op
from hybridattn.devices.budget import Budget
from hybridattn.devices.cores import CorePlan, kept_on

_KEPT = 4096  # futures, where nothing is recorded, before ended ones are let go of


class LiveFuture(Future, Protocol):
    """A future that somebody can sleep on."""

    def block(self, seconds: float) -> None:
        """Give the core away until ended or pushed on, at most ``seconds``; errors are for the caller to see."""
        ...


def await_end(future: LiveFuture, timeout_ns: int, deadline_ns: int | None = None) -> None:
    """Return once ``future`` ended, well or badly; StallError after ``timeout_ns`` (up to the deadline, if given)."""
    until = time.perf_counter_ns() + timeout_ns if deadline_ns is None else deadline_ns
    while not future.done():
        left = until - time.perf_counter_ns()
        if left <= 0:
            raise StallError(f"{future.op.describe()} did not end within {timeout_ns / 1e9:g} s")
        future.block(left / 1e9)


def raise_error_of(future: Future) -> None:
    """Raise the error of a future that ended badly, under the name of its op."""
    if future.error is not None:
        raise DeviceError(f"{future.op.describe()} failed: {future.error}") from future.error


class LiveDevice(ABC):
    """The half of the device contract that does not depend on what the lanes are.

    Parameters
    ----------
    memory : dict of str to int
        Bytes of each tier.
    record : bool
        Keep spans for ``drain``.
    """

    name: str
    cores: CorePlan

    def __init__(self, memory: dict[str, int], record: bool) -> None:
        self._budget = Budget(memory)
        self._record = record
        self._closed = False
        self._futures: list[Any] = []  # since the last drain

    def _refuse_if_closed(self, op: Op) -> None:
        if self._closed:
            raise DeviceError(f"{op.describe()} was submitted to a closed device")

    def _keep(self, future: LiveFuture) -> None:
        """For the next drain; without recording, in the end only what is unfinished or failed."""
        self._futures.append(future)
        if not self._record and len(self._futures) > _KEPT:
            self._futures = [t for t in self._futures if not t.done() or t.error is not None]

    def driving(self) -> AbstractContextManager[None]:
        return kept_on(self.cores.gpu)

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def wait_any(self, futures: Sequence[Future], timeout_ns: int) -> None:
        deadline = time.perf_counter_ns() + timeout_ns
        while not any(t.done() for t in futures):
            if time.perf_counter_ns() > deadline:
                named = ", ".join(t.op.describe() for t in futures)
                raise StallError(f"none of {named} ended within {timeout_ns / 1e9:g} s")
            futures[0].block(0.0005)  # type: ignore[attr-defined]  # the lane is in order: the first is the likely one

    def drain(self, timeout_ns: int) -> list[Span]:
        deadline = time.perf_counter_ns() + timeout_ns
        futures, self._futures = self._futures, []
        for future in futures:
            await_end(future, timeout_ns, deadline)
        for future in futures:
            raise_error_of(future)
        return self._spans(futures) if self._record else []

    @abstractmethod
    def _spans(self, futures: list[Any]) -> list[Span]:
        """Spans, by start, of futures that ended well."""

    def memory(self, tier: str) -> Memory:
        return self._budget.memory(tier)

    def reserve(self, tier: str, num_bytes: int, what: str) -> None:
        self._budget.reserve(tier, num_bytes, what, self.name)
