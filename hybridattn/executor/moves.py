"""K,V on its way between the tiers."""

from __future__ import annotations

from collections.abc import Callable

from hybridattn.core.device import Device, Future
from hybridattn.core.errors import StallError


class Moves:
    """Copies under way, each with what to call once it has arrived.

        driver    |submit copy| step | step | done(): blocks of the source go back, the request decodes on
        gpu.d2h      |---- move k,v ----|

    A copy that has not ended within the time-out is a stall: steps that go on meanwhile do not hide it.
    """

    __slots__ = ("_device", "_timeout_ns", "_under_way")

    def __init__(self, device: Device, timeout_ns: int) -> None:
        self._device = device
        self._timeout_ns = timeout_ns
        self._under_way: list[tuple[Future, int, Callable[[], None]]] = []  # with the time of submission

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def add(self, future: Future, done: Callable[[], None]) -> None:
        """``future`` is the copy; ``done`` is called by the first ``arrive`` after its end."""
        self._under_way.append((future, self._device.now_ns(), done))

    def arrive(self) -> None:
        """Report what has arrived; raises the error of a copy that failed, and StallError past the time-out."""
        for entry in tuple(self._under_way):
            future, since_ns, done = entry
            if future.done():
                future.wait(0)
                self._under_way.remove(entry)
                done()
            elif self._device.now_ns() - since_ns > self._timeout_ns:
                raise StallError(f"{future.op.describe()} did not end within {self._timeout_ns / 1e9:g} s")

    def wait_all(self) -> None:
        """Wait, bounded, for all that are under way, and report them."""
        while self._under_way:
            self.wait()

    def wait(self) -> None:
        """Wait, bounded, for the first to arrive, and report it."""
        if self._under_way:
            self._device.wait_any([future for future, _, _ in self._under_way], self._timeout_ns)
            self.arrive()
