"""Part g: two steps as a Chrome trace."""

from __future__ import annotations

from dataclasses import replace

from hybridattn.core.chrome import write_chrome
from hybridattn.core.device import Span
from hybridattn.core.provenance import git_commit
from hybridattn.core.records import StepRecord
from hybridattn.core.trace import Trace, violations
from hybridattn.policies.fixed import AsyncOverlap
from scripts.gpucheck.bench import Bench, Window
from scripts.gpucheck.report import Budget, Report
from scripts.gpucheck.settings import policy_run


def between(window: Window, first: StepRecord, last: StepRecord) -> list[Span]:
    """Spans that touch the time of these steps."""
    return [s for s in window.spans if s.end_ns > first.start_ns and s.start_ns < last.end_ns]


def lanes(window: Window, first: StepRecord, last: StepRecord) -> int:
    """On how many lanes something happens: a micro-batch may be under way for several steps without a copy."""
    return len({s.lane for s in between(window, first, last)})


def run(report: Report, budget: Budget, dry_run: bool) -> int:
    """The file is the trace itself, so that Perfetto opens it; its ``otherData`` says where it comes from."""
    ratio = 2 if dry_run else 4
    settings = replace(policy_run(dry_run), ratios=(ratio,))
    bench = Bench(settings, "host" if dry_run else "cuda")
    try:
        policy = AsyncOverlap(ratio / (1 + ratio))
        window = bench.window(policy, settings.gpu_requests, settings.gpu_requests * ratio, settings.window_s / 3)
        device = bench.device
    finally:
        bench.close()
    broken = violations(list(window.spans))
    for sentence in broken[:10]:
        print(f"   {sentence}")
    steps = [p for p in window.steps if p.gpu_rows and p.micro_batches]
    first, last = max(zip(steps, steps[1:], strict=False), key=lambda pair: lanes(window, *pair))
    spans = between(window, first, last)
    spread_ns = getattr(device, "clock_spread_ns", 0)
    write_chrome(Trace(device.name, device.kind, device.profile, git_commit(), spans, spread_ns), report.path)
    print(f"   {len(spans)} spans of steps {first.index} and {last.index}, clock spread {spread_ns} ns")
    return 1 if broken else 0
