"""A result that the host can only read once its op has ended.

On a device whose ops are enqueued first and run later, the closure of an op returns before its numbers exist. It may
then return a ``Deferred``; the future calls ``finish`` once, in the driver's thread, when the op has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Deferred:
    """``finish()`` gives the result; whatever it reads stays alive as long as this does."""

    __slots__ = ("finish",)

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.finish = finish
