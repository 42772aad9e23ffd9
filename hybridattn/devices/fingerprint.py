"""A short name for this machine and build, so that a measured number says where it comes from."""

from __future__ import annotations

import hashlib
import platform

import llvmlite
import torch

from cpu_kernels import topology


def fingerprint() -> str:
    """``<cpu model>-<cpus>c-<hash>``; the hash covers the cpu model and count, torch, llvmlite and Python versions."""
    machine = topology.read()
    parts = (
        machine.cpu_model, str(len(machine.allowed)), torch.__version__, llvmlite.__version__, platform.python_version()
    )  # fmt: skip
    digest = hashlib.sha256("|".join(parts).encode()).hexdigest()[:8]
    return f"{machine.cpu_model.replace(' ', '_')}-{len(machine.allowed)}c-{digest}"
