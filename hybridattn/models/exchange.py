"""Slabs that CPU rows live in between layers: residuals on the GPU side, q, k, v and outputs on both sides.

A cohort owns one contiguous range of slots from its launch to its end, so each of its copies is one contiguous run:

    GPU side   residual | q k v | out          q k v --d2h--> q k v
    host side             q k v | out            out <--h2d-- out
"""

from __future__ import annotations

import torch

from hybridattn.core.device import Device
from hybridattn.core.shapes import ModelShape
from hybridattn.core.stages import CPU_TIER, GPU_TIER


class Rows:
    """q, k, v and attention output of ``capacity`` rows: ``[capacity, heads, head_dim]`` each."""

    def __init__(self, shape: ModelShape, capacity: int, dtype: torch.dtype) -> None:
        q_size = (capacity, shape.num_q_heads, shape.head_dim)
        kv_size = (capacity, shape.num_kv_heads, shape.head_dim)
        self.q, self.out = torch.zeros(q_size, dtype=dtype), torch.zeros(q_size, dtype=dtype)
        self.k, self.v = torch.zeros(kv_size, dtype=dtype), torch.zeros(kv_size, dtype=dtype)

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.q, self.out, self.k, self.v))


class Exchange:
    """The slabs of ``capacity`` CPU rows, and the staging area of chunked CPU-tier prefills.

    ``staging`` holds one layer's K and V of ``max_model_len`` tokens, ``[2, max_model_len, num_kv_heads, head_dim]``.
    """

    def __init__(
        self, device: Device, shape: ModelShape, capacity: int, max_model_len: int, dtype: torch.dtype
    ) -> None:
        self.residual = torch.zeros(capacity, shape.hidden_size, dtype=dtype)
        self.gpu, self.host = Rows(shape, capacity, dtype), Rows(shape, capacity, dtype)
        self.staging = torch.zeros(2, max_model_len, shape.num_kv_heads, shape.head_dim, dtype=dtype)
        on_gpu = self.residual.nbytes + self.gpu.num_bytes + self.staging.nbytes
        device.reserve(GPU_TIER, on_gpu, f"residual and exchange slabs of {capacity} rows with their staging area")
        device.reserve(CPU_TIER, self.host.num_bytes, f"exchange slabs of {capacity} rows")
