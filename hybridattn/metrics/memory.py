"""Bytes per tier, from plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hybridattn.core.errors import InputError
from hybridattn.core.shapes import ModelShape


def kv_bytes(shape: ModelShape, dtype: str, num_blocks: int, page_size: int) -> int:
    """K and V of ``num_blocks`` pages over all layers: ``num_blocks * page_size * kv_bytes_per_token``."""
    for name, value in (("num_blocks", num_blocks), ("page_size", page_size)):
        if value < 0:
            raise InputError(f"{name} must not be negative, got {value}")
    return num_blocks * page_size * shape.kv_bytes_per_token(dtype)


@dataclass(frozen=True, slots=True)
class TierMemory:
    """Memory of one tier: its total and what is booked by purpose (weights, kv, slabs, staging, ...), in bytes."""

    tier: str
    total: int
    parts: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        for name, value in self.parts:
            if value < 0:
                raise InputError(f"tier {self.tier}: {name} has {value} bytes")
        if self.used > self.total:
            raise InputError(f"tier {self.tier}: {self.used} bytes are booked of {self.total}")

    @property
    def used(self) -> int:
        return sum(value for _, value in self.parts)

    @property
    def free(self) -> int:
        return self.total - self.used

    @property
    def used_fraction(self) -> float | None:
        return self.used / self.total if self.total else None


def relative_error(reported: int, real: int) -> float:
    """``|reported - real| / real``: how far a memory report is from what the process really holds."""
    if real <= 0:
        raise InputError(f"real must be positive, got {real} bytes")
    return abs(reported - real) / real
