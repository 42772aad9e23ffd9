"""Part c: decode attention's bandwidth as a share of a device copy, by the kernel package's own benchmark.

A dry run goes through Triton's interpreter; its figures mean nothing.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import asdict

from scripts.gpucheck.report import Budget, Report


def run(report: Report, budget: Budget, dry_run: bool) -> int:
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    bench = importlib.import_module("gpu_kernels.bench")
    report.put(goal_share=0.85)
    for result in bench.results(dry_run):
        report.add("rows", asdict(result))
        if budget.left < 8:
            report.put(cut_short="no time for further shapes")
            break
    return report.done()
