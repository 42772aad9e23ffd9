"""K,V of whole requests on its way between the tiers."""

from __future__ import annotations

from collections.abc import Callable

from hybridattn.core.device import Device, Ticket


class Moves:
    """Copies under way, each with what to call once it has arrived."""

    __slots__ = ("_device", "_timeout_ns", "_under_way")

    def __init__(self, device: Device, timeout_ns: int) -> None:
        self._device = device
        self._timeout_ns = timeout_ns
        self._under_way: list[tuple[Ticket, Callable[[], None]]] = []

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def add(self, ticket: Ticket, done: Callable[[], None]) -> None:
        """``ticket`` is the copy; ``done`` is called by the first ``arrive`` after its end."""
        self._under_way.append((ticket, done))

    def arrive(self) -> None:
        """Report what has arrived; raises the error of a copy that failed."""
        for entry in tuple(self._under_way):
            ticket, done = entry
            if ticket.done():
                ticket.wait(0)
                self._under_way.remove(entry)
                done()

    def wait(self) -> None:
        """Wait, bounded, for the first to arrive, and report it."""
        if self._under_way:
            self._device.wait_any([ticket for ticket, _ in self._under_way], self._timeout_ns)
            self.arrive()
