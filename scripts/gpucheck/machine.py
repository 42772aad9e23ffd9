"""Part a: what machine this is."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path

import torch

from scripts.gpucheck.report import Budget, Report


def run(report: Report, budget: Budget, dry_run: bool) -> int:
    report.put(lscpu=lscpu(), cpu_flags=flags())
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        report.put(gpu={"name": p.name, "sm": f"{p.major}.{p.minor}", "processors": p.multi_processor_count,
                        "memory_bytes": p.total_memory})  # fmt: skip
    try:
        report.put(doctor=importlib.import_module("hybridattn.doctor").examine())
    except ImportError as error:  # an optional package of the doctor is absent on a bare machine
        report.put(doctor=f"cannot run here: {error}")
    return report.done()


def lscpu() -> list[str]:
    if shutil.which("lscpu") is None:
        return ["lscpu is not installed"]
    done = subprocess.run(["lscpu"], capture_output=True, text=True, timeout=20)
    return [line for line in done.stdout.splitlines() if not line.startswith("Flags")]


def flags() -> dict[str, bool]:
    """Instruction sets that the kernels care about."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    words = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    names = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")
    return {name: name in words for name in names}
