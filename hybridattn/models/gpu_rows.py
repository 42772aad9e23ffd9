"""The GPU rows of one pass: their tokens, tables and plans, and what flows between the pass's ops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cpu_kernels import KVPages, append_kv, gather_kv, plan_decode
from hybridattn.core.stages import CPU_TIER, GPU_TIER, Batch
from hybridattn.kv.tables import block_table, slots
from hybridattn.models.config import DecoderConfig
from hybridattn.models.prefill import causal_attention


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """One prompt chunk: rows ``first .. first + count - 1`` of the pass, at positions ``start ..``."""

    first: int
    count: int
    start: int
    tier: str
    blocks: np.ndarray  # int64 pages, in order of position
    slot_mapping: np.ndarray  # int64, of its own tokens

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)


class GpuRows:
    """Decode rows first, then prompt chunks; ``x``, ``q``, ``k``, ``v``, ``out`` are replaced by each op in turn.

    ``kv[layer]`` keeps the K,V of a layer until the chunk of a CPU-tier prefill has been handed down.
    """

    def __init__(self, batch: Batch, pages: KVPages, config: DecoderConfig, page_size: int, sm_scale: float) -> None:
        self.config = config
        self.sm_scale = sm_scale
        self.pages = pages
        segments = batch.segments
        self.tokens = torch.tensor([t for s in segments for t in s.request.token_ids[s.start : s.start + s.num_tokens]])
        self.positions = torch.cat([torch.arange(s.start, s.start + s.num_tokens) for s in segments])
        ends = np.cumsum([s.num_tokens for s in segments])
        self.sampled = torch.tensor(
            [e - 1 for e, s in zip(ends, segments, strict=True) if s.samples], dtype=torch.int64
        )
        decodes = [s for s in segments if not s.prefill]
        self.num_decodes = len(decodes)
        self.decode_plans = self._plan_decodes(decodes, page_size)
        self.prefills = [
            PrefillRows(
                int(end) - s.num_tokens, s.num_tokens, s.start, s.tier, np.asarray(s.request.blocks, np.int64),
                slots(s.request.blocks, s.start, s.num_tokens, page_size),
            )
            for end, s in zip(ends, segments, strict=True)
            if s.prefill
        ]  # fmt: skip
        names = [s.request.request_id for s in segments if s.prefill]
        self.chunk_of = dict(zip(names, self.prefills, strict=True))
        self.last_handed_down = next((c for c in reversed(self.prefills) if c.tier == CPU_TIER), None)
        self.x = self.q = self.k = self.v = self.out = torch.empty(0)
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _plan_decodes(self, decodes: list, page_size: int) -> dict:
        """One plan per window that the model's layers have; each serves all layers with that window."""
        if not decodes:
            return {}
        table = block_table([s.request.blocks for s in decodes])
        lens = np.array([s.start + 1 for s in decodes], np.int32)
        mapping = np.array([slots(s.request.blocks, s.start, 1, page_size)[0] for s in decodes], np.int64)
        return {
            window: plan_decode(
                self.pages, table, lens, self.config.shape.num_q_heads, sm_scale=self.sm_scale,
                window_left=-1 if window is None else window - 1, slot_mapping=mapping,
            )
            for window in set(self.config.layer_windows)
        }  # fmt: skip

    def attend(self, layer: int, staging: torch.Tensor) -> None:
        """Write the K,V of GPU-tier rows and attend; the result is ``out``."""
        self.out = torch.empty_like(self.q)
        n = self.num_decodes
        if n:
            plan = self.decode_plans[self.config.layer_windows[layer]]
            plan.run(self.q[:n], self.out[:n], layer=layer, k_new=self.k[:n], v_new=self.v[:n])
        for chunk in self.prefills:
            k, v = self._keys(chunk, layer, staging)
            window = self.config.layer_windows[layer]
            self.out[chunk.rows] = causal_attention(self.q[chunk.rows], k, v, chunk.start, self.sm_scale, window)

    def _keys(self, chunk: PrefillRows, layer: int, staging: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K,V of a chunk and of the tokens before it, ``[start + count, num_kv_heads, head_dim]`` each."""
        k, v = self.k[chunk.rows], self.v[chunk.rows]
        if chunk.tier == GPU_TIER:
            append_kv(self.pages, layer, k, v, chunk.slot_mapping)
        if chunk.start == 0:
            return k, v
        if chunk.tier != GPU_TIER:
            return torch.cat([staging[0, : chunk.start], k]), torch.cat([staging[1, : chunk.start], v])
        total = chunk.start + chunk.count
        k, v = (torch.empty(total, *t.shape[1:], dtype=t.dtype) for t in (k, v))
        gather_kv(self.pages, layer, chunk.blocks, total, k, v)
        return k, v
