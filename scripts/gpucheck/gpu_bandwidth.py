"""Part c: bytes of K and V per second of decode attention, beside a device copy of the same size in the same run.

A copy moves each byte twice (read and written), attention once; both are counted as the memory sees them. The share is
the median over alternating rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

import gpu_kernels
from scripts.gpucheck.cpu_bandwidth import measure as measure_on_cpu
from scripts.gpucheck.report import Budget, Report

SHAPES = ((64, 4096), (8, 32768))
GROUPS = (1, 4, 8)
ROUNDS = 30
HEADS, DIM, PAGE = 8, 128, 32


def run(report: Report, budget: Budget, dry_run: bool) -> int:
    if dry_run:
        report.add("rows", {"on": "host", **measure_on_cpu(2, 256, 4, rounds=3)})
        return report.done()
    report.put(goal_share=0.85, num_kv_heads=HEADS, head_dim=DIM, page_size=PAGE, dtype="bf16", rounds=ROUNDS)
    for (batch, length), group in ((s, g) for s in SHAPES for g in GROUPS):
        if budget.left < 5:
            report.put(cut_short=f"before batch {batch}, length {length}, group {group}")
            break
        report.add("rows", measure(batch, length, group))
    return report.done()


def measure(
    batch: int, length: int, group: int, on: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> dict[str, float | int | bool]:
    pages = batch * length // PAGE
    k, v = (torch.randn(pages, HEADS, PAGE, DIM, device=on, dtype=dtype) for _ in range(2))
    table = torch.randperm(pages).int().view(batch, -1)
    lens = torch.full((batch,), length, dtype=torch.int32)
    plan = gpu_kernels.plan_decode(k, v, table, lens, HEADS * group)
    q = torch.randn(batch, HEADS * group, DIM, device=on, dtype=dtype)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=on)
    workspace = plan.make_workspace()
    target = torch.empty_like(k)

    def attend() -> None:
        plan.run(q, k, v, out, lse, workspace=workspace)

    def copy() -> None:
        target.copy_(k)

    kv_bytes, copy_bytes = 2 * k.nbytes, 2 * k.nbytes
    for warm in (attend, copy) * 3:
        warm()
    pairs = [(_seconds(attend), _seconds(copy)) for _ in range(ROUNDS)]
    attended, copied = ([p[i] for p in pairs] for i in range(2))
    return {
        "batch": batch,
        "length": length,
        "group": group,
        "kv_bytes": kv_bytes,
        "attention_gbps": kv_bytes / statistics.median(attended) / 1e9,
        "copy_gbps": copy_bytes / statistics.median(copied) / 1e9,
        "share_of_copy": statistics.median(kv_bytes / a / (copy_bytes / c) for a, c in pairs),
        "share_worst": min(kv_bytes / a / (copy_bytes / c) for a, c in pairs),
        "result_ok": _right(q, k, v, table, length, group, out),
    }


def _seconds(run: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _right(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, length: int, group: int, out: torch.Tensor
) -> bool:
    """One row of what was timed, recomputed in float32."""
    ids = table[-1].long().to(k.device)
    keys, values = (x[ids].transpose(1, 2).flatten(0, 1)[:length].float() for x in (k, v))
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    weights = torch.einsum("hd,khd->hk", q[-1].float(), keys).mul(DIM**-0.5).softmax(-1)
    want = torch.einsum("hk,khd->hd", weights, values)
    return bool(torch.allclose(out[-1].float(), want, rtol=2e-2, atol=2e-3))
