"""What differs between GPU tiers: where the GPU side lives, its pages, its attention, its linear stages, its copies.

``HostTier`` plays the GPU in host memory with the CPU kernels; ``CudaTier`` is a CUDA card with the Triton kernels.
``TorchStages`` is written once against this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from cpu_kernels import KVPages
from hybridattn.core.stages import Batch
from hybridattn.models.decoder import Decoder
from hybridattn.models.exchange import Exchange
from hybridattn.models.gpu_rows import GpuRows, PrefillRows
from hybridattn.models.sampling import SampleRow


class GpuTier(Protocol):
    """Methods that take tensors run inside ops; ``rows`` and ``to_device`` in the driver, before them."""

    decoder: Decoder
    cpu_pages: KVPages
    exchange: Exchange

    def release(self) -> None:
        """Give the pages' memory back, on both tiers, when nothing runs any more."""
        ...

    def to_device(self, values: np.ndarray) -> torch.Tensor:
        """A host array as a tensor of the GPU side."""
        ...

    def rows(self, batch: Batch) -> GpuRows:
        """Plan the GPU rows of a step."""
        ...

    def linear(self, layer: int, rows: GpuRows | None, slots: Sequence[slice]) -> Callable[[], None] | None:
        """An op's closure: post(layer) and pre(layer + 1) of the rows and the slots together, on the memory that they
        lie in, or of layer -1 embedding and pre(0); None: it takes ``decoder`` and their parts."""
        ...

    def layers(self, first: int, stop: int, rows: GpuRows) -> Callable[[], None] | None:
        """An op's closure: attention and ``linear`` of layers ``first`` to ``stop - 1`` of the rows; None: they go one
        by one."""
        ...

    def keeps_tokens(self, rows: GpuRows) -> bool:
        """Whether the tokens that are sampled for these rows stay where the next step's ``rows`` finds them."""
        ...

    def sampled(self, logits: torch.Tensor, rows: list[SampleRow]) -> Any:
        """A token id or a fault for each row, or a ``Deferred`` of them."""
        ...

    def load_kv(self, layer: int, blocks: np.ndarray, count: int) -> Callable[[], None]:
        """An op's closure: K,V of the first ``count`` tokens of these CPU pages go up into the staging area."""
        ...

    def offload_kv(self, layer: int, rows: GpuRows, chunk: PrefillRows) -> Callable[[], None]:
        """An op's closure: K,V of a chunk go down into its CPU pages."""
        ...

    def move(self, source: str, gpu_blocks: np.ndarray, cpu_blocks: np.ndarray) -> Callable[[], None]:
        """An op's closure: whole pages of all layers go from the ``source`` tier to the other, bit for bit.

        ``gpu_blocks[i]`` and ``cpu_blocks[i]`` (int64) are one page. Slots of the last page behind the request's
        tokens come along, whatever they hold: nobody reads them.
        """
        ...
