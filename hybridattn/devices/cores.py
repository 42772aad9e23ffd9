"""Which cpus play the GPU lane and which ones the CPU attention pool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cpu_kernels import topology
from hybridattn.core.errors import InputError


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Cpu numbers per role. The driver shares the GPU lane's."""

    gpu: tuple[int, ...]
    pool: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.gpu or not self.pool:
            raise InputError(f"a core plan needs at least one cpu per role, got gpu {self.gpu} and pool {self.pool}")

    @property
    def gpu_threads(self) -> int:
        return len(self.gpu)


def plan_cores(usable: tuple[int, ...] | None = None, gpu_threads: int = 1) -> CorePlan:
    """Split the usable cpus (default: allowed cpus within the cgroup quota, physical cores first).

    The first ``gpu_threads`` play the GPU, the rest the pool; with a single cpu both roles share it.
    """
    cpus = topology.worker_cpus(topology.read()) if usable is None else usable
    if not 1 <= gpu_threads <= max(1, len(cpus) - 1):
        raise InputError(
            f"gpu_threads must lie in 1..{max(1, len(cpus) - 1)} with {len(cpus)} usable cpus, got {gpu_threads}"
        )
    if len(cpus) == 1:
        return CorePlan(cpus, cpus)
    return CorePlan(cpus[:gpu_threads], cpus[gpu_threads:])


@contextmanager
def kept_on(cpus: tuple[int, ...]) -> Iterator[None]:
    """Inside the block the calling thread runs on ``cpus`` alone; where that cannot be had, wherever it may.

    A driver that wakes up on a pool worker's cpu goes on when that attention ends: it would wait for the CPU after all.
    """
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # the process has been moved elsewhere since the device was opened
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
