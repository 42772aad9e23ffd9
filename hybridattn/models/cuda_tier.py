"""The GPU tier on a CUDA card: Triton attention, fused stages, graphs, and pages that travel in the CPU's layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

import gpu_kernels
from cpu_kernels import KVPages
from hybridattn.core.config import EngineConfig
from hybridattn.core.deferred import Deferred
from hybridattn.core.errors import InputError
from hybridattn.core.op import GPU
from hybridattn.core.stages import CPU_TIER, GPU_TIER, Batch
from hybridattn.cost.here import decode_tile
from hybridattn.kv.cpu_blocks import Blocks, runs_of
from hybridattn.kv.cuda_pages import SCALED, TORCH_DTYPES, CudaPages, page_bytes
from hybridattn.models.card_sampling import choose, tokens_of, working_bytes
from hybridattn.models.cuda_rows import CudaRows, ResidentStep, Staging
from hybridattn.models.exchange import Exchange
from hybridattn.models.fused_decoder import FusedDecoder
from hybridattn.models.gpu_rows import GpuRows, PrefillRows
from hybridattn.models.layer_stages import LayerStages, buckets_for
from hybridattn.models.load import LoadedModel
from hybridattn.models.sampling import SampleRow
from hybridattn.models.warm_up import warm_up


class CudaTier:
    """Everything of a model that lives on the card, booked on the device before it is allocated.

    Raises
    ------
    InputError
        A KV dtype that the kernels do not take beside these weights, bf16 on a card without it, too little memory.
    """

    def __init__(
        self,
        model: LoadedModel,
        device: Any,
        config: EngineConfig,
        kv_dtype: str,
        sm_scale: float,
        cpu_order: str = "tiles",
    ) -> None:
        if cpu_order != "tiles":
            raise InputError(
                f"backend: it reads CPU pages of layout {cpu_order!r}, and a card fills pages of layout 'tiles' only; "
                "use device 'host', or backend 'native'"
            )
        shape, self._dtype = model.config.shape, model.weights.dtype
        _check_dtypes(self._dtype, kv_dtype, model.weights.device)
        self._device, self._config, self._sm_scale = device, model.config, sm_scale
        self._on, self._page_size = device.torch_device, config.page_size
        self._shape, self._kv_dtype = shape, kv_dtype
        device.reserve_weights(model.weights.num_bytes())
        device.runtime.synchronize()  # the weights were written by another stream
        with device.on(GPU):
            self.decoder = FusedDecoder(model.config, model.weights, config.max_model_len)
            self._pages = self._new_pages(shape.num_layers, max(1, config.gpu_kv_blocks), "a KV pool")
            self.cpu_pages = self._open_cpu_pages(max(1, config.cpu_kv_blocks))
            pin = self._pin if self._pins else None
            capacity = config.max_num_seqs
            front = max(capacity, *buckets_for(capacity))
            self.exchange = Exchange(device, shape, capacity, self._dtype, self._on, pin, front)
            self._open_moves(config)
        rows = config.max_num_batched_tokens
        device.reserve(GPU_TIER, self._activation_bytes(rows, config.max_num_seqs), f"activations of {rows} rows")
        with device.on(GPU):
            self.stages = self._open_stages(config)
            self._sampled = torch.zeros(front, dtype=torch.int64, device=self._on)  # the latest ids
            warm_up(self, config)
        device.runtime.synchronize()  # what was made here is used by the copy streams too

    def _new_pages(self, num_layers: int, count: int, what: str) -> CudaPages:
        s = self._shape
        need = num_layers * count * page_bytes(s.num_kv_heads, self._page_size, s.head_dim, self._kv_dtype)
        self._device.reserve(GPU_TIER, need, f"{what} of {count} blocks of {self._page_size} tokens")
        return CudaPages(num_layers, count, s.num_kv_heads, self._page_size, s.head_dim, self._kv_dtype, self._on)

    def _open_cpu_pages(self, count: int) -> KVPages:
        s, device = self._shape, self._device
        need = s.num_layers * count * page_bytes(s.num_kv_heads, self._page_size, s.head_dim, self._kv_dtype)
        device.reserve(CPU_TIER, need, f"a KV pool of {count} blocks of {self._page_size} tokens")
        pages = KVPages(
            count, s.num_kv_heads, s.head_dim, self._page_size, self._kv_dtype, num_layers=s.num_layers,
            cpus=device.cores.pool,
        )  # fmt: skip
        self._pins = device.pin(pages, pages.buffer.ctypes.data, pages.nbytes, "the CPU tier's KV pool")
        return pages

    def _pin(self, tensor: torch.Tensor) -> None:
        self._device.pin(tensor, tensor.data_ptr(), tensor.nbytes, "an exchange slab")

    def _open_moves(self, config: EngineConfig) -> None:
        """The staging area of CPU-tier prompts, and the blocks of both directions."""
        page = config.page_size
        long_pages = -(-config.max_model_len // page)
        short_pages = -(-config.max_num_batched_tokens // page) + config.max_num_seqs
        self._staging = Staging(self._new_pages(1, long_pages + short_pages, "a staging area"), long_pages)
        chunk_pages = -(-config.max_num_batched_tokens // page) + 1
        scratch = self._new_pages(1, chunk_pages, "scratch for handing down")
        room = (long_pages + chunk_pages) * self.cpu_pages.page_bytes
        self._device.reserve(GPU_TIER, room, f"blocks of {long_pages} + {chunk_pages} pages on their way")
        self._up = Blocks(self.cpu_pages, self._staging.pages, long_pages, self._on)
        self._down = Blocks(self.cpu_pages, scratch, chunk_pages, self._on)

    def _open_stages(self, config: EngineConfig) -> LayerStages:
        device = self._device
        stream, capture = device.stream(GPU), None
        if device.graphs:
            capture = lambda runs: device.runtime.capture(stream, runs)  # noqa: E731
        stages = LayerStages(
            self.decoder, self._pages, self.exchange, config.max_num_seqs, config.max_model_len, self._sm_scale,
            capture, self.to_device, self._pinned, decode_tile(device.profile),
        )  # fmt: skip
        device.reserve(GPU_TIER, stages.nbytes, "fixed memory of decode rows")
        return stages

    def _pinned(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=self._on != "cpu")

    def _activation_bytes(self, rows: int, sampled: int) -> int:
        """What one linear stage and the head hold at a time: not kept by us, but needed by every step."""
        s, size = self._shape, self._dtype.itemsize
        qkv = (s.num_q_heads + 2 * s.num_kv_heads) * s.head_dim
        row = 4 * s.hidden_size + 3 * s.intermediate_size + 2 * qkv + 2 * s.num_q_heads * s.head_dim
        logits = s.vocab_size * (size + 4 + 8)  # in the weights' dtype, in float32, and the search for the largest
        return rows * row * size + sampled * logits + working_bytes(sampled, s.vocab_size)

    @property
    def why_eager(self) -> str | None:
        """Why decode rows run without CUDA graphs; None where they do not."""
        return self.stages.why_eager

    # -- the tier ----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        for pages in (self._pages, self._staging.pages, self.cpu_pages):
            pages.release()

    def to_device(self, values: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(values)
        if self._on == "cpu":
            return host
        with self._device.on(GPU):
            return host.pin_memory().to(self._on, non_blocking=True)

    def rows(self, batch: Batch) -> GpuRows:
        with self._device.on(GPU):
            if not batch.prefills and self.stages.bucket(batch.num_decodes) is not None:
                return ResidentStep(batch, self.stages, self.to_device, self._sampled)
            return CudaRows(
                batch, self._pages, self._staging, self.stages, self._config, self._dtype, self._sm_scale,
                self.to_device,
            )  # fmt: skip

    def linear(self, layer: int, rows: GpuRows | None, slots: Sequence[slice]) -> Callable[[], None] | None:
        if rows is None:
            return self.stages.joined(layer, 0, slots)
        if not isinstance(rows, ResidentStep):
            return None
        if slots:
            return self.stages.joined(layer, rows.num_decodes, slots)
        stage = self.stages.finish if layer >= 0 else lambda _, bucket: self.stages.first(bucket)
        return lambda: stage(layer, rows.bucket)

    def layers(self, first: int, stop: int, rows: GpuRows) -> Callable[[], None] | None:
        if self._device.records or not isinstance(rows, ResidentStep):
            return None  # a trace shows each layer
        return partial(self.stages.layers, first, stop, rows.bucket, rows.items)

    def keeps_tokens(self, rows: GpuRows) -> bool:
        return isinstance(rows, ResidentStep) and rows.sampled is None

    def sampled(self, logits: torch.Tensor, rows: list[SampleRow]) -> Deferred:
        """Chosen on the card: an id and two numbers of each row go down, no logit does. The ids stay there, too: that
        of a row without a token is some id that the vocabulary has."""
        chosen = choose(logits, rows, self.to_device)
        latest = chosen.ids[: len(self._sampled)]  # GPU rows first; behind them are those of micro-batches
        self._sampled[: len(latest)].copy_(latest.clamp(0, logits.shape[1] - 1))
        ids, top, allowed = (_read_back(t) for t in (chosen.ids, chosen.top, chosen.allowed))
        return Deferred(lambda: tokens_of(ids.tolist(), top.tolist(), allowed.tolist(), rows))

    def load_kv(self, layer: int, blocks: np.ndarray, count: int) -> Callable[[], None]:
        num_pages = -(-count // self._page_size)
        runs = runs_of(blocks[:num_pages])
        return lambda: self._up.up(layer, runs, num_pages)

    def offload_kv(self, layer: int, rows: GpuRows, chunk: PrefillRows) -> Callable[[], None]:
        assert isinstance(rows, CudaRows)
        way = rows.descents[id(chunk)]
        scratch = self._down.scratch

        def run() -> None:
            if way.shares_page:
                self._down.up(layer, (replace(way.runs[0], count=1),), 1)
            k, v = rows.take_kv(layer, chunk)
            _used_here(k, v)
            gpu_kernels.append_kv(k, v, *scratch.cache(), way.slots, check_ids=False, **scratch.scales())
            self._down.down(layer, way.runs, way.num_pages)

        return run

    def move(self, source: str, gpu_blocks: np.ndarray, cpu_blocks: np.ndarray) -> Callable[[], None]:
        if not self._pins:
            return self._move_by_copies(source, gpu_blocks, cpu_blocks)
        step = gpu_kernels.copy_up if source == CPU_TIER else gpu_kernels.copy_down
        host_ids, every = self._to_upload(np.stack((gpu_blocks, cpu_blocks))), slice(None)

        def run() -> None:
            here, there = host_ids.to(self._on, non_blocking=True)  # on the stream of the copy: nobody else waits
            step(*self._pages.cache(every), here, self._up.cpu, there, **self._pages.scales(every))

        return run

    def _move_by_copies(self, source: str, gpu_blocks: np.ndarray, cpu_blocks: np.ndarray) -> Callable[[], None]:
        """For pages that a kernel cannot reach: a copy for each run of pages and layer."""
        way = self._up if source == CPU_TIER else self._down
        step = way.lift if source == CPU_TIER else way.lower
        parts = []  # as many pages at a time as there is room for on the card
        for at in range(0, len(gpu_blocks), way.num_pages):
            part = slice(at, at + way.num_pages)
            parts.append((self._to_upload(gpu_blocks[part]), runs_of(cpu_blocks[part])))

        def run() -> None:
            for host_ids, runs in parts:
                ids = host_ids.to(self._on, non_blocking=True)  # on the stream of the copy: nobody else waits for it
                for layer in range(self._shape.num_layers):
                    step(layer, runs, self._pages, ids)

        return run

    def _to_upload(self, values: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(values.copy())
        return host if self._on == "cpu" else host.pin_memory()


def _check_dtypes(dtype: torch.dtype, kv_dtype: str, device: torch.device) -> None:
    if kv_dtype not in TORCH_DTYPES:
        raise InputError(f"kv_dtype '{kv_dtype}' is unknown; choose one of {', '.join(TORCH_DTYPES)}")
    if kv_dtype not in SCALED and TORCH_DTYPES[kv_dtype] is not dtype:
        others = " or ".join(SCALED)
        raise InputError(f"kv_dtype {kv_dtype} beside weights of {dtype}: on cuda K,V have their dtype, or {others}")
    try:
        gpu_kernels.capability_of(device).refuse_dtype("dtype", dtype)
    except ValueError as error:
        raise InputError(str(error)) from error


def _used_here(*tensors: torch.Tensor) -> None:
    """These came from another stream's memory: it may be given away again only after this stream has come by."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _read_back(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy that is valid once the op has ended."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
