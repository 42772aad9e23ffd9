"""Memory for many tensors that live as long as one another, such as a model's weights."""

from __future__ import annotations

import math

import torch

from cpu_kernels.memory import allocate

_PIECE_BYTES = 64 << 20
_ALIGN = 64


class Arena:
    """Tensors of a device; on the CPU cut from large pieces, which huge pages suit: a step reads all weights, and with
    small pages it waits for their addresses too."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._piece = torch.empty(0, dtype=torch.uint8)

    def empty(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised."""
        if torch.device(self.device).type != "cpu":
            return torch.empty(size, dtype=dtype, device=self.device)
        count = math.prod(size) * dtype.itemsize
        taken = -(-count // _ALIGN) * _ALIGN
        if taken > len(self._piece):
            self._piece = torch.from_numpy(allocate(max(taken, _PIECE_BYTES), "a model's weights", touch=False))
        out, self._piece = self._piece[:count], self._piece[taken:]
        return out.view(dtype).view(size)
