"""Part e: three policies over the ratio of CPU-held to GPU-held requests, under a small GPU budget."""

from __future__ import annotations

import traceback

from hybridattn.core.errors import HybridAttnError
from hybridattn.policies.base import Policy
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly, SyncOffload
from scripts.gpucheck.bench import Bench
from scripts.gpucheck.report import Budget, Report
from scripts.gpucheck.settings import policy_run

NAMES = ("gpu_only", "sync_offload", "async_overlap")


def make(name: str, fraction: float) -> Policy:
    if name == "gpu_only":
        return GpuOnly()
    return SyncOffload(fraction) if name == "sync_offload" else AsyncOverlap(fraction, max_micro_batches=4)


def run(report: Report, budget: Budget, dry_run: bool) -> int:
    settings = policy_run(dry_run)
    bench = Bench(settings, "host" if dry_run else "cuda")
    report.put(**bench.facts())
    try:
        # Once before anything is measured: kernels compile, caches fill.
        bench.window(make("async_overlap", 0.5), settings.gpu_requests, settings.gpu_requests, settings.window_s / 3)
        for repeat in range(settings.repeats):
            ok = measure_all(bench, report, budget, repeat)
            if not ok:
                break
    finally:
        bench.close()
    return report.done(ok)


def measure_all(bench: Bench, report: Report, budget: Budget, repeat: int) -> bool:
    """One repeat over all points; False when a point failed. Points that the budget has no room for are left out."""
    settings = bench.run
    alone_ns: int | None = None
    for ratio in (0.0, *settings.ratios):
        for name in NAMES if ratio else ("gpu_only",):
            if name == "gpu_only" and ratio:
                continue  # what does not fit waits outside: its rate is that of ratio 0
            if budget.left < 3 * settings.window_s + 4:
                report.put(cut_short=f"no time for repeat {repeat}, ratio {ratio}, {name} and what follows")
                return True
            cpu_requests = round(settings.gpu_requests * ratio)
            head = {"policy": name, "ratio": ratio, "repeat": repeat, "gpu_requests": settings.gpu_requests,
                    "cpu_requests": cpu_requests}  # fmt: skip
            try:
                policy = make(name, cpu_requests / (cpu_requests + settings.gpu_requests))
                window = bench.window(policy, settings.gpu_requests, cpu_requests, settings.window_s)
            except HybridAttnError:
                report.add("failures", {**head, "traceback": traceback.format_exc()})
                return False  # the device may not be usable any more
            if name == "gpu_only":
                alone_ns = window.step_ns
            report.add("rows", {**head, **window.row(alone_ns)})
    return True
