"""Devices by name. Choosing one is explicit and fails loudly: nothing is ever replaced by something else."""

from __future__ import annotations

import importlib
from typing import Any

from hybridattn.core.errors import InputError

DEVICES = {
    "host": "hybridattn.devices.host:HostDevice",
    "cuda": "hybridattn.devices.cuda:CudaDevice",
}
PRICED = ("sim",)  # compute nothing: used by experiments with PricedStages, not to generate text


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
    if name == "cuda":
        raise InputError(f"device 'cuda' cannot be used: {why_no_cuda()}")
    module, _, cls = DEVICES[name].partition(":")
    return getattr(importlib.import_module(module), cls)(**options)


def why_no_cuda() -> str:
    """The reason why ``cuda`` is refused, in one clause."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA, and the CUDA device is not part of this version yet"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device, and the CUDA device is not part of this version yet"
    return "the CUDA device is not part of this version yet"
