"""What this machine has, and what the framework would use of it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from cpu_kernels import backends, isa, topology, tuning
from hybridattn.core.provenance import git_commit
from hybridattn.devices.cores import plan_cores
from hybridattn.devices.cuda_presence import why_no_cuda
from hybridattn.devices.fingerprint import fingerprint
from hybridattn.problems import problems

PACKAGES = ("hybridattn", "torch", "triton", "llvmlite", "numpy", "transformers", "hydra-core", "wandb")


def examine() -> dict[str, Any]:
    """Everything the doctor knows, as plain values."""
    before = _mask()
    no_torch = _why_no_torch()
    after = _mask()
    machine = topology.read()
    chosen = isa.detect()
    cores = plan_cores(topology.worker_cpus(machine))
    memory = _meminfo()
    return {
        "problems": problems(machine, before, after),
        "cpu_model": machine.cpu_model,
        "isa_level": chosen.level,
        "isa_reason": chosen.reason,
        "isa_available": list(chosen.available),
        "isa_missing": dict(chosen.missing),
        "isa_override": isa.ENVIRONMENT,
        "page_size": tuning.best_page_size(),
        "kernel_parameters": tuning.current()[1],
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
        "explicit_huge_pages": memory.get("HugePages_Total", 0),
        "memory_total_bytes": memory.get("MemTotal", 0) * 1024 or None,
        "memory_available_bytes": memory.get("MemAvailable", 0) * 1024 or None,
        "devices": {
            "host": f"no: {no_torch}" if no_torch else "yes",
            "sim": "yes (experiments only)",
            "cuda": f"no: {no_torch}" if no_torch else _cuda(),
        },
        "triton": _triton(not no_torch),
        "attention_backends": {name: backends.why_absent(name) or "yes" for name in backends.REGISTRY},
        "fingerprint": fingerprint(),
        "commit": git_commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _mask() -> tuple[int, ...]:
    """The cpus that this thread may use: torch's OpenMP runtime may take some away when it is loaded."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def _why_no_torch() -> str | None:
    """Loads torch; why that fails, if it does."""
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError:
        return "torch is not installed"
    except (ImportError, OSError) as error:
        return f"torch cannot be loaded: {error}"
    return None


def _cuda() -> str:
    reason = why_no_cuda()
    if reason is not None:
        return f"no: {reason}"
    from hybridattn.devices.cuda import TorchCuda  # torch comes with it, which some machines lack
    from hybridattn.devices.handover import handover_of

    runtime = TorchCuda()
    way, why = handover_of(runtime, "auto")
    return f"yes: {runtime.gpu_name}, CPU attention handed over by {way}" + (f" ({why})" if why else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _triton(has_torch: bool) -> str:
    version = _version("triton")
    if version is None:
        return "no: the package is not installed"
    if not has_torch:
        return f"{version}: without torch nothing calls it"
    import torch  # the doctor also examines machines without it

    if not torch.cuda.is_available():
        return f"{version}: compiles for GPUs and interprets on the CPU, but there is no GPU to run on"
    return version


def _meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """The numbers of /proc/meminfo by name, in its units (KiB or pages); empty where the system has none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ", 1).split() for line in lines)
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


def as_text(found: dict[str, Any]) -> str:
    """The findings for people, one fact a line."""
    lines = []
    for name, value in found.items():
        title = name.replace("_", " ")
        if name == "problems":
            lines += [f"{title:<24} {'none' if not value else ''}".rstrip(), *(f"  - {sentence}" for sentence in value)]
        elif name.endswith("_bytes") and value is not None:
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
