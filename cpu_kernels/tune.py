"""Measure what suits this processor and keep it: ``python -m cpu_kernels.tune``.

One parameter after the other is tried on paged K and V larger than the caches: the candidates and the best so far run
in turn, round after round, and one that is at least 2 % faster in the median of the rounds takes its place. Whatever
the outcome, results stay what they are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from cpu_kernels import isa, jit, memory, tuning
from cpu_kernels.native import NativeDecode
from cpu_kernels.pages import KVPages
from cpu_kernels.plan import plan_decode
from cpu_kernels.pool import WorkerPool
from cpu_kernels.tuning import Tuning

HEADS, DIM, TOKENS = 8, 128, 2048
SMALLEST, LARGEST = 32 << 20, 256 << 20  # bytes of K and V; as much as an eighth of the free memory allows
GAIN = 1.02
ROUNDS, LEAST_ROUNDS = 7, 2
WAIT_S = 60.0
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Step:
    """One parameter and what it may be, tried with `groups` query heads per KV head."""

    name: str
    values: tuple[int, ...]
    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.values or not self.groups:
            raise ValueError(f"step {self.name}: values and groups must not be empty")


def steps(level: str) -> list[Step]:
    """What is tried on an ISA level, the most telling first."""
    spacing = (0, 64, 128, 256)
    tiles = level == "amx_bf16"
    fetches = [Step("fetch_tiles", spacing, (1, 4, 8))] if tiles else [
        Step("fetch_heavy", spacing, (4, 8)), Step("fetch_light", spacing, (1,)),
    ]  # fmt: skip
    return [
        Step("page_size", (32, 64, 128), (1, 4, 8)),
        *fetches,
        Step("near_bytes", (8 << 10, 1 << 20), (4,)),
        Step("cache_level", (2, 3), (4,)),
        Step("run_group", (0, 3, 8), (1, 4, 8)),
        Step("run_heads", (2, 4, 8), (1,)),
        Step("chunk_bytes", (128 << 10, 256 << 10, 512 << 10, 1 << 20), (4,)),
    ]


class _Job:
    """A native step as the pool takes it."""

    def __init__(self, native: NativeDecode) -> None:
        self.native = native


class Bench:
    """K and V, the workers, and a step for each group and parameters."""

    def __init__(self, pool: WorkerPool, num_bytes: int, dtype: str) -> None:
        self.pool, self.dtype, self.level = pool, dtype, isa.detect().level
        self.rng = np.random.default_rng(0)
        per_row = TOKENS * HEADS * DIM * 4
        self.rows = max(1, num_bytes // per_row)
        self._pages: dict[int, tuple[KVPages, np.ndarray]] = {}
        self._ready: dict[tuple[int, Tuning], tuple[_Job, np.ndarray, np.ndarray]] = {}

    def pages(self, size: int) -> tuple[KVPages, np.ndarray]:
        if size not in self._pages:
            count = self.rows * TOKENS // size
            pages = KVPages(count, HEADS, DIM, size, self.dtype)
            pages.buffer[...] = 0x3C  # small positive numbers in every dtype
            table = self.rng.permutation(count).astype(np.int32).reshape(self.rows, TOKENS // size)
            self._pages[size] = pages, table
        return self._pages[size]

    def nanoseconds(self, group: int, chosen: Tuning) -> int:
        """Time one step over all rows."""
        key = (group, chosen)
        if key not in self._ready:
            pages, table = self.pages(chosen.page_size)
            plan = plan_decode(pages, table, np.full(self.rows, TOKENS), HEADS * group)
            q = np.ones((self.rows, HEADS * group, DIM), np.float32)
            self._ready[key] = _Job(NativeDecode(plan.inputs, self.level, tuning=chosen)), q, np.empty_like(q)
        job, q, out = self._ready[key]
        start = time.perf_counter_ns()
        running = self.pool.submit(job, q, out)
        running.wait(WAIT_S)
        end = running.end_ns
        assert end is not None
        return end - start

    def compare(
        self, groups: Iterable[int], candidates: list[Tuning], rounds: int, limit: float = float("inf")
    ) -> list[float]:
        """How many times as fast as the first each candidate is: median over rounds, geometric mean over groups.

        Rounds end early once the time is `limit` (of `time.monotonic`).
        """
        total = np.zeros(len(candidates))
        for group in groups:
            for chosen in candidates:
                self.nanoseconds(group, chosen)
            took = []
            for number in range(rounds):
                if number >= LEAST_ROUNDS and time.monotonic() > limit:
                    break
                order = list(range(len(candidates)))[:: 1 if number % 2 else -1]
                row = {i: self.nanoseconds(group, candidates[i]) for i in order}
                took.append([row[i] for i in range(len(candidates))])
            times = np.array(took, float)
            total += np.log(np.median(times[:, :1] / times, 0))
        return np.exp(total / len(list(groups))).tolist()


def search(seconds: float = 20.0, report: Report = print, pool: WorkerPool | None = None) -> tuple[Tuning, list[str]]:
    """Look for the best parameters on this processor.

    Parameters
    ----------
    seconds : float
        Time to stop after; what was not tried by then keeps its value.
    report : callable
        Gets a line per step.
    pool : WorkerPool, optional
        Whose workers to measure on; one of its own by default.

    Returns
    -------
    tuning : Tuning
    log : list of str
        The reported lines.
    """
    limit = time.monotonic() + seconds
    log: list[str] = []

    def say(line: str) -> None:
        log.append(line)
        report(line)

    best, source = tuning.from_table(tuning.processor()), "table"
    have = memory.available_bytes() or SMALLEST * 8
    own = WorkerPool() if pool is None else None
    try:
        bench = Bench(pool or own, min(LARGEST, max(SMALLEST, have // 8)), "bf16")  # type: ignore[arg-type]
        say(f"{bench.level}, {bench.pool.num_workers} workers, {bench.rows} rows of {TOKENS} tokens; from the {source}")
        slowest = 0.0
        for step in steps(bench.level):
            begin = time.monotonic()
            size = len(step.groups) * (1 + len(step.values))
            if begin + slowest * size > limit:
                say(f"{step.name}: not tried, {seconds:g} s are over")
                continue
            candidates = [best] + [
                replace(best, **{step.name: x}) for x in step.values if x != getattr(best, step.name)
            ]
            speeds = bench.compare(step.groups, candidates, ROUNDS, limit)
            tried = ", ".join(f"{getattr(c, step.name)}: {s:.3f}" for c, s in zip(candidates, speeds, strict=True))
            top = int(np.argmax(speeds))
            if speeds[top] >= GAIN:
                best = candidates[top]
            took = time.monotonic() - begin
            slowest = max(slowest, took / size)  # seconds a candidate and group, compilation included
            say(f"{step.name} at groups {step.groups}: {tried}; kept {getattr(best, step.name)} ({took:.1f} s)")
    finally:
        if own is not None:
            own.close()
    return best, log


def keep(seconds: float = 20.0, report: Report = print) -> Tuning:
    """Search, and keep what was found for this processor, where it can be kept."""
    best, log = search(seconds, report)
    who, folder = tuning.processor(), jit.cache_dir()
    if folder is not None and tuning.save(folder, who, best, log):
        report(f"kept in {tuning.path_of(folder, who)}")
    else:
        report(f"{folder or 'a folder of this user'} cannot be written: nothing kept, the table serves")
    return best


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cpu_kernels.tune", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="time to stop after")
    parser.add_argument("--dry-run", action="store_true", help="print what was found, keep nothing")
    args = parser.parse_args(argv)
    print(search(args.seconds)[0] if args.dry_run else keep(args.seconds))


if __name__ == "__main__":
    main()
