"""The situation that a policy plans for, what a layout is predicted to do in it, and the limits to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hybridattn.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Load:
    """What decodes: rows on each tier, keys per row, and prompt tokens to prefill per token generated (0: none)."""

    gpu_rows: int
    cpu_rows: int
    context: int
    prompt_per_token: float = 0.0

    def __post_init__(self) -> None:
        if self.gpu_rows < 0 or self.cpu_rows < 0 or self.gpu_rows + self.cpu_rows < 1 or self.context < 1:
            raise InputError(
                f"load of {self.gpu_rows} GPU rows and {self.cpu_rows} CPU rows with {self.context} keys each"
            )
        if self.prompt_per_token < 0:
            raise InputError(f"prompt_per_token must not be negative, got {self.prompt_per_token}")

    def like(self, other: Load) -> bool:
        """A plan for ``other`` still fits: rows and context within a sixth, prompts within a third."""
        if abs(self.prompt_per_token - other.prompt_per_token) > max(0.5, other.prompt_per_token / 3):
            return False
        pairs = ((self.gpu_rows, other.gpu_rows), (self.cpu_rows, other.cpu_rows), (self.context, other.context))
        return all(abs(a - b) <= max(1, b) / 6 for a, b in pairs)


class Prediction(Protocol):
    """Decode rate and times per output token that a layout reaches (``hybridattn.planning.steady.Steady``)."""

    @property
    def tokens_per_s(self) -> float: ...
    @property
    def gpu_tpot_ns(self) -> float | None: ...
    @property
    def cpu_tpot_ns(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest times per output token of GPU and CPU rows, in multiples of the GPU-only time (None: no limit)."""

    gpu: float | None = None
    cpu: float | None = None

    def __post_init__(self) -> None:
        for name in ("gpu", "cpu"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise InputError(f"limit {name} must be at least 1 GPU-only TPOT, got {value}")

    @property
    def any(self) -> bool:
        return self.gpu is not None or self.cpu is not None

    def kept_by(self, found: Prediction, alone_ns: float | None, slack: float = 0.0) -> bool:
        """``found`` keeps the limits, given the time per token of the GPU-only step (without one there is no limit)."""
        if alone_ns is None:
            return True
        pairs = ((found.gpu_tpot_ns, self.gpu), (found.cpu_tpot_ns, self.cpu))
        return all(t is None or limit is None or t <= limit * alone_ns * (1 + slack) for t, limit in pairs)
