"""Slabs that CPU rows live in between layers: residuals on the GPU side, q, k, v and outputs on both sides.

A micro-batch owns one contiguous range of slots from its dispatch to its end, so each of its copies is one contiguous
run. The host side has two halves that layers take in turn: while the copy of one layer lies ready in one, the other
still belongs to whoever reads the layer before. On the GPU side rows of a step may lie before the slots, in the same
memory, and one row behind them belongs to nobody.

    GPU side   ids | residual | q k v | out        q k v --d2h--> q k v of half l % 2
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
_MOST_CUT = 256  # ranges of slots of which the parts are kept


class Rows:
    """q, k, v ``[capacity, heads, head_dim]``, side by side in each row, and attention output of ``capacity`` rows."""

    def __init__(self, qkv: torch.Tensor, out: torch.Tensor) -> None:
        heads, kv_heads = out.shape[1], (qkv.shape[1] - out.shape[1]) // 2
        self.qkv, self.out = qkv, out
        self.q, self.k, self.v = qkv.split((heads, kv_heads, kv_heads), dim=1)

    @classmethod
    def zeros(cls, shape: ModelShape, capacity: int, dtype: torch.dtype, device: str = "cpu") -> Rows:
        heads, kv_heads = shape.num_q_heads, shape.num_kv_heads
        sizes = (capacity, heads + 2 * kv_heads, shape.head_dim), (capacity, heads, shape.head_dim)
        return cls(*(torch.zeros(size, dtype=dtype, device=device) for size in sizes))

    def part(self, where: slice) -> Rows:
        """The same memory, of some rows."""
        return Rows(self.qkv[where], self.out[where])

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
    front : int
        Rows of the GPU side before the slots.

    Attributes
    ----------
    tokens, positions, residual, gpu : of the slots, on the GPU side
    all_ids, all_residual, all_rows : the whole memory of these, ``front + capacity + 1`` rows
    """

    def __init__(
        self,
        device: Device,
        shape: ModelShape,
        capacity: int,
        dtype: torch.dtype,
        torch_device: str = "cpu",
        pin: Callable[[torch.Tensor], None] | None = None,
        front: int = 0,
    ) -> None:
        self.front = front
        total, slots = front + capacity + 1, slice(front, front + capacity)
        self.all_ids = torch.zeros(2, total, dtype=torch.int64, device=torch_device)
        self.all_residual = torch.zeros(total, shape.hidden_size, dtype=dtype, device=torch_device)
        self.all_rows = Rows.zeros(shape, total, dtype, torch_device)
        self.tokens, self.positions = self.all_ids[:, slots]
        self.residual, self.gpu = self.all_residual[slots], self.all_rows.part(slots)
        self._cut: dict[tuple[int, int, int], tuple[Rows, Rows]] = {}
        self._host = tuple(Rows.zeros(shape, capacity, dtype) for _ in range(HALVES))
        self.cold = cold = ColdParts(shape, capacity, dtype, torch_device)
        on_gpu = self.all_ids.nbytes + self.all_residual.nbytes + self.all_rows.num_bytes
        on_gpu += cold.up.nbytes + cold.lse_up.nbytes
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
        host, gpu = self._parts(layer, where)
        host.qkv.copy_(gpu.qkv, non_blocking=True)

    def fetch_output(self, layer: int, where: slice) -> None:
        """The attention output of the slots goes up."""
        host, gpu = self._parts(layer, where)
        gpu.out.copy_(host.out, non_blocking=True)

    def _parts(self, layer: int, where: slice) -> tuple[Rows, Rows]:
        """Both sides of some slots, which are cut once for all layers of a micro-batch."""
        key = layer % HALVES, where.start, where.stop
        found = self._cut.get(key)
        if found is None:
            if len(self._cut) == _MOST_CUT:
                self._cut.clear()
            found = self._cut[key] = self.host(layer).part(where), self.gpu.part(where)
        return found
