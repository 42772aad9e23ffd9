"""The registry of back ends: a name, where its code is, and why it may be absent."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, Protocol

REGISTRY = {
    "native": "cpu_kernels.native",
    "torch": "cpu_kernels.torch_backend",
    "ipex": "cpu_kernels.ipex_backend",
    "numba": "cpu_kernels.numba_exact",
    "numba_topk_approx": "cpu_kernels.numba_topk",
}
_NEEDS = {
    "native": (),
    "torch": ("torch",),
    "ipex": ("torch", "intel_extension_for_pytorch"),
    "numba": ("numba",),
    "numba_topk_approx": ("numba",),
}


class Backend(Protocol):
    """What a back end makes of checked inputs."""

    def workspace(self) -> Any: ...

    def run(self, q: Any, out: Any, lse: Any, layer: int, k_new: Any, v_new: Any, workspace: Any) -> None: ...


def why_absent(name: str) -> str:
    """Say why a back end cannot be used in this environment; empty when it can."""
    name = str(name).partition(":")[0]
    if name not in REGISTRY:
        return f"backend {name!r} is unknown; known: {', '.join(REGISTRY)}"
    lacking = [package for package in _NEEDS.get(name, ()) if find_spec(package) is None]
    if not lacking:
        return ""
    hints = {
        "ipex": " (it needs torch 2.8 and an environment of its own: `make ipex`)",
        "numba": " (`pip install 'hybridattn[numba]'`)",
    }
    lack = " and ".join(lacking)
    return f"backend {name!r} needs {lack}, which this environment does not have{hints.get(name.partition('_')[0], '')}"


def module_of(name: str) -> Any:
    """The module of a back end that is there.

    Raises
    ------
    ValueError
        If the back end is unknown or absent.
    """
    reason = why_absent(name)
    if reason:
        raise ValueError(reason)
    return importlib.import_module(REGISTRY[name.partition(":")[0]])


def layout_of(name: str) -> str:
    """Layout of the pages that a back end wants: ``tiles`` unless its module says otherwise."""
    module = module_of(name)
    return str(getattr(module, "ORDER", None) or getattr(getattr(module, "kernel", None), "order", "tiles"))


def approximate(name: str) -> bool:
    """Whether a back end leaves allowed keys out."""
    return bool(getattr(getattr(module_of(name), "kernel", None), "approximate", False))


def on_pool(name: str) -> bool:
    """Whether plans of a back end run on a `WorkerPool`: the native one, and kernels in numba."""
    return name == "native" or hasattr(module_of(name), "kernel")


def make(name: str, inputs: Any, isa: str | None) -> Backend:
    """Build the named back end for checked inputs.

    Parameters
    ----------
    name : str
        A name of `REGISTRY`; a kernel in numba may get a number with it, as in ``numba_topk_approx:64``.

    Raises
    ------
    ValueError
        If the back end is unknown, absent, or cannot do what the inputs ask for.
    """
    module, argument = module_of(name), name.partition(":")[2]
    if ":" not in name:
        return module.make(inputs, isa)
    kernel = getattr(module, "kernel", None)
    if kernel is None or not argument.isdecimal() or int(argument) < 1:
        raise ValueError(
            f"backend {name!r}: only a kernel in numba takes a number, and {argument!r} must be one above 0"
        )
    return kernel.limited(int(argument)).make(inputs, isa)
