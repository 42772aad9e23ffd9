"""The GPU rows of one step: their tokens and positions, and what flows between the step's ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hybridattn.core.stages import CPU_TIER, Batch, Segment
from hybridattn.kv.tables import block_table, slots


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """One prompt chunk: rows ``first .. first + count - 1`` of the step, at positions ``start ..``."""

    first: int
    count: int
    start: int
    tier: str
    blocks: np.ndarray  # int64 pages of that tier, in order of position
    slot_mapping: np.ndarray  # int64, of its own tokens
    cold: int  # tokens before those of ``blocks``

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)

    @property
    def end(self) -> int:
        """Tokens up to and with this chunk."""
        return self.start + self.count


class GpuRows:
    """Decode rows first, the ``num_split`` split ones in front, then prompt chunks; ``x``, ``q``, ``k``, ``v``, ``out``
    are replaced by each op in turn, and ``lse`` where there are split rows, whose hot part ``out`` is until the merge.

    ``sampled`` are the rows whose token is wanted, None for all. ``kv[layer]`` keeps the K,V of a layer until the chunk
    of a CPU-tier prefill has been handed down. How the rows attend is the GPU tier's business: it derives a class of
    its own.
    """

    def __init__(self, batch: Batch, page_size: int, to_device: Callable[[np.ndarray], torch.Tensor]) -> None:
        segments = batch.segments
        tokens = [t for s in segments for t in s.request.token_ids[s.start : s.start + s.num_tokens]]
        self.tokens = to_device(np.asarray(tokens, np.int64))
        self.positions = to_device(np.concatenate([np.arange(s.start, s.start + s.num_tokens) for s in segments]))
        ends = np.cumsum([s.num_tokens for s in segments])
        self.sampled: torch.Tensor | None = to_device(
            np.asarray([e - 1 for e, s in zip(ends, segments, strict=True) if s.samples], np.int64)
        )
        self.decodes = [s for s in segments if not s.prefill]
        self.num_decodes, self.num_split = len(self.decodes), len(batch.split)
        self.prefills = [
            PrefillRows(
                int(end) - s.num_tokens, s.num_tokens, s.start, s.tier,
                np.asarray(s.request.pages.on(s.tier), np.int64),
                slots(s.request.pages.on(s.tier), s.start - s.cold, s.num_tokens, page_size),
                s.cold,
            )
            for end, s in zip(ends, segments, strict=True)
            if s.prefill
        ]  # fmt: skip
        names = [s.request.request_id for s in segments if s.prefill]
        self.chunk_of = dict(zip(names, self.prefills, strict=True))
        self.last_handed_down = next((c for c in reversed(self.prefills) if c.tier == CPU_TIER), None)
        self.x = self.q = self.k = self.v = self.out = self.lse = torch.empty(0)
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self) -> None:
        """Bring what the GPU keeps of the rows up to date: the first that an op of the step does."""

    def store(self, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """What a linear stage made of the rows."""
        self.x, self.q, self.k, self.v = x, q, k, v.contiguous()

    def take_kv(self, layer: int, chunk: PrefillRows) -> tuple[torch.Tensor, torch.Tensor]:
        """K,V of a chunk to hand down; the last chunk of the step lets go of the layer's."""
        k, v = self.kv.pop(layer) if chunk is self.last_handed_down else self.kv[layer]
        return k[chunk.rows], v[chunk.rows]

    def attend(self, layer: int) -> None:
        """Write the K,V of GPU-tier rows and attend; the result is ``out``, and ``lse`` where there are split rows."""
        raise NotImplementedError

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """The cold parts of the split rows, ``[num_split, num_q_heads, head_dim]`` and their lse, enter ``out``."""
        raise NotImplementedError

    def hot_part(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``out`` and ``lse`` of the split rows."""
        return self.out[: self.num_split], self.lse[: self.num_split]


def decode_tables(decodes: list[Segment], page_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What decode rows attend to on the GPU: block table int32 ``[n, max_pages]``, keys int32 ``[n]`` with the new
    token, its slots int64 ``[n]``, and the positions int64 ``[n]`` of the first keys."""
    table = block_table([s.request.pages.hot for s in decodes])
    lens = np.array([s.start + 1 - s.hot_from for s in decodes], np.int32)
    mapping = np.array([slots(s.request.pages.hot, s.start - s.hot_from, 1, page_size)[0] for s in decodes], np.int64)
    return table, lens, mapping, np.array([s.hot_from for s in decodes], np.int64)
