"""Pages on their way between a card and the CPU tier: whole pages, in the CPU's layout on both sides of the bus.

    hand down   append: rows -> scratch pages | pack: -> blocks | copies: blocks -> CPU pages, one per run of pages
    pull        copies: CPU pages -> blocks | unpack: -> staging pages
    move        one launch for all layers, straight from pool to pool (``gpu_kernels.copy_down``); where the CPU's pool
                is not page-locked the same two ways as above, with pages of the tier itself for scratch and staging

A chunk that begins inside a page brings that page up first, or the copy would overwrite the tokens before it.
Everything of one direction is enqueued on one stream, so each step finds the one before done and the next use of the
same scratch comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import gpu_kernels
from cpu_kernels import KVPages
from hybridattn.kv.cuda_pages import CudaPages


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive CPU pages ``cpu .. cpu + count - 1`` that lie at ``at ..`` among the blocks."""

    at: int
    cpu: int
    count: int


def runs_of(pages: np.ndarray) -> tuple[Run, ...]:
    """Page numbers in order of position, as runs of consecutive ones."""
    edges = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    return tuple(Run(a, int(pages[a]), b - a) for a, b in zip(edges, edges[1:], strict=False) if b > a)


class Blocks:
    """Room for ``num_pages`` pages of one layer in the CPU's layout on the card, and page-shaped scratch for as many.

    Parameters
    ----------
    cpu_pages : KVPages
        The CPU tier; pinned, or the copies wait.
    scratch : CudaPages
        One layer, at least ``num_pages`` pages.
    """

    def __init__(self, cpu_pages: KVPages, scratch: CudaPages, num_pages: int, device: str) -> None:
        self.scratch = scratch
        self.cpu = torch.from_numpy(cpu_pages.buffer)  # uint8 [layers, pages, num_kv_heads, head_bytes]
        self._blocks = torch.empty(num_pages, *self.cpu.shape[2:], dtype=torch.uint8, device=device)
        self._ids = torch.arange(num_pages, device=device)
        self.num_pages = num_pages

    @property
    def nbytes(self) -> int:
        return self._blocks.nbytes + self._ids.nbytes

    def up(self, layer: int, runs: tuple[Run, ...], count: int) -> None:
        """CPU pages -> the first ``count`` scratch pages."""
        self._lift(layer, runs, self.scratch, 0, self._ids[:count])

    def down(self, layer: int, runs: tuple[Run, ...], count: int) -> None:
        """The first ``count`` scratch pages -> CPU pages."""
        self._lower(layer, runs, self.scratch, 0, self._ids[:count])

    def lift(self, layer: int, runs: tuple[Run, ...], pages: CudaPages, ids: torch.Tensor) -> None:
        """CPU pages -> pages ``ids`` (int64, at most ``num_pages``) of the same layer of the card's pool."""
        self._lift(layer, runs, pages, layer, ids)

    def lower(self, layer: int, runs: tuple[Run, ...], pages: CudaPages, ids: torch.Tensor) -> None:
        """Pages ``ids`` of a layer of the card's pool -> CPU pages."""
        self._lower(layer, runs, pages, layer, ids)

    def _lift(self, layer: int, runs: tuple[Run, ...], pages: CudaPages, at: int, ids: torch.Tensor) -> None:
        for run in runs:
            source = self.cpu[layer, run.cpu : run.cpu + run.count]
            self._blocks[run.at : run.at + run.count].copy_(source, non_blocking=True)
        k, v = pages.cache(at)
        gpu_kernels.unpack_from_cpu(self._blocks[: len(ids)], k, v, ids, check_ids=False, **pages.scales(at))

    def _lower(self, layer: int, runs: tuple[Run, ...], pages: CudaPages, at: int, ids: torch.Tensor) -> None:
        k, v = pages.cache(at)
        gpu_kernels.pack_for_cpu(k, v, ids, self._blocks[: len(ids)], check_ids=False, **pages.scales(at))
        for run in runs:
            target = self.cpu[layer, run.cpu : run.cpu + run.count]
            target.copy_(self._blocks[run.at : run.at + run.count], non_blocking=True)
