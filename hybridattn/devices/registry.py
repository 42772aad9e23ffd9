"""Devices by name. Choosing one is explicit and fails loudly: nothing is ever replaced by something else."""

from __future__ import annotations

import inspect
from typing import Any

from hybridattn.core.errors import InputError
from hybridattn.devices.cuda import CudaDevice
from hybridattn.devices.cuda_presence import why_no_cuda
from hybridattn.devices.host import HostDevice

DEVICES: dict[str, Any] = {"host": HostDevice, "cuda": CudaDevice}
PRICED = ("sim",)  # computes nothing: used by experiments with PricedStages, not to generate text


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
    kind = DEVICES[name]
    known = inspect.signature(kind).parameters
    for option in options:
        if option not in known:
            raise InputError(f"device '{name}' has no option '{option}'; it has {', '.join(known)}")
    return kind(**options)
