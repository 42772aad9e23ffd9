"""Slabs that CPU rows live in between layers: residuals on the GPU side, q, k, v and outputs on both sides.

A micro-batch owns one contiguous range of slots from its launch to its end, so each of its copies is one contiguous
run. The host side has two halves that layers take in turn: while the copy of one layer lies ready in one, the other
still belongs to whoever reads the layer before.

    GPU side   residual | q k v | out              q k v --d2h--> q k v of half l % 2
    host side  2 x (q k v | out)                     out <--h2d-- out   of half l % 2

Split rows have slabs of their own (``ColdParts``), which a layer has done with before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybridattn.core.device import Device
from hybridattn.core.shapes import ModelShape
from hybridattn.core.stages import CPU_TIER, GPU_TIER

HALVES = 2


class Rows:
    """q, k, v ``[capacity, heads, head_dim]``, side by side in each row, and attention output of ``capacity`` rows."""

    def __init__(self, shape: ModelShape, capacity: int, dtype: torch.dtype, device: str = "cpu") -> None:
        heads, kv_heads = shape.num_q_heads, shape.num_kv_heads
        self.qkv = torch.zeros(capacity, heads + 2 * kv_heads, shape.head_dim, dtype=dtype, device=device)
        self.q, self.k, self.v = self.qkv.split((heads, kv_heads, kv_heads), dim=1)
        self.out = torch.zeros(capacity, heads, shape.head_dim, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self.qkv.nbytes + self.out.nbytes


class ColdParts:
    """What split rows exchange at a layer: q goes down, and out and lse (float32 ``[capacity, num_q_heads]``) come up.

    ``q`` and ``out`` are ``[capacity, num_q_heads, head_dim]``; ``up`` and ``lse_up`` are out and lse on the GPU side.
    """

    def __init__(self, shape: ModelShape, capacity: int, dtype: torch.dtype, device: str) -> None:
        size = capacity, shape.num_q_heads, shape.head_dim
        self.q, self.out = torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)
        self.lse = torch.zeros(size[:2])
        self.up, self.lse_up = torch.zeros(size, dtype=dtype, device=device), torch.zeros(size[:2], device=device)

    def send_q(self, q: torch.Tensor) -> None:
        """q of the split rows, ``[n, num_q_heads, head_dim]``, goes down."""
        self.q[: len(q)].copy_(q, non_blocking=True)

    def fetch(self, n: int) -> None:
        """The parts of the first ``n`` rows go up."""
        self.up[:n].copy_(self.out[:n], non_blocking=True)
        self.lse_up[:n].copy_(self.lse[:n], non_blocking=True)


class Exchange:
    """The slabs of ``capacity`` CPU rows, and of as many split rows.

    Parameters
    ----------
    torch_device : str
        Where the GPU side lives.
    pin : callable, optional
        Called with each host-side tensor, to page-lock it.
    """

    def __init__(
        self,
        device: Device,
        shape: ModelShape,
        capacity: int,
        dtype: torch.dtype,
        torch_device: str = "cpu",
        pin: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.residual = torch.zeros(capacity, shape.hidden_size, dtype=dtype, device=torch_device)
        self.gpu = Rows(shape, capacity, dtype, torch_device)
        self._host = tuple(Rows(shape, capacity, dtype) for _ in range(HALVES))
        self.cold = cold = ColdParts(shape, capacity, dtype, torch_device)
        on_gpu = self.residual.nbytes + self.gpu.num_bytes + cold.up.nbytes + cold.lse_up.nbytes
        device.reserve(GPU_TIER, on_gpu, f"residual and exchange slabs of {capacity} rows")
        on_host = [t for h in self._host for t in (h.qkv, h.out)] + [cold.q, cold.out, cold.lse]
        device.reserve(CPU_TIER, sum(t.nbytes for t in on_host), f"exchange slabs of {capacity} rows")
        for tensor in on_host if pin is not None else ():
            pin(tensor)  # type: ignore[misc]

    def host(self, layer: int) -> Rows:
        """The host side that belongs to ``layer``."""
        return self._host[layer % HALVES]

    def send_qkv(self, layer: int, where: slice) -> None:
        """q, k, v of the slots go down."""
        self.host(layer).qkv[where].copy_(self.gpu.qkv[where], non_blocking=True)

    def fetch_output(self, layer: int, where: slice) -> None:
        """The attention output of the slots goes up."""
        self.gpu.out[where].copy_(self.host(layer).out[where], non_blocking=True)
