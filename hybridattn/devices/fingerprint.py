"""A short name for this machine and build, so that a measured number says where it comes from."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform

import llvmlite

from cpu_kernels import topology


def fingerprint() -> str:
    """``<cpu model>-<cpus>c-<hash>``; the hash covers the cpu model and count, torch, llvmlite and Python versions."""
    machine = topology.read()
    parts = (
        machine.cpu_model, str(len(machine.allowed)), _torch_version(), llvmlite.__version__, platform.python_version()
    )  # fmt: skip
    digest = hashlib.sha256("|".join(parts).encode()).hexdigest()[:8]
    return f"{machine.cpu_model.replace(' ', '_')}-{len(machine.allowed)}c-{digest}"


def _torch_version() -> str:
    """As ``torch.__version__``, without loading it; ``none`` where it is not installed."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none"
