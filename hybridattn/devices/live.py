"""What devices share whose lanes really run: bounded waits for tickets, the record since the last drain, the budget."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hybridattn.core.device import Memory, Span, Ticket
from hybridattn.core.errors import DeviceError, StallError
from hybridattn.core.op import Op
from hybridattn.devices.budget import Budget
from hybridattn.devices.cores import CorePlan, kept_on

_KEPT = 4096  # tickets, where nothing is recorded, before ended ones are let go of


class LiveTicket(Ticket, Protocol):
    """A ticket that somebody can sleep on."""

    def block(self, seconds: float) -> None:
        """Give the core away until ended or pushed on, at most ``seconds``; errors are for the caller to see."""
        ...


def await_end(ticket: LiveTicket, timeout_ns: int, deadline_ns: int | None = None) -> None:
    """Return once ``ticket`` ended, well or badly; StallError after ``timeout_ns`` (up to the deadline, if given)."""
    until = time.perf_counter_ns() + timeout_ns if deadline_ns is None else deadline_ns
    while not ticket.done():
        left = until - time.perf_counter_ns()
        if left <= 0:
            raise StallError(f"{ticket.op.describe()} did not end within {timeout_ns / 1e9:g} s")
        ticket.block(left / 1e9)


def raise_error_of(ticket: Ticket) -> None:
    """Raise the error of a ticket that ended badly, under the name of its op."""
    if ticket.error is not None:
        raise DeviceError(f"{ticket.op.describe()} failed: {ticket.error}") from ticket.error


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
        self._tickets: list[Any] = []  # since the last drain

    def _refuse_if_closed(self, op: Op) -> None:
        if self._closed:
            raise DeviceError(f"{op.describe()} was submitted to a closed device")

    def _keep(self, ticket: LiveTicket) -> None:
        """For the next drain; without recording, in the end only what is unfinished or failed."""
        self._tickets.append(ticket)
        if not self._record and len(self._tickets) > _KEPT:
            self._tickets = [t for t in self._tickets if not t.done() or t.error is not None]

    def driving(self) -> AbstractContextManager[None]:
        return kept_on(self.cores.gpu)

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def wait_any(self, tickets: Sequence[Ticket], timeout_ns: int) -> None:
        deadline = time.perf_counter_ns() + timeout_ns
        while not any(t.done() for t in tickets):
            if time.perf_counter_ns() > deadline:
                named = ", ".join(t.op.describe() for t in tickets)
                raise StallError(f"none of {named} ended within {timeout_ns / 1e9:g} s")
            tickets[0].block(0.0005)  # type: ignore[attr-defined]  # the lane is in order: the first is the likely one

    def drain(self, timeout_ns: int) -> list[Span]:
        deadline = time.perf_counter_ns() + timeout_ns
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            await_end(ticket, timeout_ns, deadline)
        for ticket in tickets:
            raise_error_of(ticket)
        return self._spans(tickets) if self._record else []

    @abstractmethod
    def _spans(self, tickets: list[Any]) -> list[Span]:
        """Spans, by start, of tickets that ended well."""

    def memory(self, tier: str) -> Memory:
        return self._budget.memory(tier)

    def reserve(self, tier: str, num_bytes: int, what: str) -> None:
        self._budget.reserve(tier, num_bytes, what, self.name)
