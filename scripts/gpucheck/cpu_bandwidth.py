"""Part d: decode attention on this processor beside the read loop, same bytes, pages and threads.

The read loop counts with its best prefetch distance. The share is the median over alternating rounds.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from cpu_kernels import KVPages, WorkerPool, isa, plan_decode
from cpu_kernels.arrays import from_bf16, to_bf16
from cpu_kernels.bench.readloop import DISTANCES, ReadLoop
from hybridattn.devices.cores import plan_cores
from scripts.gpucheck.report import Budget, Report

GROUPS = (1, 4, 8)
HEADS, DIM, PAGE = 8, 128, 32


def run(report: Report, budget: Budget, dry_run: bool) -> int:
    chosen = isa.detect()
    report.put(isa_level=chosen.level, isa_reason=chosen.reason, num_kv_heads=HEADS, head_dim=DIM, page_size=PAGE)
    batch, length, rounds = (2, 256, 3) if dry_run else (32, 4096, 30)
    for group in GROUPS[:1] if dry_run else GROUPS:
        if budget.left < 5:
            report.put(cut_short=f"before group {group}")
            break
        report.add("rows", measure(batch, length, group, rounds))
    return report.done()


def measure(batch: int, length: int, group: int, rounds: int) -> dict[str, Any]:
    cpus = plan_cores().pool
    per_row = length // PAGE
    pages = KVPages(batch * per_row, HEADS, DIM, PAGE, "bf16", cpus=cpus)
    rng = np.random.default_rng(0)
    part = to_bf16(rng.standard_normal(1 << 20).astype(np.float32))  # drawing all of it would take longer than the part
    flat = pages.buffer.view(np.uint16).reshape(-1)
    for at in range(0, len(flat), len(part)):
        flat[at : at + len(part)] = part[: len(flat) - at]
    table = np.arange(batch * per_row, dtype=np.int32).reshape(batch, per_row)
    plan = plan_decode(pages, table, np.full(batch, length, np.int32), HEADS * group, slot_mapping=[-1] * batch)
    q = to_bf16(rng.standard_normal((batch, HEADS * group, DIM)).astype(np.float32))
    out = np.zeros_like(q)
    with WorkerPool(cpus=cpus) as pool:
        loops = [ReadLoop(pages, isa.detect().level, d, 16 * len(cpus)) for d in DISTANCES]
        best = min(loops, key=lambda loop: min(_seconds(pool, loop, q, out) for _ in range(2)))
        _seconds(pool, plan, q, out)
        pairs = [(_seconds(pool, plan, q, out), _seconds(pool, best, q, out)) for _ in range(rounds)]
    return {
        "batch": batch,
        "length": length,
        "group": group,
        "threads": len(cpus),
        "kv_bytes": plan.kv_bytes,
        "attention_gbps": plan.kv_bytes / statistics.median(a for a, _ in pairs) / 1e9,
        "read_gbps": best.bytes / statistics.median(r for _, r in pairs) / 1e9,
        "share_of_read": statistics.median(plan.kv_bytes / a / (best.bytes / r) for a, r in pairs),
        "read_prefetch_bytes": best.distance,
        "result_ok": bool(np.isfinite(from_bf16(out)).all() and np.abs(from_bf16(out)).max() > 0),
        "isa": plan.isa,
    }


def _seconds(pool: WorkerPool, plan: Any, q: np.ndarray, out: np.ndarray) -> float:
    started = time.perf_counter()
    pool.submit(plan, q, out).wait(30.0)
    return time.perf_counter() - started
