"""The registry of back ends: a name, where its code is, and why it may be absent."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, Protocol

REGISTRY = {
    "native": "cpu_kernels.native",
    "torch": "cpu_kernels.torch_backend",
    "ipex": "cpu_kernels.ipex_backend",
}
_NEEDS = {"native": (), "torch": ("torch",), "ipex": ("torch", "intel_extension_for_pytorch")}


class Backend(Protocol):
    """What a back end makes of checked inputs."""

    def workspace(self) -> Any: ...

    def run(self, q: Any, out: Any, lse: Any, layer: int, k_new: Any, v_new: Any, workspace: Any) -> None: ...


def why_absent(name: str) -> str:
    """Say why a back end cannot be used in this environment; empty when it can."""
    if name not in REGISTRY:
        return f"backend {name!r} is unknown; known: {', '.join(REGISTRY)}"
    lacking = [package for package in _NEEDS.get(name, ()) if find_spec(package) is None]
    if not lacking:
        return ""
    hint = " (it needs torch 2.8 and an environment of its own: `make ipex`)" if name == "ipex" else ""
    return f"backend {name!r} needs {' and '.join(lacking)}, which this environment does not have{hint}"


def make(name: str, inputs: Any, isa: str | None) -> Backend:
    """Build the named back end for checked inputs.

    Raises
    ------
    ValueError
        If the back end is unknown, absent, or cannot do what the inputs ask for.
    """
    reason = why_absent(name)
    if reason:
        raise ValueError(reason)
    return importlib.import_module(REGISTRY[name]).make(inputs, isa)
