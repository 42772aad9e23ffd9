"""Calls back into an object that the caller does not keep alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method for parts of its own object: with the method itself they would be a cycle, and the object, and all
    the memory behind it, would stay until the collector comes by."""
    find = WeakMethod(method)

    def call(*args: Any) -> Any:
        found = find()
        return found(*args) if found is not None else None

    return call
