"""The policy contract: who goes to which tier, how CPU rows are grouped, and the four verbs.

JOIN    the cohort's attention is ready: its rows enter the GPU's next linear stage
SKIP    go on without it and ask again when the GPU comes by this layer in the next pass
WAIT    wait (bounded) until it is ready, then JOIN
DETOUR  a ready cohort gets the linear stage of its own layer alone, wherever the GPU stands
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hybridattn.core.errors import InputError
from hybridattn.core.op import SKIPPED
from hybridattn.core.stages import CPU_TIER, GPU_TIER


class Verb(Enum):
    JOIN = "join"
    SKIP = "skip"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that waits for admission. ``index`` counts arrivals from 0; blocks are pages of its known tokens
    (``blocks_now``) and of all it may ever hold (``blocks_max``)."""

    index: int
    blocks_now: int
    blocks_max: int


@dataclass(frozen=True, slots=True)
class TierView:
    """Pages of a tier."""

    free: int
    total: int

    def admits(self, request: RequestView) -> bool:
        return request.blocks_now <= self.free and request.blocks_max <= self.total


@dataclass(frozen=True, slots=True)
class LaunchView:
    """Before a pass: CPU rows that wait for their next token, cohorts in flight, and GPU rows of the pass."""

    idle_rows: int
    cohorts: int
    gpu_rows: int


@dataclass(frozen=True, slots=True)
class CohortView:
    """A cohort that stands at ``layer``. ``same_pass``: its attention was submitted during the current pass."""

    number: int
    rows: int
    layer: int
    ready: bool
    same_pass: bool
    age_ns: int


@dataclass(frozen=True, slots=True)
class LayerView:
    """Where the GPU is: it has just enqueued its attention (ask) or its linear stage (detour) of ``layer``."""

    layer: int
    num_layers: int
    gpu_rows: int
    now_ns: int


class Policy:
    """Base: first come, GPU first, then CPU; one cohort of all idle rows; no detours.

    Parameters
    ----------
    cpu_fraction : float, optional
        Force this share of requests (by order of arrival) onto the CPU tier and the others onto the GPU tier.
    """

    name = "base"
    tiers: tuple[str, ...] = (GPU_TIER, CPU_TIER)
    priority = SKIPPED  # class of its ops on the cpu.attention lane

    def __init__(self, cpu_fraction: float | None = None) -> None:
        if cpu_fraction is not None and not 0.0 <= cpu_fraction <= 1.0:
            raise InputError(f"cpu_fraction must lie in 0..1, got {cpu_fraction}")
        if cpu_fraction and CPU_TIER not in self.tiers:
            raise InputError(
                f"cpu_fraction {cpu_fraction} asks for the CPU tier, which policy '{self.name}' does not use"
            )
        self.cpu_fraction = cpu_fraction

    def allowed(self, index: int) -> tuple[str, ...]:
        """Tiers that request ``index`` may live on, best first."""
        if self.cpu_fraction is None:
            return self.tiers
        share = self.cpu_fraction
        forced = int((index + 1) * share + 1e-9) > int(index * share + 1e-9)
        return (CPU_TIER,) if forced else (GPU_TIER,)

    def place(self, request: RequestView, tiers: dict[str, TierView]) -> str | None:
        """The tier that takes the request now; None: it waits."""
        for tier in self.allowed(request.index):
            if tiers[tier].admits(request):
                return tier
        return None

    def launch(self, view: LaunchView) -> tuple[int, ...]:
        """Sizes of the cohorts to launch now from the idle rows, in order; the rest stays idle."""
        return (view.idle_rows,) if view.idle_rows else ()

    def ask(self, cohort: CohortView, at: LayerView) -> Verb:
        """What to do with a cohort that stands at the layer of the GPU."""
        raise NotImplementedError

    def detour(self, ready: tuple[CohortView, ...], at: LayerView) -> int | None:
        """Number of a ready cohort that gets a detour now; None: none."""
        return None
