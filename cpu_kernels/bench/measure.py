"""Measuring a case: interleaved rounds of the kernel, the read loops, another case and the peers; paired ratios."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import cpu_kernels as ck
from cpu_kernels import backends, isa
from cpu_kernels.bench.cases import Case
from cpu_kernels.bench.peers import Peer
from cpu_kernels.bench.readloop import DISTANCES, ReadLoop

WAIT_S = 120.0
RANDOM_PAGES = 64
Timer = Callable[[], int]


class Prepared:
    """A case with its pages filled, its plan made and its result checked."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        rng = np.random.default_rng(seed)
        need = [-(-n // case.page) for n in case.lens]
        count = sum(need)
        layout = backends.layout_of(case.backend)
        self.pages = ck.KVPages(count, case.heads, case.dim, case.page, case.dtype, layout=layout)
        _fill(self.pages, rng)
        order, self.table = rng.permutation(count), np.zeros((len(need), max(need)), np.int32)
        for i, (start, n) in enumerate(zip(np.cumsum(need) - need, need, strict=True)):
            self.table[i, :n] = order[start : start + n]
        self.table[:, : case.common // case.page] = self.table[0, : case.common // case.page]
        shape = (len(case.lens), case.heads * case.group, case.dim)
        self.q = ck.to_bf16(rng.standard_normal(shape).astype(np.float32))
        self.out = np.empty(shape, np.float32)
        self.plan = ck.plan_decode(
            self.pages, self.table, case.lens, shape[1], backend=case.backend, read_once=case.read_once
        )

    def relative_error(self) -> float:
        """Error of the shortest row against float64, as a ratio of norms."""
        row = int(np.argmin(self.case.lens))
        used = self.table[row, : -(-self.case.lens[row] // self.case.page)]
        k, v = (
            np.swapaxes(x, 1, 2).reshape(-1, self.case.heads, self.case.dim) for x in ck.unpack(self.pages, 0, used)
        )
        want, _ = ck.reference.attend(ck.from_bf16(self.q[row]), k, v, self.case.lens[row] - 1)
        return float(np.linalg.norm(self.out[row] - want) / np.linalg.norm(want))


def _fill(pages: ck.KVPages, rng: np.random.Generator) -> None:
    """Fill with some random pages over and over: the kernel's time does not depend on the values."""
    some = min(RANDOM_PAGES, pages.num_pages)
    shape = (some, pages.num_kv_heads, pages.page_size, pages.head_dim)
    k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    ck.pack(pages, 0, np.arange(some), k, v)
    for first in range(some, pages.num_pages, some):
        last = min(first + some, pages.num_pages)
        pages.buffer[0, first:last] = pages.buffer[0, : last - first]


def timer_of(pool: ck.WorkerPool, plan: Any, q: Any, out: Any) -> Timer:
    """`pool_timer`, or the calling thread's time for a back end with threads of its own."""
    if plan.on_pool:
        return pool_timer(pool, plan, q, out)

    def run() -> int:
        start = time.perf_counter_ns()
        plan.run(q, out)
        return time.perf_counter_ns() - start

    return run


def pool_timer(pool: ck.WorkerPool, plan: Any, q: Any, out: Any) -> Timer:
    """Time a job from before its submit to its end, as the workers stamp it."""

    def run() -> int:
        start = time.perf_counter_ns()
        job = pool.submit(plan, q, out)
        job.wait(WAIT_S)
        end = job.end_ns
        assert end is not None
        return end - start

    return run


def rounds_of(timers: dict[str, Timer], rounds: int, warm: int = 2) -> dict[str, np.ndarray]:
    """Call all timers in turn, round after round, alternating the direction; drop the first `warm` rounds."""
    names = list(timers)
    samples: dict[str, list[int]] = {name: [] for name in names}
    for number in range(rounds + warm):
        for name in names if number % 2 == 0 else reversed(names):
            samples[name].append(timers[name]())
    return {name: np.array(values[warm:], np.float64) for name, values in samples.items()}


def measure(
    case: Case, pool: ck.WorkerPool, rounds: int, against: Prepared | None, peers: Path | None
) -> dict[str, Any]:
    """Measure one case and return its row.

    Parameters
    ----------
    case : Case
    pool : WorkerPool
        The workers; the read loop runs on the same ones.
    rounds : int
        Paired rounds (at least 30 for a claim).
    against : Prepared, optional
        The case to compare with in the same rounds.
    peers : Path, optional
        Folder of the peers' environments.
    """
    mine = Prepared(case)
    level = isa.detect().level
    reads = {f"read{d}": ReadLoop(mine.pages, level, d, pool.num_workers) for d in DISTANCES}
    timers = {"kernel": timer_of(pool, mine.plan, mine.q, mine.out)}
    timers |= {name: pool_timer(pool, loop, None, None) for name, loop in reads.items()}
    if against is not None:
        timers["against"] = pool_timer(pool, against.plan, against.q, against.out)
    errors: dict[str, float] = {}
    with ExitStack() as stack:
        for name in Peer.available(peers) if case.peers else []:
            assert peers is not None
            peer = stack.enter_context(Peer(name, peers, case, pool.num_workers))
            timers[name], errors[name] = peer.call_ns, peer.rel_err
        samples = rounds_of(timers, rounds)
    row = _row(case, pool, mine, level, samples, reads)
    if against is not None:
        rate, other = mine.plan.kv_bytes / samples["kernel"], against.plan.kv_bytes / samples["against"]
        row["against"], row["gbs_ratio"] = case.against, _median(rate / other)
        tokens = sum(case.lens) / sum(against.case.lens)
        row["tokens_ratio"] = _median(samples["against"] / samples["kernel"]) * tokens
    for name, error in errors.items():
        row[f"vs_{name}"], row[f"{name}_rel_err"] = _median(samples[name] / samples["kernel"]), error
        row[f"{name}_gbs"] = _median(mine.plan.kv_bytes / samples[name])
    return row


def _median(x: np.ndarray) -> float:
    return round(float(np.median(x)), 4)


def _row(
    case: Case,
    pool: ck.WorkerPool,
    mine: Prepared,
    level: str,
    samples: dict[str, np.ndarray],
    reads: dict[str, ReadLoop],
) -> dict[str, Any]:
    rate = mine.plan.kv_bytes / samples["kernel"]  # bytes per nanosecond are GB/s
    read = {name: loop.bytes / samples[name] for name, loop in reads.items()}
    best = max(read, key=lambda name: float(np.median(read[name])))
    low, high = np.quantile(rate, [0.25, 0.75])
    return {
        "case": case.name,
        "kernel": case.backend,
        "approximate": backends.approximate(case.backend),
        "isa": level if case.backend == "native" else "",
        "dtype": case.dtype,
        "group": case.group,
        "kv_heads": case.heads,
        "head_dim": case.dim,
        "page_size": case.page,
        "sequences": len(case.lens),
        "kv_bytes": mine.plan.kv_bytes,
        "threads": pool.num_workers,
        "rounds": len(rate),
        "gbs_median": _median(rate),
        "gbs_best": round(float(rate.max()), 4),
        "spread": round(float(high - low), 4),
        "read_gbs": _median(read[best]),
        "read_variant": best,
        "share_of_read_bandwidth": _median(rate / read[best]),
        "rel_err": mine.relative_error(),
        "samples_ns": samples["kernel"].astype(int).tolist(),
    }


def measure_beside_neighbour(case: Case, pool: ck.WorkerPool, rounds: int) -> dict[str, Any]:
    """Measure a case in paired rounds without and with one busy process on the same CPUs."""
    mine = Prepared(case)
    run = pool_timer(pool, mine.plan, mine.q, mine.out)
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])

    def beside() -> int:
        os.kill(spin.pid, signal.SIGCONT)
        time.sleep(0.005)
        took = run()
        os.kill(spin.pid, signal.SIGSTOP)
        return took

    try:
        os.kill(spin.pid, signal.SIGSTOP)
        samples = rounds_of({"alone": run, "beside": beside}, rounds)
    finally:
        spin.kill()
        spin.wait(10)
    slowdown = samples["beside"] / samples["alone"]
    return {
        "case": case.name,
        "kernel": "native",
        "group": case.group,
        "threads": pool.num_workers,
        "rounds": rounds,
        "gbs_median": _median(mine.plan.kv_bytes / samples["alone"]),
        "gbs_beside_median": _median(mine.plan.kv_bytes / samples["beside"]),
        "slowdown_median": _median(slowdown),
        "slowdown_worst": round(float(slowdown.max()), 4),
    }
