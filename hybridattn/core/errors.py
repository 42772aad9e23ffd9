"""The project's errors. Each says in one sentence what was wrong, with the numbers."""

from __future__ import annotations


class HybridAttnError(Exception):
    """Base of every error that the project raises on purpose."""


class InputError(HybridAttnError, ValueError):
    """An argument cannot be used; the message names it and the numbers."""


class CapacityError(InputError):
    """A request can never fit; the message holds need and capacity."""


class DeviceError(HybridAttnError, RuntimeError):
    """An op failed on a lane; the message names lane, op and requests. The cause is chained."""


class StallError(DeviceError):
    """Nothing moves any more: a future past its timeout, or unfinished work with nothing in flight."""
