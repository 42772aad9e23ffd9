"""What devices share whose lanes really run: bounded waits for futures, the record since the last drain, the budget."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from hybridattn.core.device import Future, Memory, Span
from hybridattn.core.errors import DeviceError, StallError
from hybridattn.core.interrupts import interrupts_held
from hybridattn.core.op import Op
from hybridattn.devices.budget import Budget
from hybridattn.devices.cores import CorePlan, kept_on

_SLICE_S = 0.05  # how often a waiting driver looks whether it was interrupted
_KEPT = 4096  # futures, where nothing is recorded, before ended ones are let go of


class LiveFuture(Future, Protocol):
    """A future that somebody can sleep on."""

    def block(self, seconds: float) -> None:
        """Give the core away until ended or pushed on, at most ``seconds``; errors are for the caller to see."""
        ...


def await_end(future: LiveFuture, timeout_ns: int, deadline_ns: int | None = None) -> int:
    """Return once ``future`` ended, well or badly; StallError after ``timeout_ns`` (up to the deadline, if given).

    Returns
    -------
    How long that took [ns]; 0 where it had ended before.
    """
    if future.done():
        return 0
    began = time.perf_counter_ns()
    until = began + timeout_ns if deadline_ns is None else deadline_ns
    while not future.done():
        left = until - time.perf_counter_ns()
        if left <= 0:
            raise StallError(f"{future.op.describe()} did not end within {timeout_ns / 1e9:g} s")
        interrupts_held.raise_overdue()
        future.block(min(left / 1e9, _SLICE_S))
    return time.perf_counter_ns() - began


def raise_error_of(future: Future) -> None:
    """Raise the error of a future that ended badly, under the name of its op."""
    if future.error is not None:
        raise DeviceError(f"{future.op.describe()} failed: {future.error}") from future.error


_ALL = sys.maxsize // 2
_open_devices: set[LiveDevice] = set()  # until they are closed: their threads go with them


def close_abandoned() -> None:
    """Close the devices whose owners are gone: their threads would go on for ever."""
    with interrupts_held:
        for device in [d for d in _open_devices if d.owner is not None and d.owner() is None]:
            with suppress(DeviceError):  # one whose lane hangs is not the fault of who opens the next
                device.close()


@atexit.register
def _close_forgotten() -> None:
    with interrupts_held:
        for device in list(_open_devices):
            with suppress(Exception):  # nobody is there any more to hear of it
                device.close()


class LiveDevice(ABC):
    """The half of the device contract that does not depend on what the lanes are.

    Parameters
    ----------
    memory : dict of str to int
        Bytes of each tier.
    record : bool or int
        Keep spans for ``drain``: all, none, or about so many of the latest.

    Attributes
    ----------
    owner : reference to whatever uses it alone, where there is one
    records : whether spans are kept
    dropped : spans before those of the last ``drain`` that were not kept
    """

    name: str
    cores: CorePlan

    def __init__(self, memory: dict[str, int], record: bool | int, close_timeout_s: float) -> None:
        self._close_timeout_s = close_timeout_s
        self._budget = Budget(memory)
        self.records = bool(record)
        self._most = _ALL if record is True else int(record)
        self._process = os.getpid()
        self._closed = self._ended = False
        self.owner: weakref.ref[Any] | None = None
        self._futures: list[Any] = []  # since the last drain, as far as they are kept
        self._passed_over = self.dropped = 0
        _open_devices.add(self)

    def _refuse_if_closed(self, op: Op) -> None:
        if self._closed:
            raise DeviceError(f"{op.describe()} was submitted to a closed device")

    def _keep(self, future: LiveFuture) -> None:
        """For the next drain: what is unfinished or failed, and of the others the latest that are recorded."""
        self._futures.append(future)
        if len(self._futures) > self._most + _KEPT:
            older, latest = self._futures[: -self._most or None], self._futures[-self._most :] if self._most else []
            left = [t for t in older if not t.done() or t.error is not None]
            if self.records:
                self._passed_over += len(older) - len(left)
            self._futures = left + latest

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
            interrupts_held.raise_overdue()
            futures[0].block(0.0005)  # type: ignore[attr-defined]  # the lane is in order: the first is the likely one

    def waits_for(self, future: Future, timeout_ns: int) -> bool:
        return False

    def drain(self, timeout_ns: int) -> list[Span]:
        """Also sets ``dropped``."""
        deadline = time.perf_counter_ns() + timeout_ns
        futures, self._futures = self._futures, []
        self.dropped, self._passed_over = self._passed_over, 0
        for future in futures:
            await_end(future, timeout_ns, deadline)
        for future in futures:
            raise_error_of(future)
        return self._spans(futures) if self.records else []

    def close(self, timeout_s: float | None = None) -> None:
        """Bounded, by ``timeout_s`` if that is less than what the device was opened with; idempotent.

        Called again at the end of the process where it was cut short or forgotten: a thread that computes while the
        interpreter goes away would end the process with a signal.
        """
        if self._ended or os.getpid() != self._process:  # after a fork the lanes, and their locks, are the parent's
            return
        self._closed = True
        if timeout_s is not None:
            self._close_timeout_s = min(self._close_timeout_s, timeout_s)
        with interrupts_held:
            try:
                self._stop()
            except Exception:
                self._end()
                raise
            self._end()

    def _end(self) -> None:
        self._ended = True
        _open_devices.discard(self)

    @abstractmethod
    def _stop(self) -> None:
        """End the lanes, bounded. What was done already when it is called again costs nothing."""

    @abstractmethod
    def _spans(self, futures: list[Any]) -> list[Span]:
        """Spans, by start, of futures that ended well."""

    def memory(self, tier: str) -> Memory:
        return self._budget.memory(tier)

    def reserve(self, tier: str, num_bytes: int, what: str) -> None:
        self._budget.reserve(tier, num_bytes, what, self.name)
