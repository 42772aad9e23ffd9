"""The GPU tier of the host device: memory and kernels of the CPU that play the GPU's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from cpu_kernels import KVPages, append_kv, copy_pages, gather_kv, plan_decode
from hybridattn.core.config import EngineConfig
from hybridattn.core.device import Device
from hybridattn.core.stages import CPU_TIER, GPU_TIER, Batch, RowFault
from hybridattn.kv.storage import open_pages
from hybridattn.models.config import DecoderConfig
from hybridattn.models.decoder import Decoder
from hybridattn.models.exchange import Exchange
from hybridattn.models.gpu_rows import GpuRows, PrefillRows, decode_tables
from hybridattn.models.load import LoadedModel
from hybridattn.models.prefill import causal_attention
from hybridattn.models.sampling import SampleRow, sample_each


class HostTier:
    """Pages of both tiers in the CPU's layout, or those of the CPU tier in the one its back end reads.

    ``staging`` holds one layer's K and V of ``max_model_len`` tokens, ``[2, max_model_len, num_kv_heads, head_dim]``,
    for chunked prefills of CPU-tier requests.
    """

    def __init__(
        self,
        model: LoadedModel,
        device: Device,
        config: EngineConfig,
        kv_dtype: str,
        sm_scale: float,
        cpu_order: str = "tiles",
    ) -> None:
        shape, dtype = model.config.shape, model.weights.dtype
        self.decoder = Decoder(model.config, model.weights, config.max_model_len)
        self._config, self._page_size, self._sm_scale = model.config, config.page_size, sm_scale
        blocks = {GPU_TIER: config.gpu_kv_blocks, CPU_TIER: config.cpu_kv_blocks}
        pages = open_pages(device, shape, kv_dtype, config.page_size, blocks, cpu_order)
        self._pages, self.cpu_pages = pages[GPU_TIER], pages[CPU_TIER]
        self.exchange = Exchange(device, shape, config.max_num_seqs, dtype)
        self._staging = torch.zeros(2, config.max_model_len, shape.num_kv_heads, shape.head_dim, dtype=dtype)
        device.reserve(GPU_TIER, self._staging.nbytes, f"a staging area of {config.max_model_len} tokens")

    def release(self) -> None:
        self._pages.release()
        self.cpu_pages.release()

    def to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values)

    def rows(self, batch: Batch) -> GpuRows:
        return HostRows(batch, self._pages, self._config, self._page_size, self._sm_scale, self._staging)

    def linear(self, layer: int, rows: GpuRows | None, slots: Sequence[slice]) -> None:
        return None

    def layers(self, first: int, stop: int, rows: GpuRows) -> None:
        return None

    def keeps_tokens(self, rows: GpuRows) -> bool:
        return False

    def sampled(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[int | RowFault]:
        return sample_each(logits, rows)

    def load_kv(self, layer: int, blocks: np.ndarray, count: int) -> Callable[[], None]:
        pages, staging = self.cpu_pages, self._staging
        return lambda: gather_kv(pages, layer, blocks, count, staging[0, :count], staging[1, :count])

    def offload_kv(self, layer: int, rows: GpuRows, chunk: PrefillRows) -> Callable[[], None]:
        pages = self.cpu_pages
        return lambda: append_kv(pages, layer, *rows.take_kv(layer, chunk), chunk.slot_mapping)

    def move(self, source: str, gpu_blocks: np.ndarray, cpu_blocks: np.ndarray) -> Callable[[], None]:
        there, here = (self._pages, gpu_blocks), (self.cpu_pages, cpu_blocks)
        ways = (*there, *here) if source == GPU_TIER else (*here, *there)
        return lambda: copy_pages(*ways)


class HostRows(GpuRows):
    """GPU rows that attend with the CPU kernels (decode) and torch (prefill)."""

    def __init__(
        self,
        batch: Batch,
        pages: KVPages,
        config: DecoderConfig,
        page_size: int,
        sm_scale: float,
        staging: torch.Tensor,
    ) -> None:
        super().__init__(batch, page_size, torch.from_numpy)
        self._config, self._pages, self._sm_scale, self._staging = config, pages, sm_scale, staging
        self._plans = self._plan_decodes(page_size)

    def _plan_decodes(self, page_size: int) -> dict:
        """One plan per window that the model's layers have; each serves all layers with that window."""
        if not self.decodes:
            return {}
        table, lens, mapping, first = decode_tables(self.decodes, page_size)
        return {
            window: plan_decode(
                self._pages, table, lens, self._config.shape.num_q_heads, sm_scale=self._sm_scale,
                window_left=-1 if window is None else window - 1, slot_mapping=mapping, key_start=first,
            )
            for window in set(self._config.layer_windows)
        }  # fmt: skip

    def attend(self, layer: int) -> None:
        self.out = torch.empty_like(self.q)
        n = self.num_decodes
        if n:
            plan = self._plans[self._config.layer_windows[layer]]
            self.lse = torch.empty(self.q[:n].shape[:2])
            lse = self.lse if self.num_split else None
            plan.run(self.q[:n], self.out[:n], lse, layer=layer, k_new=self.k[:n], v_new=self.v[:n])
        for chunk in self.prefills:
            k, v = self._keys(chunk, layer)
            window = self._config.layer_windows[layer]
            self.out[chunk.rows] = causal_attention(self.q[chunk.rows], k, v, chunk.start, self._sm_scale, window)

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """As ``cpu_kernels.merge_state``, which takes ten times as long for a few rows, with checks at every layer."""
        hot, hot_lse = self.hot_part()
        share = torch.exp(lse - torch.logaddexp(hot_lse, lse)).nan_to_num(0.0)  # 0 / 0: both parts are empty
        hot.copy_(torch.lerp(hot.float(), out.float(), share[..., None]))

    def _keys(self, chunk: PrefillRows, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K,V of a chunk and of the tokens before it, ``[start + count, num_kv_heads, head_dim]`` each."""
        k, v = self.k[chunk.rows], self.v[chunk.rows]
        if chunk.tier == GPU_TIER:
            append_kv(self._pages, layer, k, v, chunk.slot_mapping)
        if chunk.start == 0:
            return k, v
        loaded = chunk.start
        if chunk.tier == GPU_TIER:
            loaded, count = chunk.cold, chunk.end - chunk.cold
            k, v = (torch.empty(count, *t.shape[1:], dtype=t.dtype) for t in (k, v))
            gather_kv(self._pages, layer, chunk.blocks, count, k, v)
        staging = self._staging
        return torch.cat([staging[0, :loaded], k]), torch.cat([staging[1, :loaded], v])
