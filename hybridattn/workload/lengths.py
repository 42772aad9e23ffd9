"""How many tokens: fixed, uniform around a mean, log-normal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridattn.core.errors import InputError


class Lengths(Protocol):
    """A distribution of token counts, all at least 1."""

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """``count`` lengths, int64 of shape [count]."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always ``tokens``."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError(f"fixed length must be at least 1 token, got {self.tokens}")

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every integer in ``[mean (1 - spread), mean (1 + spread)]``, rounded inwards (NEO's evaluation: spread 0.1)."""

    mean: int
    spread: float = 0.1

    def __post_init__(self) -> None:
        if self.mean < 1:
            raise InputError(f"uniform mean must be at least 1 token, got {self.mean}")
        if not 0 <= self.spread < 1:
            raise InputError(f"uniform spread must be in [0, 1), got {self.spread}")

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        # The small number keeps 1000 * 0.9 = 900.0000000000001 from becoming 901.
        low = max(1, math.ceil(self.mean * (1 - self.spread) - 1e-9))
        high = math.floor(self.mean * (1 + self.spread) + 1e-9)
        return rng.integers(low, high + 1, count, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with the given mean and coefficient of variation, rounded, clipped to ``[low, high]``.

    ``sigma^2 = ln(1 + cv^2)``, ``mu = ln(mean) - sigma^2 / 2``. Clipping moves the mean; ``high`` well above it keeps
    that small.
    """

    mean: float
    cv: float
    high: int
    low: int = 1

    def __post_init__(self) -> None:
        if not (self.mean >= 1 and math.isfinite(self.mean) and 0 < self.cv < 100):
            raise InputError(f"log-normal needs a mean of at least 1 and cv in (0, 100), got {self.mean}, {self.cv}")
        if not 1 <= self.low <= self.high:
            raise InputError(f"log-normal needs 1 <= low <= high, got low {self.low}, high {self.high}")

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        variance = math.log1p(self.cv**2)
        drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return np.clip(np.rint(drawn), self.low, self.high).astype(np.int64)
