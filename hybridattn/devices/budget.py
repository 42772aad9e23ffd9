"""Bytes of the tiers of a device, and how many of them are booked."""

from __future__ import annotations

from collections.abc import Mapping

from hybridattn.core.device import Memory
from hybridattn.core.errors import InputError


class Budget:
    """What tiers have (``total``, bytes of each) and what was reserved of it."""

    __slots__ = ("_reserved", "_total")

    def __init__(self, total: Mapping[str, int]) -> None:
        self._total = dict(total)
        self._reserved = dict.fromkeys(total, 0)

    def memory(self, tier: str) -> Memory:
        return Memory(self._total[tier], self._total[tier] - self._reserved[tier])

    def reserve(self, tier: str, num_bytes: int, what: str, device: str) -> None:
        """Book bytes for ``what``; InputError with both numbers and the device's name when there are too few."""
        free = self.memory(tier).free
        if num_bytes > free:
            raise InputError(f"{what} needs {num_bytes} bytes of the {tier} tier, but {free} are free on {device}")
        self._reserved[tier] += num_bytes
