"""The situation that a policy plans for, what a layout is predicted to do in it, and the limits to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hybridattn.core.errors import InputError
from hybridattn.policies.base import StepView

MOST_CPU_ROWS = 16  # per GPU row: more are not planned for at a time
LEAST_CONTEXT = 64  # shorter ones are planned for as this: they hardly differ, and profiles begin there


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

    def __str__(self) -> str:
        prompts = f", {self.prompt_per_token:g} prompt tokens for each" if self.prompt_per_token else ""
        return f"{self.gpu_rows} + {self.cpu_rows} rows of {self.context} tokens{prompts}"

    def like(self, other: Load, parts: int = 6) -> bool:
        """A plan for ``other`` still fits: rows and context within one of ``parts``, prompts within a third."""
        if abs(self.prompt_per_token - other.prompt_per_token) > max(0.5, other.prompt_per_token / 3):
            return False
        pairs = ((self.gpu_rows, other.gpu_rows), (self.cpu_rows, other.cpu_rows), (self.context, other.context))
        return all(abs(a - b) <= max(1, b) / parts for a, b in pairs)

    def coarse(self) -> Load:
        """The nearest load of a grid with two sizes to an octave: what is known of that serves all loads around it."""
        prompts = self.prompt_per_token
        return Load(
            _on_grid(self.gpu_rows), _on_grid(self.cpu_rows), _on_grid(self.context),
            0.5 * _on_grid(round(2 * prompts)),
        )  # fmt: skip


class LoadMeter:
    """The load, as the views of the steps show it. Rounded, so that loads which hardly differ are planned for once."""

    __slots__ = ("_prompt_tokens",)

    def __init__(self) -> None:
        self._prompt_tokens = 0

    def count(self, view: StepView) -> None:
        """A step begins."""
        self._prompt_tokens += view.prefill_tokens

    def load(self, view: StepView) -> Load | None:
        """The load that comes: requests whose prompts are under way count as rows of their tier, those that wait as CPU
        rows. None: there is nobody but GPU rows."""
        gpu_rows = view.gpu_rows + view.gpu_coming
        rows = min(view.cpu_rows + view.cpu_coming + view.waiting, MOST_CPU_ROWS * max(1, gpu_rows))
        if not rows:
            return None
        kv_tokens = view.gpu_kv_tokens + view.cpu_kv_tokens + view.coming_tokens
        context = max(LEAST_CONTEXT, kv_tokens // max(1, gpu_rows + view.cpu_rows + view.cpu_coming))
        known = view.tokens > 16 * view.gpu_rows + 4 * rows  # prompts come in lumps: a few steps say little
        per_token = self._prompt_tokens / view.tokens if known else 0.0
        return Load(_coarse(gpu_rows), _coarse(rows), _coarse(context), round(2 * per_token) / 2)


def _on_grid(count: int) -> int:
    """The nearest of 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ... by ratio."""
    low = 1 << max(0, count.bit_length() - 1)
    return min((low, low * 3 // 2, 2 * low), key=lambda n: max(n, count) / min(n, count)) if count else 0


def _coarse(count: int) -> int:
    """``count`` to about 3 %."""
    step = 1 << max(0, count.bit_length() - 5)
    return round(count / step) * step


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
