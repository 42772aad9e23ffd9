"""Every kind of work of a card's tier once, before the first step: or a kernel is compiled while requests wait.

Triton compiles a kernel at the first launch with arguments of a kind, for about a second. Which kinds there are depends
on the model, and on what comes: a sequence in several parts, a prompt of either tier, one that begins inside a page,
pages that move. What is written here goes to the first page of each tier, before anybody has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hybridattn.core.config import EngineConfig
from hybridattn.core.page_table import CPU_TIER, GPU_TIER, PageTable
from hybridattn.core.params import SamplingParams
from hybridattn.core.stages import Batch, Segment
from hybridattn.kv.blocks import blocks_for
from hybridattn.models.gpu_rows import GpuRows
from hybridattn.models.sampling import SampleRow

_SAMPLED = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
_FIRST = np.zeros(1, np.int64)


@dataclass(slots=True)
class _Rehearsal:
    """A request whose pages are all the first one of its tier."""

    request_id: str
    token_ids: list[int]
    pages: PageTable
    tier: str
    num_prompt: int = 1
    params: Any = _SAMPLED


def warm_up(tier: Any, config: EngineConfig) -> None:
    """Enqueue all that a step of ``tier`` (a ``CudaTier``) may need; on the current stream."""
    for start in dict.fromkeys((0, config.max_model_len - 1)):
        chunks = [_segment(name, start, config, prefill=True) for name in (GPU_TIER, CPU_TIER)]
        rows = tier.rows(Batch((_segment(GPU_TIER, start, config, prefill=False), *chunks)))
        rows.write()
        _linear(tier, rows)
        rows.attend(0)
        rows.num_split = 1
        rows.merge(torch.zeros_like(rows.out[:1]), torch.zeros_like(rows.lse[:1]))
        rows.kv[0] = rows.k, rows.v
        down = rows.prefills[-1]
        tier.load_kv(0, down.blocks, start)()
        tier.offload_kv(0, rows, down)()
    for source in (GPU_TIER, CPU_TIER):
        tier.move(source, _FIRST, _FIRST)()


def _segment(tier: str, start: int, config: EngineConfig, *, prefill: bool) -> Segment:
    pages = [0] * blocks_for(start + 1, config.page_size)
    table = PageTable(hot=pages) if tier == GPU_TIER else PageTable(cold=pages)
    name = f"warm-up {tier}{' prompt' * prefill}"
    return Segment(_Rehearsal(name, [0] * (start + 1), table, tier), tier, start, 1, True, prefill)


def _linear(tier: Any, rows: GpuRows) -> None:
    """The first and the last linear stage, and the choice of tokens; leaves q, k, v of layer 0."""
    decoder = tier.decoder
    x = decoder.embed(rows.tokens)
    rows.q, rows.k, rows.v = decoder.pre_attention(0, x, rows.positions)
    rows.v = rows.v.contiguous()
    out = torch.zeros_like(rows.q)
    last = decoder.post_attention(decoder.shape.num_layers - 1, out, x.clone())
    logits = decoder.head(last[rows.sampled])
    for params in (SamplingParams(), _SAMPLED):
        tier.sampled(logits, [SampleRow(params, 0, 0)] * len(logits))
