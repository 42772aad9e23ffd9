"""Whole layers of decode rows on fixed memory, as CUDA graphs or as calls that were checked and bound once.

    rows of the memory   | GPU rows of the step, padded to a bucket | slots of micro-batches | nobody's |
    attend(l), finish(l)   in place
    joined(l)              gathered by an index and put back, together with the slots that take part

Each stage is one graph per layer and bucket of rows (and of work items, where it attends); runs of ``BLOCK`` layers
have graphs of their own. Rows past those present compute what nobody reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

import gpu_kernels
from hybridattn.core.stages import Segment
from hybridattn.kv.cuda_pages import CudaPages
from hybridattn.models.config import DecoderConfig
from hybridattn.models.exchange import Exchange
from hybridattn.models.fused_decoder import FusedDecoder, Scratch
from hybridattn.models.resident_rows import ResidentRows

BUCKETS = (4, 8, 16, 32, 64, 96, 128, 192, 256)
BLOCK = 8
_MORE_ITEMS = 4  # from one bucket of work items to the next
_INDEXES = 256  # sets of rows whose index is kept
Run = Callable[[], None]
Capture = Callable[[Sequence[Run]], list[Run]]


def buckets_for(max_rows: int) -> tuple[int, ...]:
    """The buckets that decode rows of at most ``max_rows`` need."""
    needed = [b for b in BUCKETS if b < max_rows]
    return (*needed, *(b for b in BUCKETS[len(needed) : len(needed) + 1]))


class LayerStages:
    """Stages of up to ``max_rows`` decode rows and of micro-batches.

    Parameters
    ----------
    capture : callable, optional
        Makes graphs of what it is given; None: stages run as bound calls.
    tile : of ``gpu_kernels.plan_decode``

    Attributes
    ----------
    why_eager : why there are no graphs; None where there are
    resident : the integers of the GPU rows
    """

    def __init__(
        self, decoder: FusedDecoder, pages: CudaPages, exchange: Exchange, max_rows: int, max_model_len: int,
        sm_scale: float, capture: Capture | None, to_device: Callable[[np.ndarray], torch.Tensor],
        pinned: Callable[[int], torch.Tensor], tile: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self._decoder, self._pages, self._to_device = decoder, pages, to_device
        config, rows = decoder.config, exchange.all_rows
        self._config: DecoderConfig = config
        self._buckets = buckets_for(max_rows)
        self._ids, self._x = exchange.all_ids, exchange.all_residual
        self._qkv, self._out, self._rows = rows.qkv.flatten(1), rows.out, rows
        self._first_slot = exchange.front
        self._plans, self._windows = {}, config.layer_windows
        split, page = gpu_kernels.DEFAULT_SPLIT_TOKENS, pages.page_size
        self._most_items = [-(-max_model_len // split), pages.num_pages * page // split]  # of a row, and of all
        self.resident = ResidentRows(
            exchange.front, -(-max_model_len // page), max(self._items(exchange.front)), self._windows, page, split,
            self._ids, pinned,
        )  # fmt: skip
        for window in set(self._windows):
            self._plans[window] = gpu_kernels.plan_resident(
                *pages.cache(), self.resident.integers(window), config.shape.num_q_heads, split_tokens=split,
                q_dtype=self._x.dtype, sm_scale=sm_scale, tile=tile,
            )  # fmt: skip
        plan = self._plans[self._windows[0]]
        self.workspace = torch.empty(plan.workspace_size, dtype=torch.float32, device=self._x.device)
        self.lse = torch.empty(exchange.front, rows.out.shape[1], dtype=torch.float32, device=self._x.device)
        most = self._buckets[-1]
        self._scratch = Scratch(decoder, most)
        self._index = torch.zeros(most, dtype=torch.int64, device=self._x.device)
        self._gathered_ids = torch.zeros(2, most, dtype=torch.int64, device=self._x.device)
        self._gathered = [torch.zeros_like(t[:1]).repeat(most, *[1] * (t.dim() - 1)) for t in (self._x, self._out)]
        self._gathered_qkv = torch.zeros_like(self._qkv[:1]).repeat(most, 1)
        self._indexes: dict[Hashable, torch.Tensor] = {}
        self._indexed: torch.Tensor | None = None  # the one that ``_index`` holds
        self._runs: dict[Hashable, Run] = {}
        self.why_eager: str | None = "graphs are switched off"
        if capture is not None:
            self._capture(capture)

    @property
    def nbytes(self) -> int:
        own = (self.workspace, self.lse, self._index, self._gathered_ids, *self._gathered, self._gathered_qkv)
        return self.resident.nbytes + self._scratch.nbytes + sum([t.nbytes for t in own])

    # -- rows of a step ----------------------------------------------------------------------------------------------

    def plan(self, segments: Sequence[Segment], latest: torch.Tensor | None = None) -> Run:
        """See ``ResidentRows.plan``."""
        return self.resident.plan(segments, latest)

    def bucket(self, rows: int) -> int | None:
        """The least bucket for so many rows; None where there is none."""
        return next((b for b in self._buckets if b >= rows), None)

    def items(self, bucket: int) -> int:
        """The bucket of work items for the rows present."""
        need = max([self.resident.num_parts(window, bucket) for window in self._plans])
        return next(n for n in self._items(bucket) if n >= need)

    def plan_of(self, window: int | None, rows: int, items: int) -> gpu_kernels.DecodePlan:
        return replace(self._plans[window], num_seqs=rows, num_parts=items)

    def _items(self, rows: int) -> tuple[int, ...]:
        """Buckets of work items, from one for each row to the most that they can have."""
        of_row, of_all = self._most_items
        most = min(rows * of_row, of_all + rows)
        found: list[int] = []
        while rows * _MORE_ITEMS ** len(found) < most:
            found.append(rows * _MORE_ITEMS ** len(found))
        return (*found, most)

    def views(self, count: int) -> tuple[torch.Tensor, ...]:
        """tokens, positions, x, q, k, v and out of the first ``count`` rows."""
        rows = self._rows
        return (*self._ids[:, :count], *(t[:count] for t in (self._x, rows.q, rows.k, rows.v, rows.out)))

    # -- stages ------------------------------------------------------------------------------------------------------

    def attend(self, layer: int, bucket: int, items: int) -> None:
        self._run(("attend", layer, bucket, items), self._attend)

    def first(self, bucket: int) -> None:
        self._run(("first", bucket), self._first)

    def finish(self, layer: int, bucket: int) -> None:
        """post(layer) and pre(layer + 1)."""
        self._run(("finish", layer, bucket), self._finish)

    def layers(self, first: int, stop: int, bucket: int, items: int) -> None:
        """``attend`` and ``finish`` of layers ``first`` to ``stop - 1``."""
        layer = first
        while layer < stop:
            block = self._runs.get(("block", layer, bucket, items)) if layer % BLOCK == 0 else None
            if block is not None and self._block_end(layer) <= stop:
                block()
                layer = self._block_end(layer)
            else:
                self.attend(layer, bucket, items)
                self.finish(layer, bucket)
                layer += 1

    def joined(self, layer: int, rows: int, slots: Sequence[slice]) -> Run | None:
        """A closure: ``finish`` of the first ``rows`` rows and of the slots together; of layer -1, ``first``. None
        where there is no bucket for them."""
        key = (rows, *[(where.start, where.stop) for where in slots])
        index = self._indexes.get(key)
        if index is None:
            bucket = self.bucket(rows + sum([where.stop - where.start for where in slots]))
            if bucket is None:
                return None
            index = self._new_index(key, bucket, rows, slots)
        return partial(self._run_joined, layer, index)

    def _run_joined(self, layer: int, index: torch.Tensor) -> None:
        bucket = len(index)
        if self._indexed is not index:
            self._index[:bucket].copy_(index)
            self._indexed = index
        self._run(("joined", layer, bucket), self._joined)

    def _new_index(self, key: tuple, bucket: int, rows: int, slots: Sequence[slice]) -> torch.Tensor:
        places = np.full(bucket, len(self._x) - 1, np.int64)  # padding: nobody's row
        there = [np.arange(where.start, where.stop) + self._first_slot for where in slots]
        found = np.concatenate([np.arange(rows), *there])
        places[: len(found)] = found
        if len(self._indexes) == _INDEXES:
            self._indexes.clear()
        index = self._indexes[key] = self._to_device(places)
        return index

    # -- as calls on fixed memory ------------------------------------------------------------------------------------

    def _attend(self, layer: int, bucket: int, items: int) -> None:
        pages, rows = self._pages, self._rows.part(slice(0, bucket))
        slots, scales = self.resident.slots[:bucket], pages.scales(layer)
        gpu_kernels.append_kv(rows.k, rows.v, *pages.cache(layer), slots, check_ids=False, **scales)
        self.plan_of(self._windows[layer], bucket, items).run(
            rows.q, *pages.cache(layer), rows.out, self.lse[:bucket], workspace=self.workspace, **scales
        )

    def _first(self, bucket: int) -> None:
        x = self._x[:bucket]
        gpu_kernels.do(torch.index_select, self._decoder.weights.embed, 0, self._ids[0, :bucket], out=x)
        self._project(0, x, self._ids[1, :bucket], self._qkv[:bucket])

    def _finish(self, layer: int, bucket: int) -> None:
        x = self._x[:bucket]
        self._decoder.finish(layer, self._out[:bucket], x, self._scratch.of(bucket))
        self._project(layer + 1, x, self._ids[1, :bucket], self._qkv[:bucket])

    def _project(self, layer: int, x: torch.Tensor, positions: torch.Tensor, qkv: torch.Tensor) -> None:
        self._decoder.project(layer, x, positions, qkv, self._scratch.of(len(x)))

    def _joined(self, layer: int, bucket: int) -> None:
        do, index = gpu_kernels.do, self._index[:bucket]
        (tokens, positions), (x, out) = self._gathered_ids[:, :bucket], (t[:bucket] for t in self._gathered)
        qkv = self._gathered_qkv[:bucket]
        do(torch.index_select, self._ids[1], 0, index, out=positions)
        if layer < 0:
            do(torch.index_select, self._ids[0], 0, index, out=tokens)
            do(torch.index_select, self._decoder.weights.embed, 0, tokens, out=x)
        else:
            do(torch.index_select, self._x, 0, index, out=x)
            do(torch.index_select, self._out, 0, index, out=out)
            self._decoder.finish(layer, out, x, self._scratch.of(bucket))
        self._project(layer + 1, x, positions, qkv)
        do(self._x.index_copy_, 0, index, x)
        do(self._qkv.index_copy_, 0, index, qkv)

    # -- as graphs ---------------------------------------------------------------------------------------------------

    def _run(self, key: tuple, stage: Callable[..., None]) -> None:
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = _bound(partial(stage, *key[1:]))
        run()

    def _block_end(self, layer: int) -> int:
        return min(layer + BLOCK, len(self._windows) - 1)

    def _capture(self, capture: Capture) -> None:
        last = len(self._windows) - 1
        wanted: dict[Hashable, Run] = {}
        for bucket in sorted(self._buckets, reverse=True):
            for layer in range(last):
                wanted["joined", layer, bucket] = partial(self._joined, layer, bucket)
                wanted["finish", layer, bucket] = partial(self._finish, layer, bucket)
            for items in self._items(bucket):
                for layer in range(last + 1):
                    wanted["attend", layer, bucket, items] = partial(self._attend, layer, bucket, items)
                for layer in range(0, last, BLOCK):
                    wanted["block", layer, bucket, items] = partial(self._block, layer, bucket, items)
        for bucket in self._buckets:  # until then all rows are zero, and stay so in every stage
            wanted["first", bucket] = partial(self._first, bucket)
            wanted["joined", -1, bucket] = partial(self._joined, -1, bucket)
        try:
            self._runs = dict(zip(wanted, capture(list(wanted.values())), strict=True))
            self.why_eager = None
        except RuntimeError as error:
            self.why_eager = f"capturing failed: {error}"
            warnings.warn(f"decode rows run without CUDA graphs: {error}", RuntimeWarning, stacklevel=4)

    def _block(self, first: int, bucket: int, items: int) -> None:
        for layer in range(first, self._block_end(first)):
            self._attend(layer, bucket, items)
            self._finish(layer, bucket)


def _bound(stage: Run) -> Run:
    """The first call runs the stage and keeps what it enqueues; later ones enqueue that."""
    calls: gpu_kernels.Calls = []

    def run() -> None:
        if calls:
            for call in calls:
                call()
        else:
            found: gpu_kernels.Calls = []
            with gpu_kernels.kept(found):
                stage()
            calls.extend(found)

    return run
