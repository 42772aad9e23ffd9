"""Starting a kernel on the device its tensors live on."""

from collections.abc import Sequence
from typing import Any

import torch

from gpu_kernels.config import Config


def launch(kernel: Any, grid: Sequence[int], config: Config, device: torch.device, *arguments: Any) -> None:
    """Enqueue ``kernel`` on the current stream of ``device``; a grid without programs enqueues nothing."""
    if 0 in grid:
        return
    options = {**config.constants, "num_warps": config.num_warps, "num_stages": config.num_stages}
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(device):  # Triton launches on the current device, whatever the tensors say
            kernel[tuple(grid)](*arguments, **options)
    else:
        kernel[tuple(grid)](*arguments, **options)
