"""Which GPU tier a model gets on a device."""

from __future__ import annotations

import importlib

import torch

from hybridattn.core.config import EngineConfig
from hybridattn.core.device import Device
from hybridattn.core.errors import InputError
from hybridattn.models.gpu_tier import GpuTier
from hybridattn.models.host_tier import HostTier
from hybridattn.models.load import LoadedModel


def open_tier(
    model: LoadedModel, device: Device, config: EngineConfig, kv_dtype: str, sm_scale: float, cpu_order: str = "tiles"
) -> GpuTier:
    """The tier that the device's kind asks for, with CPU pages in the layout ``cpu_order``.

    Raises
    ------
    InputError
        Weights that live elsewhere than the device, or what the tier itself refuses (dtypes, memory).
    """
    wanted = torch.device(getattr(device, "torch_device", "cpu"))
    if model.weights.device != wanted:
        raise InputError(f"weights are on {model.weights.device}, but device '{device.name}' needs them on {wanted}")
    if getattr(device, "gpu_tier", "host") == "host":
        return HostTier(model, device, config, kv_dtype, sm_scale, cpu_order)
    cuda = importlib.import_module("hybridattn.models.cuda_tier")  # its kernels need triton, which no other device does
    tier: GpuTier = cuda.CudaTier(model, device, config, kv_dtype, sm_scale, cpu_order)
    return tier
