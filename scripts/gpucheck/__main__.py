"""One part of the GPU check: ``python -m scripts.gpucheck LETTER OUT_DIR [--dry-run] [--budget SECONDS]``."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from pathlib import Path

from scripts.gpucheck.report import Budget, Report

PARTS = {
    "a": ("machine.json", "machine"),
    "b": ("conformance.json", "conformance"),
    "c": ("kernels.json", "gpu_bandwidth"),
    "d": ("kernels.json", "cpu_bandwidth"),
    "e": ("policies.json", "policies"),
    "f": ("tokens.json", "tokens"),
    "g": ("trace.json", "traces"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpucheck")
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--budget", type=float, default=120.0)
    args = parser.parse_args()
    name, module = PARTS[args.part]
    report = Report(args.out / name, args.part, args.dry_run)
    try:
        return importlib.import_module(f"scripts.gpucheck.{module}").run(report, Budget(args.budget), args.dry_run)
    except Exception:  # on disk too: whoever reads the results may not have the terminal
        if name != "trace.json":  # that file is the trace itself
            report.put(error=traceback.format_exc())
        raise


if __name__ == "__main__":
    sys.exit(main())
