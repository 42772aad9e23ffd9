"""What this machine has, and what the framework would use of it."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

from cpu_kernels import backends, isa, topology
from hybridattn.core.provenance import git_commit
from hybridattn.devices.cores import plan_cores
from hybridattn.devices.fingerprint import fingerprint
from hybridattn.devices.registry import why_no_cuda

PACKAGES = ("hybridattn", "torch", "triton", "llvmlite", "numpy", "transformers", "hydra-core", "wandb")


def examine() -> dict[str, Any]:
    """Everything the doctor knows, as plain values."""
    machine = topology.read()
    chosen = isa.detect()
    cores = plan_cores(topology.worker_cpus(machine))
    memory = psutil.virtual_memory()
    return {
        "cpu_model": machine.cpu_model,
        "isa_level": chosen.level,
        "isa_reason": chosen.reason,
        "isa_available": list(chosen.available),
        "isa_missing": dict(chosen.missing),
        "isa_override": isa.ENVIRONMENT,
        "allowed_cpus": list(machine.allowed),
        "cgroup_quota_cpus": machine.quota,
        "physical_cores": machine.num_cores,
        "numa_nodes": {str(node): list(cpus) for node, cpus in machine.numa},
        "threads_per_role": {
            "driver": 1,
            "gpu.compute": {"cpus": list(cores.gpu), "threads": cores.gpu_threads},
            "gpu.d2h": {"cpus": list(cores.gpu), "threads": 1},
            "gpu.h2d": {"cpus": list(cores.gpu), "threads": 1},
            "cpu.attention": {"cpus": list(cores.pool), "threads": len(cores.pool)},
        },
        "transparent_huge_pages": machine.huge_pages,
        "explicit_huge_pages": _explicit_huge_pages(),
        "memory_total_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "devices": {"host": "yes", "sim": "yes (experiments only)", "cuda": _cuda()},
        "triton": _triton(),
        "attention_backends": {name: backends.why_absent(name) or "yes" for name in backends.REGISTRY},
        "fingerprint": fingerprint(),
        "commit": git_commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _cuda() -> str:
    reason = why_no_cuda()
    return f"yes: {torch.cuda.get_device_name()}" if reason is None else f"no: {reason}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _triton() -> str:
    version = _version("triton")
    if version is None:
        return "no: the package is not installed"
    if not torch.cuda.is_available():
        return f"{version}: compiles for GPUs and interprets on the CPU, but there is no GPU to run on"
    return version


def _explicit_huge_pages() -> int:
    """Pages reserved in advance (``HugePages_Total``); the framework uses transparent ones."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("HugePages_Total:"):
            return int(line.split()[1])
    return 0


def as_text(found: dict[str, Any]) -> str:
    """The findings for people, one fact a line."""
    lines = []
    for name, value in found.items():
        title = name.replace("_", " ")
        if name.endswith("_bytes"):
            lines.append(f"{title.removesuffix(' bytes'):<24} {value / 1e9:.1f} GB")
        elif isinstance(value, dict):
            lines.append(f"{title}")
            lines += [f"  {key:<22} {_plain(entry)}" for key, entry in value.items()]
        else:
            lines.append(f"{title:<24} {_plain(value)}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(entry)}" for key, entry in value.items())
    return str(value)
