"""The stages of a real model: ops that compute with torch and the kernels of the device's GPU tier.

One CPU row through a layer: ``linear`` leaves its q, k, v in the GPU-side slab, ``send_qkv`` copies them down,
``cpu_attention`` appends k, v to the CPU pages and attends (one native job, no interpreter), ``fetch_output`` copies
the output up, and the next ``linear`` reads it together with the row's residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from cpu_kernels import backends, plan_decode
from hybridattn.core.config import EngineConfig
from hybridattn.core.device import Device
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D, Op, Work
from hybridattn.core.stages import GPU_TIER, Batch, MicroBatch, RequestLike, RowFault, Segment
from hybridattn.cost.stages_cost import ModelCost, batch_attention
from hybridattn.kv.blocks import blocks_for
from hybridattn.kv.tables import block_table, slots
from hybridattn.models.exchange import Rows
from hybridattn.models.gpu_rows import GpuRows
from hybridattn.models.load import LoadedModel
from hybridattn.models.open_tier import open_tier
from hybridattn.models.sampling import SampleRow

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class MicroBatchPlan:
    """What the ops of one micro-batch need: fixed for a token, except that rows may die."""

    __slots__ = ("attention", "handed", "positions", "sample_rows", "tokens", "works")

    def __init__(self, tokens: torch.Tensor, positions: torch.Tensor, sample_rows: list[SampleRow]) -> None:
        self.tokens = tokens
        self.positions = positions
        self.sample_rows = sample_rows
        self.attention: dict = {}  # window -> DecodePlan
        self.handed: dict = {}  # (window, half of the slabs) -> its arrays, checked
        self.works: tuple[Work, Work, Work] | None = None  # copy down, attention, copy up


class TorchStages:
    """Stages over a loaded model.

    Parameters
    ----------
    model : LoadedModel
    device : Device
        Books the memory and says which GPU tier; must run closures (host, cuda, or sim with ``execute=True``).
    config : EngineConfig
    kv_dtype : str
        Of the pages of both tiers.
    backend : str
        CPU attention back end, a name of `cpu_kernels.backends`: ``native``, ``numba``, ``torch``, ...
    """

    def __init__(
        self, model: LoadedModel, device: Device, config: EngineConfig, kv_dtype: str, backend: str = "native"
    ) -> None:
        if reason := backends.why_absent(backend):
            raise InputError(reason)
        shape = model.config.shape
        if shape.head_dim % 16 or shape.head_dim > 512:
            raise InputError(f"head_dim {shape.head_dim} is not supported: multiples of 16 up to 512 are")
        self.num_layers = shape.num_layers
        self.config = config
        self.model_config = model.config
        self.window = model.config.widest_window
        self._weights = model.weights
        self.cost = ModelCost(shape, DTYPE_NAMES[model.weights.dtype], kv_dtype)
        self.sm_scale = shape.head_dim**-0.5
        order = backends.layout_of(backend)
        if order != "tiles" and kv_dtype not in ("fp32", "bf16"):
            raise InputError(f"backend '{backend}' reads pages of fp32 and bf16, kv_dtype is {kv_dtype}")
        self.gpu_tier = open_tier(model, device, config, kv_dtype, self.sm_scale, order)
        self.decoder, self.exchange = self.gpu_tier.decoder, self.gpu_tier.exchange
        self._backend, self._on_pool = backend, backends.on_pool(backend)
        self._plans: dict[int, MicroBatchPlan] = {}
        self._rows: GpuRows | None = None
        self._cold: dict = {}  # window -> DecodePlan over the cold pages of the split rows
        self._attention_work = self.cost.decode_attention(0, 0)
        self._sample_rows: list[SampleRow] = []
        self._requests: tuple[str, ...] = ()

    # -- planning ----------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        self._rows = self.gpu_tier.rows(batch)
        self._sample_rows = [self._sample_row(s.request, s.unseen) for s in batch.segments if s.samples]
        self._attention_work = batch_attention(self.cost, batch)
        self._requests = tuple([s.request.request_id for s in batch.segments])
        self._cold = self._plan_cold(batch.split) if batch.split else {}

    def _plan_cold(self, split: Sequence[Segment]) -> dict:
        table = block_table([s.request.pages.cold for s in split])
        lens = np.array([s.cold for s in split], np.int32)
        first, newest = (np.array(at, np.int64) for at in zip(*[(s.gone, s.start) for s in split], strict=True))
        return self._plan_decodes(table, lens, key_start=first, query_pos=newest)

    def can_follow(self, batch: Batch) -> bool:
        return self.gpu_tier.keeps_tokens(self._gpu_rows()) and not any(
            s.request.params.penalised
            for s in batch.segments  # a penalty needs to know the token
        )

    def dispatch(self, micro_batch: MicroBatch) -> None:
        rows, to_device = micro_batch.rows, self.gpu_tier.to_device
        tokens = to_device(np.array([r.request.token_ids[r.position] for r in rows], np.int64))
        positions = to_device(np.array([r.position for r in rows], np.int64))
        sample_rows = [self._sample_row(r.request) for r in micro_batch.rows]
        self._plans[micro_batch.number] = MicroBatchPlan(tokens, positions, sample_rows)
        self.replan(micro_batch)

    def replan(self, micro_batch: MicroBatch) -> None:
        rows, page = micro_batch.rows, self.config.page_size
        alive = [i not in micro_batch.dead for i in range(len(rows))]
        table = block_table([r.request.pages.cold if a else [] for r, a in zip(rows, alive, strict=True)])
        at = [r.position - r.request.pages.gone * page for r in rows]  # in the pages that are read
        lens = np.array([n + 1 if a else 0 for n, a in zip(at, alive, strict=True)], np.int32)
        mapping = np.array(
            [slots(r.request.pages.cold, n, 1, page)[0] if a else -1 for r, n, a in zip(rows, at, alive, strict=True)],
            np.int64,
        )
        plan, n = self._plans[micro_batch.number], len(rows)
        plan.attention, plan.handed = self._plan_decodes(table, lens, slot_mapping=mapping), {}
        attention = self.cost.decode_attention_of(lens[lens > 0].tolist())
        plan.works = self.cost.send_qkv(n), attention, self.cost.fetch_output(n)

    def _plan_decodes(self, table: np.ndarray, lens: np.ndarray, **where: Any) -> dict:
        """Plans over the CPU tier's pages, one per window that the model's layers have."""
        return {
            window: plan_decode(
                self.gpu_tier.cpu_pages, table, lens, self.model_config.shape.num_q_heads, sm_scale=self.sm_scale,
                window_left=-1 if window is None else window - 1, backend=self._backend,
                read_once=self.config.share_prefixes, **where,
            )
            for window in set(self.model_config.layer_windows)
        }  # fmt: skip

    def finish(self, micro_batch: MicroBatch) -> None:
        del self._plans[micro_batch.number]

    # -- gpu.compute -------------------------------------------------------------------------------------------------

    def attention(self, layer: int, batch: Batch) -> Op:
        run = partial(self._gpu_rows().attend, layer)
        return Op("attention", GPU, self._attention_work, run, layer=layer, requests=self._requests)

    def layers(self, first: int, stop: int, batch: Batch) -> Op | None:
        run = self.gpu_tier.layers(first, stop, self._gpu_rows())
        if run is None:
            return None
        a, b, count = self._attention_work, self.cost.linear(batch.num_tokens), stop - first
        work = Work("other", count * (a.flops + b.flops), count * (a.num_bytes + b.num_bytes), b.rows, a.kv_tokens)
        return Op("layers", GPU, work, run, layer=first, requests=self._requests)

    def linear(self, layer: int, batch: Batch | None, micro_batches: Sequence[MicroBatch]) -> Op:
        rows = self._gpu_rows() if batch is not None else None
        slots = [_slab_rows(c) for c in micro_batches]
        requests = self._requests if batch is not None else ()
        for c in micro_batches:
            requests += c.requests
        plans = [self._plans[c.number] for c in micro_batches]
        count = (batch.num_tokens if batch is not None else 0) + sum([c.size for c in micro_batches])
        if layer < self.num_layers - 1:
            run = self.gpu_tier.linear(layer, rows, slots)
            if run is None:
                run = partial(self._linear, layer, rows, slots, batch is not None and bool(batch.offloaded))
            if layer >= 0:
                return Op("linear", GPU, self.cost.linear(count), run, layer=layer, requests=requests)
            parts = list(zip(slots, plans, strict=True))
            first = lambda: self._enter(rows, parts, run)  # noqa: E731
            return Op("linear", GPU, self.cost.first(count), first, layer=layer, requests=requests)
        sample_rows = self._sample_rows if batch is not None else []
        sample_rows = sample_rows + [r for plan in plans for r in plan.sample_rows]
        return Op(
            "linear+sample",
            GPU,
            self.cost.last(count, len(sample_rows)),
            partial(self._last, layer, rows, sample_rows, slots),
            layer=layer,
            requests=requests,
        )

    def _enter(
        self, rows: GpuRows | None, parts: list[tuple[slice, MicroBatchPlan]], embed: Callable[[], None]
    ) -> None:
        """The first op of a step: what it needs to know of its rows is written, then they are embedded."""
        if rows is not None:
            rows.write()
        for where, plan in parts:
            self.exchange.tokens[where] = plan.tokens
            self.exchange.positions[where] = plan.positions
        embed()

    def _linear(self, layer: int, rows: GpuRows | None, slots: list[slice], keep: bool) -> None:
        """post(layer) and pre(layer + 1) of all rows present in one go; then each row's results are stored."""
        exchange = self.exchange
        positions = torch.cat(_gather(rows, slots, lambda r: r.positions, exchange.positions))
        if layer < 0:
            x = self.decoder.embed(torch.cat(_gather(rows, slots, lambda r: r.tokens, exchange.tokens)))
        else:
            x = self.decoder.post_attention(layer, *self._before_post(rows, slots))
        q, k, v = self.decoder.pre_attention(layer + 1, x, positions)
        n = 0
        if rows is not None:
            n = len(rows.tokens)
            rows.store(x[:n], q[:n], k[:n], v[:n])
            if keep:
                rows.kv[layer + 1] = (rows.k, rows.v)
        slab = exchange.gpu
        for where in slots:
            here = slice(n, n + where.stop - where.start)
            exchange.residual[where] = x[here]
            slab.q[where], slab.k[where], slab.v[where] = q[here], k[here], v[here]
            n = here.stop

    def _last(
        self, layer: int, rows: GpuRows | None, sample_rows: list[SampleRow], slots: list[slice]
    ) -> list[int | RowFault]:
        """post, head and sampling: the last token of each sampling segment, then every row of the micro-batches."""
        x = self.decoder.post_attention(layer, *self._before_post(rows, slots))
        if rows is not None and rows.sampled is not None:
            x = x[torch.cat([rows.sampled, torch.arange(len(rows.tokens), len(x), device=x.device)])]
        return self.gpu_tier.sampled(self.decoder.head(x), sample_rows) if sample_rows else []

    def _before_post(self, rows: GpuRows | None, slots: list[slice]) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention outputs and residual rows of all parts."""
        out = _gather(rows, slots, lambda r: r.out, self.exchange.gpu.out)
        return torch.cat(out), torch.cat(_gather(rows, slots, lambda r: r.x, self.exchange.residual))

    # -- copies and cpu.attention ------------------------------------------------------------------------------------

    def send_qkv(self, micro_batch: MicroBatch) -> Op:
        run = partial(self.exchange.send_qkv, micro_batch.layer, _slab_rows(micro_batch))
        return _micro_batch_op("send q,k,v", D2H, self._works(micro_batch)[0], micro_batch, run)

    def cpu_attention(self, micro_batch: MicroBatch, priority: int) -> Op:
        layer, window = micro_batch.layer, self.model_config.layer_windows[micro_batch.layer]
        mine = self._plans[micro_batch.number]
        plan, host = mine.attention[window], self.exchange.host(layer)
        run = partial(_attend, plan, host, _slab_rows(micro_batch), layer)
        op = _micro_batch_op("attention", CPU, self._works(micro_batch)[1], micro_batch, run)
        if self._on_pool:
            handed = mine.handed.get((window, host))
            if handed is None:
                q, out, new = _arrays(host, _slab_rows(micro_batch))
                handed = mine.handed[window, host] = plan.hand(q, out, **new)
            op.native = lambda pool: pool.submit(plan, handed, layer=layer, priority=priority)
        op.priority = priority
        return op

    def _works(self, micro_batch: MicroBatch) -> tuple[Work, Work, Work]:
        works = self._plans[micro_batch.number].works
        assert works is not None
        return works

    def fetch_output(self, micro_batch: MicroBatch) -> Op:
        run = partial(self.exchange.fetch_output, micro_batch.layer, _slab_rows(micro_batch))
        return _micro_batch_op("fetch output", H2D, self._works(micro_batch)[2], micro_batch, run)

    # -- split rows --------------------------------------------------------------------------------------------------

    def send_q(self, layer: int, batch: Batch) -> Op:
        rows, parts = self._gpu_rows(), self.exchange.cold
        run = lambda: parts.send_q(rows.q[: rows.num_split])  # noqa: E731
        return _split_op("send q", D2H, self.cost.send_q(len(batch.split)), layer, batch, run)

    def cold_attention(self, layer: int, batch: Batch) -> Op:
        plan, parts, n = self._cold[self.model_config.layer_windows[layer]], self.exchange.cold, len(batch.split)
        args = plan, parts.q[:n], parts.out[:n], parts.lse[:n]
        work = self.cost.decode_attention(n, batch.cold_kv_tokens)
        op = _split_op("cold attention", CPU, work, layer, batch, lambda: plan.run(*args[1:], layer=layer))
        if self._on_pool:
            op.native = lambda pool: pool.submit(*args, layer=layer)
        return op

    def fetch_cold(self, layer: int, batch: Batch) -> Op:
        parts, n = self.exchange.cold, len(batch.split)
        return _split_op("fetch cold part", H2D, self.cost.fetch_cold(n), layer, batch, lambda: parts.fetch(n))

    def merge(self, layer: int, batch: Batch) -> Op:
        rows, parts, n = self._gpu_rows(), self.exchange.cold, len(batch.split)
        run = lambda: rows.merge(parts.up[:n], parts.lse_up[:n])  # noqa: E731
        return _split_op("merge", GPU, self.cost.merge(n), layer, batch, run)

    # -- K,V between the tiers ---------------------------------------------------------------------------------------

    def move(self, request: RequestLike, source: str, blocks: Sequence[int], tokens: int) -> Op:
        """K,V of ``tokens`` tokens, all layers, go from ``blocks`` of tier ``source`` to the pages that arrive."""
        count = blocks_for(tokens, self.config.page_size)
        there, here = (np.asarray(b[:count], np.int64) for b in (blocks, request.pages.arriving))
        on_gpu, on_cpu = (there, here) if source == GPU_TIER else (here, there)
        lane = D2H if source == GPU_TIER else H2D
        run = self.gpu_tier.move(source, on_gpu, on_cpu)
        return Op("move k,v", lane, self.cost.move_request(tokens), run, requests=(request.request_id,))

    def fingerprint(self) -> bytes:
        """Of all that the bytes of a page depend on: the model, by a sample of each of its tensors, and the layout."""
        pages = self.gpu_tier.cpu_pages
        found = blake2b(repr((self.model_config, pages.layout, self.cost.dtype)).encode())
        for tensor in self._weights.tensors():
            sample = tensor.flatten()[:: max(1, tensor.numel() // 4096)].float().cpu().numpy()
            found.update(repr(tuple(tensor.shape)).encode() + sample.tobytes())
        return found.digest()

    def read_page(self, page: int) -> bytes:
        """The content of a page of the CPU tier, all layers."""
        return self.gpu_tier.cpu_pages.buffer[:, page].tobytes()

    def write_page(self, page: int, data: bytes) -> None:
        """Replace it."""
        buffer = self.gpu_tier.cpu_pages.buffer
        buffer[:, page] = np.frombuffer(data, np.uint8).reshape(buffer[:, page].shape)

    def load_kv(self, layer: int, segment: Segment) -> Op:
        blocks, count = np.asarray(segment.request.pages.cold, np.int64), segment.loads
        run = self.gpu_tier.load_kv(layer, blocks, count)
        return _segment_op("load k,v", H2D, self.cost.offload_kv(count), layer, segment, run)

    def offload_kv(self, layer: int, segment: Segment) -> Op:
        rows = self._gpu_rows()
        run = self.gpu_tier.offload_kv(layer, rows, rows.chunk_of[segment.request.request_id])
        return _segment_op("offload k,v", D2H, self.cost.offload_kv(segment.num_tokens), layer, segment, run)

    def _sample_row(self, request: RequestLike, unseen: int = 0) -> SampleRow:
        return SampleRow.of(request, request.params.seed, self.model_config.eos_ids, unseen)

    def _gpu_rows(self) -> GpuRows:
        assert self._rows is not None, "begin() comes before the ops of a step"
        return self._rows


def _gather(
    rows: GpuRows | None, slots: list[slice], of_rows: Callable[[GpuRows], torch.Tensor], of_slots: torch.Tensor
) -> list[torch.Tensor]:
    """GPU rows first, then the micro-batches in order."""
    found = [] if rows is None else [of_rows(rows)]
    return found + [of_slots[where] for where in slots]


def _arrays(host: Rows, where: slice) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return host.q[where], host.out[where], {"k_new": host.k[where], "v_new": host.v[where]}


def _attend(plan: Any, host: Rows, where: slice, layer: int) -> None:
    """The attention of a micro-batch in the calling thread."""
    q, out, new = _arrays(host, where)
    plan.run(q, out, layer=layer, **new)


def _slab_rows(micro_batch: MicroBatch) -> slice:
    return slice(micro_batch.first_slot, micro_batch.first_slot + len(micro_batch.rows))


def _micro_batch_op(name: str, lane: str, work: Work, micro_batch: MicroBatch, run: Callable[[], object]) -> Op:
    return Op(name, lane, work, run, layer=micro_batch.layer, requests=micro_batch.requests)


def _split_op(name: str, lane: str, work: Work, layer: int, batch: Batch, run: Callable[[], object]) -> Op:
    return Op(name, lane, work, run, layer=layer, requests=tuple(s.request.request_id for s in batch.split))


def _segment_op(name: str, lane: str, work: Work, layer: int, segment: Segment, run: Callable[[], None]) -> Op:
    return Op(name, lane, work, run, layer=layer, requests=(segment.request.request_id,))
