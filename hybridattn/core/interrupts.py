"""Ctrl-C amid work that must not stop in its middle.

    main thread   |a step ......... its end|KeyboardInterrupt
    Ctrl-C             |held back ---------'

It is held back to the end of the work, and not for longer than ``GRACE_S`` where the work waits for something; a second
Ctrl-C comes through at once. What the interrupted program has set for SIGINT is called in either case.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

GRACE_S = 5.0


class _Held:
    """Of the process: SIGINT has one handler, in the main thread. Used as ``with interrupts_held:``, nested or not."""

    __slots__ = ("_before", "_depth", "_since")

    def __init__(self) -> None:
        self._depth = 0
        self._before: Any = None
        self._since: float | None = None  # when the one that is held back came

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # signals are never handled here
        self._depth += 1
        if self._depth == 1:
            self._since = None
            self._before = signal.getsignal(signal.SIGINT)
            if callable(self._before):  # else it is ignored, or ends the process without us
                signal.signal(signal.SIGINT, self._take)

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0 and callable(self._before):
            signal.signal(signal.SIGINT, self._before)
            if self._since is not None:
                self._pass_on()

    def _take(self, number: int, frame: Any) -> None:
        if self._since is not None:
            self._pass_on(frame)
        else:
            self._since = time.monotonic()

    def _pass_on(self, frame: Any = None) -> None:
        self._since = None
        self._before(signal.SIGINT, frame)

    def raise_overdue(self) -> None:
        """Called while waiting: a Ctrl-C that was held back for ``GRACE_S`` comes through now."""
        if self._since is None or threading.current_thread() is not threading.main_thread():
            return
        if time.monotonic() - self._since > GRACE_S:
            self._pass_on()


interrupts_held = _Held()


class _Noted:
    """Of the process, in its main thread: ``with interrupts_noted:``. True from the first Ctrl-C of the block on.

    KeyboardInterrupt is raised as before; but a library may put an error of its own in its place (OmegaConf's roll-back
    in a ``finally``), which then must not be taken for a fault of the work.
    """

    __slots__ = ("_before", "_came", "_depth")

    def __init__(self) -> None:
        self._before: Any = None
        self._came = False
        self._depth = 0

    def __bool__(self) -> bool:
        return self._came

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth += 1
        if self._depth == 1 and callable(signal.getsignal(signal.SIGINT)):
            self._before = signal.signal(signal.SIGINT, self._take)

    def __exit__(self, *exc: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            self._came = False
            if self._before is not None:
                signal.signal(signal.SIGINT, self._before)
                self._before = None

    def _take(self, number: int, frame: Any) -> None:
        self._came = True
        self._before(number, frame)


interrupts_noted = _Noted()
