"""Whether the driver is inside an engine, and what that holds back."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hybridattn.core.interrupts import interrupts_held


class AtWork:
    """``with`` it, the driver is inside an engine, nested or not.

    On a device that really runs, Ctrl-C waits for the end, so that it never leaves half of a step behind; other threads
    wait as well. Requests that nobody waits for any more are ended at the beginning.
    """

    __slots__ = ("_begin", "_depth", "_held", "turn")

    def __init__(self, held: bool, begin: Callable[[], None]) -> None:
        self._held = held  # what is simulated is not worth the time that this takes
        self._begin = begin
        self._depth = 0
        self.turn = threading.RLock()

    def __bool__(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        if self._held:
            interrupts_held.__enter__()
        try:
            self.turn.acquire()
        except KeyboardInterrupt:  # the second one, while another thread's step hangs
            if self._held:
                interrupts_held.__exit__()
            raise
        self._depth += 1
        if self._depth == 1:
            self._begin()

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        self.turn.release()
        if self._held:
            interrupts_held.__exit__()
