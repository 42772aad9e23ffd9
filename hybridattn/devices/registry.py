"""Devices by name. Choosing one is explicit and fails loudly: nothing is ever replaced by something else."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

from hybridattn.core.errors import InputError

DEVICES = {
    "host": "hybridattn.devices.host:HostDevice",
    "cuda": "hybridattn.devices.cuda:CudaDevice",
}
PRICED = ("sim", "emulated")  # compute nothing: used by experiments with PricedStages, not to generate text


def open_device(name: str, **options: Any) -> Any:
    """Open the device ``name`` for real text.

    Raises
    ------
    InputError
        Unknown name, a device that computes nothing, or one that this machine does not have, with the reason.
    """
    if name in PRICED:
        raise InputError(f"device '{name}' computes no text: it runs in experiments and in Python with PricedStages")
    if name not in DEVICES:
        raise InputError(f"device '{name}' is unknown; choose one of {', '.join((*DEVICES, *PRICED))}")
    if name == "cuda" and (reason := why_no_cuda()) is not None:
        raise InputError(f"device 'cuda' cannot be used: {reason}")
    module, _, cls = DEVICES[name].partition(":")
    kind = getattr(importlib.import_module(module), cls)
    known = inspect.signature(kind).parameters
    for option in options:
        if option not in known:
            raise InputError(f"device '{name}' has no option '{option}'; it has {', '.join(known)}")
    return kind(**options)


def why_no_cuda() -> str | None:
    """The reason why ``cuda`` is refused, in one clause; None where it can be used."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which compiles its kernels, is not installed"
    return None
