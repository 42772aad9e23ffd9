"""The GPU rows of one step on a CUDA card: decode rows alone on fixed memory, or beside prompts, with Triton plans over
the tier's pages and over the staging area.

staging pages   | earlier tokens of the one chunked CPU-tier prompt, then its chunk | prompts that begin here ... |
                  0 ..                                                                ``Staging.long_pages`` ..

The chunk of a GPU-tier prompt with cold pages attends to its own tier's, then to the cold ones in the front of the
staging pages, and the parts are merged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import gpu_kernels
from hybridattn.core.errors import InputError
from hybridattn.core.stages import GPU_TIER, Batch
from hybridattn.kv.cpu_blocks import Run, runs_of
from hybridattn.kv.cuda_pages import CudaPages
from hybridattn.kv.tables import block_table
from hybridattn.models.config import DecoderConfig
from hybridattn.models.gpu_rows import GpuRows, PrefillRows
from hybridattn.models.layer_stages import LayerStages


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """One layer of pages for prompts whose K,V go to the CPU tier."""

    pages: CudaPages
    long_pages: int  # pages of the chunked prompt, which come first

    def __post_init__(self) -> None:
        if not 0 < self.long_pages < self.pages.num_pages:
            raise InputError(f"staging: long_pages {self.long_pages} of {self.pages.num_pages} pages")


@dataclass(frozen=True, slots=True, eq=False)
class Descent:
    """How a chunk goes down: its place in the scratch pages, and the CPU pages that they become."""

    slots: torch.Tensor  # int64 [count], in the scratch pages
    runs: tuple[Run, ...]
    num_pages: int
    shares_page: bool  # the first page holds earlier tokens


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Consecutive prompt chunks of one tier: one kernel launch per layer. A chunk with cold pages is a group of its
    own, with the plans of its ``cold_part``."""

    rows: slice
    pages: CudaPages
    layered: bool  # pages of all layers (the tier's), or of one (staging)
    plans: dict[int | None, gpu_kernels.PrefillPlan]  # by window
    cold_part: dict[int | None, gpu_kernels.PrefillPlan]


class CardRows(GpuRows):
    """What both kinds of rows have in common."""

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        hot = self.hot_part()
        gpu_kernels.merge_state(*hot, out, lse, *hot)


class ResidentStep(CardRows):
    """Decode rows alone: what they are and all that becomes of them lies on the fixed memory of ``stages``. Tokens that
    their requests do not have yet are among ``latest``, those that the rows planned before get."""

    def __init__(
        self, batch: Batch, stages: LayerStages, to_device: Callable[[np.ndarray], torch.Tensor], latest: torch.Tensor
    ) -> None:
        segments = batch.segments
        self.write, self._stages = stages.plan(segments, latest), stages  # type: ignore[method-assign]
        self.num_decodes, self.num_split = len(segments), len(batch.split)
        self.decodes, self.prefills, self.chunk_of, self.last_handed_down = list(segments), [], {}, None
        bucket = stages.bucket(self.num_decodes)
        assert bucket is not None
        self.bucket, self.items = bucket, stages.items(bucket)
        self.tokens, self.positions, self.x, self.q, self.k, self.v, self.out = stages.views(self.num_decodes)
        wanted = [i for i, s in enumerate(segments) if s.samples]
        self.sampled = None if len(wanted) == self.num_decodes else to_device(np.array(wanted, np.int64))
        self.lse, self.kv = stages.lse[: self.num_decodes], {}

    def store(self, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for mine, made in ((self.x, x), (self.q, q), (self.k, k), (self.v, v)):
            mine.copy_(made)

    def attend(self, layer: int) -> None:
        self._stages.attend(layer, self.bucket, self.items)


class CudaRows(CardRows):
    """Decode rows and prompts together, in memory of their own."""

    def __init__(
        self,
        batch: Batch,
        pages: CudaPages,
        staging: Staging,
        stages: LayerStages,
        config: DecoderConfig,
        dtype: torch.dtype,
        sm_scale: float,
        to_device: Callable[[np.ndarray], torch.Tensor],
    ) -> None:
        super().__init__(batch, pages.page_size, to_device)
        self._pages, self._staging, self._config, self._stages = pages, staging, config, stages
        self._dtype, self._sm_scale, self._to_device = dtype, sm_scale, to_device
        self._plans = self._plan_decodes()
        tables = self._staging_tables()
        self._groups = self._plan_prefills(tables)
        self._slots, self._staging_slots = self._slot_mappings(tables)
        self.descents = {id(c): self._descent(c) for c in self.prefills if c.tier != GPU_TIER}

    # -- planning ----------------------------------------------------------------------------------------------------

    def _options(self, window: int | None) -> dict:
        left = -1 if window is None else window - 1
        return {"q_dtype": self._dtype, "sm_scale": self._sm_scale, "window_left": left}

    def _plan_decodes(self) -> dict:
        if not self.decodes:
            return {}
        self.write = self._stages.plan(self.decodes)  # type: ignore[method-assign]
        n, stages = self.num_decodes, self._stages
        windows = set(self._config.layer_windows)
        return {window: stages.plan_of(window, n, stages.resident.num_parts(window, n)) for window in windows}

    def _staging_tables(self) -> dict[int, np.ndarray]:
        """Staging pages of each CPU-tier chunk, by chunk id: with earlier tokens the front, else behind one another."""
        tables, free = {}, self._staging.long_pages
        for chunk in self.prefills:
            if chunk.tier == GPU_TIER:
                continue
            count = -(-chunk.end // self._pages.page_size)
            first = 0 if chunk.start else free
            free += 0 if chunk.start else count
            tables[id(chunk)] = np.arange(first, first + count)
        return tables

    def _plan_prefills(self, tables: dict[int, np.ndarray]) -> tuple[Group, ...]:
        runs: list[list[PrefillRows]] = []
        for chunk in self.prefills:
            if not runs or runs[-1][0].tier != chunk.tier or chunk.cold or runs[-1][0].cold:
                runs.append([])
            runs[-1].append(chunk)
        return tuple(self._group(chunks, tables) for chunks in runs)

    def _group(self, chunks: list[PrefillRows], tables: dict[int, np.ndarray]) -> Group:
        on_gpu = chunks[0].tier == GPU_TIER
        pages = self._pages if on_gpu else self._staging.pages
        table = torch.from_numpy(block_table([(c.blocks if on_gpu else tables[id(c)]).tolist() for c in chunks]))
        starts = torch.tensor(np.cumsum([0, *(c.count for c in chunks)]), dtype=torch.int32)
        first = torch.tensor([c.cold for c in chunks])
        lens = torch.tensor([c.end - c.cold for c in chunks], dtype=torch.int32)
        plans = self._prefill_plans(pages, table, starts, lens, key_start=first)
        cold_part = {}
        if chunks[0].cold:
            table = torch.arange(chunks[0].cold // self._pages.page_size, dtype=torch.int32)[None]
            at = torch.tensor([chunks[0].start])
            cold_part = self._prefill_plans(self._staging.pages, table, starts, first.int(), query_pos=at)
        return Group(slice(chunks[0].first, chunks[-1].rows.stop), pages, on_gpu, plans, cold_part)

    def _prefill_plans(
        self, pages: CudaPages, table: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, **where: Any
    ) -> dict[int | None, gpu_kernels.PrefillPlan]:
        heads, (k, v) = self._config.shape.num_q_heads, pages.cache()
        return {
            w: gpu_kernels.plan_prefill(k, v, table, starts, lens, heads, **where, **self._options(w))
            for w in set(self._config.layer_windows)
        }

    def _slot_mappings(self, tables: dict[int, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where each row's K,V go: slots of the tier's pages, and of the staging pages (None: no row); -1: nowhere."""
        size, page = len(self.positions), self._pages.page_size
        in_tier, in_staging = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
        if self.decodes:
            in_tier[: self.num_decodes] = self._stages.resident.host_slots[: self.num_decodes]
        for chunk in self.prefills:
            if chunk.tier == GPU_TIER:
                in_tier[chunk.rows] = chunk.slot_mapping
            else:
                at = np.arange(chunk.start, chunk.end)
                in_staging[chunk.rows] = tables[id(chunk)][at // page] * page + at % page
        return self._to_device(in_tier), self._to_device(in_staging) if tables else None

    def _descent(self, chunk: PrefillRows) -> Descent:
        page = self._pages.page_size
        first, last = chunk.start // page, -(-chunk.end // page)
        at = np.arange(chunk.start, chunk.end) - first * page
        return Descent(self._to_device(at), runs_of(chunk.blocks[first:last]), last - first, chunk.start % page != 0)

    # -- running -----------------------------------------------------------------------------------------------------

    def attend(self, layer: int) -> None:
        window = self._config.layer_windows[layer]
        self.out = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        self._append(self._pages, layer, self._slots)
        if self._staging_slots is not None:
            self._append(self._staging.pages, 0, self._staging_slots)
        n = self.num_decodes
        if n:
            self.lse = self._stages.lse[:n]
            self._plans[window].run(
                self.q[:n], *self._pages.cache(layer), self.out[:n], self.lse[:n], workspace=self._stages.workspace,
                **self._pages.scales(layer),
            )  # fmt: skip
        for group in self._groups:
            at = layer if group.layered else 0
            q, staging = self.q[group.rows], self._staging.pages
            part = group.plans[window].run(q, *group.pages.cache(at), self.out[group.rows], **group.pages.scales(at))
            if group.cold_part:
                cold = group.cold_part[window].run(q, *staging.cache(), **staging.scales())
                gpu_kernels.merge_state(*part, *cold, *part)

    def _append(self, pages: CudaPages, layer: int, slots: torch.Tensor) -> None:
        gpu_kernels.append_kv(self.k, self.v, *pages.cache(layer), slots, check_ids=False, **pages.scales(layer))
