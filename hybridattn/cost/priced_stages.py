"""The stages of a model that only has a price: the same ops as the real one, without tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hybridattn.core.device import DecodeStep
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D, Op, Work
from hybridattn.core.shapes import ModelShape
from hybridattn.core.stages import GPU_TIER, Batch, MicroBatch, RequestLike, Segment
from hybridattn.cost.pricing import Constant, PriceModel, Pricing, Together
from hybridattn.cost.stages_cost import ModelCost, batch_attention

EXPOSED = "exposed"


def with_exposed(pricing: Pricing, extra_ns: int) -> Pricing:
    """``pricing`` with ``extra_ns`` more for each linear stage while CPU rows are in flight, and its fingerprint."""
    if extra_ns < 0:
        raise InputError(f"exposed time must not be negative, got {extra_ns} ns")
    if not extra_ns:
        return pricing
    models: Mapping[tuple[str, str], PriceModel] = {**pricing.models, (GPU, EXPOSED): Constant(extra_ns)}
    return replace(pricing, fingerprint=f"{pricing.fingerprint} +{extra_ns / 1e3:g} us a layer", models=models)


class PricedStages:
    """Ops with work and no closure, for the simulator. Output lengths are declared: every token id is 0.

    Linear ops are made once per layer and number of rows and used again: nobody changes an op after it was made.

    Parameters
    ----------
    exposed : bool
        Each linear stage while CPU rows are in flight also holds work of the kind ``exposed``, which the pricing must
        know: time in which the GPU stands still, e.g. for launches that are not hidden.
    """

    def __init__(self, shape: ModelShape, dtype: str, kv_dtype: str = "", exposed: bool = False) -> None:
        self.num_layers = shape.num_layers
        self.cost = ModelCost(shape, dtype, kv_dtype)
        self._attention = self.cost.decode_attention(0, 0)
        self._cold: tuple[Work, Work, Work, Work] | None = None  # copy down, cold attention, copy up, merge
        self._attending: dict[int, tuple[Work, Work, Work]] = {}  # micro-batch -> copy down, attention, copy up
        self._linear: dict[tuple[int, int, bool], Op] = {}
        self._exposed = Work(EXPOSED, 0.0, 0, 1) if exposed else None
        self._tokens = 0
        self._alone_kv_tokens = 0

    def begin(self, batch: Batch) -> None:
        self._tokens = batch.num_tokens
        self._attention = batch_attention(self.cost, batch)  # the same at every layer
        if rows := len(batch.split):
            cost = self.cost
            cold = cost.decode_attention(rows, batch.cold_kv_tokens)
            self._cold = cost.send_q(rows), cold, cost.fetch_cold(rows), cost.merge(rows)

    def dispatch(self, micro_batch: MicroBatch) -> None:
        self.replan(micro_batch)

    def replan(self, micro_batch: MicroBatch) -> None:
        rows = micro_batch.size
        attention = self.cost.decode_attention(rows - len(micro_batch.dead), micro_batch.kv_tokens)
        self._attending[micro_batch.number] = self.cost.send_qkv(rows), attention, self.cost.fetch_output(rows)

    def finish(self, micro_batch: MicroBatch) -> None:
        del self._attending[micro_batch.number]

    def attention(self, layer: int, batch: Batch) -> Op:
        return Op("attention", GPU, self._attention, None, layer)

    def linear(self, layer: int, batch: Batch | None, micro_batches: Sequence[MicroBatch]) -> Op:
        count = self._tokens if batch is not None else 0
        for micro_batch in micro_batches:
            count += micro_batch.size
        exposed = self._exposed is not None and bool(self._attending)
        if layer < self.num_layers - 1:
            op = self._linear.get((layer, count, exposed))
            if op is None:
                work = self.cost.linear(count) if layer >= 0 else self.cost.first(count)
                op = self._linear[layer, count, exposed] = Op("linear", GPU, self._with(work, exposed), layer=layer)
            return op
        rows = sum([c.size for c in micro_batches])
        sampled = rows + (sum([s.samples for s in batch.segments]) if batch is not None else 0)
        return Op("linear+sample", GPU, self._with(self.cost.last(count, sampled), exposed), layer=layer)

    def _with(self, work: Work, exposed: bool) -> Work:
        return Together(work, self._exposed) if exposed and self._exposed is not None else work

    def alone(self, batch: Batch, step: int) -> DecodeStep:
        """A decode step of these rows, ``step`` tokens later."""
        rows, last = len(batch.segments), self.num_layers - 1
        if step == 0:
            self.begin(batch)
            self._alone_kv_tokens = batch.decode_kv_tokens
        attention = Op("attention", GPU, self.cost.decode_attention(rows, self._alone_kv_tokens + step * rows))
        linear = self.linear(0, batch, ()) if last else attention
        return DecodeStep(self.linear(-1, batch, ()), attention, linear, self.linear(last, batch, ()), self.num_layers)

    def send_qkv(self, micro_batch: MicroBatch) -> Op:
        work = self._attending[micro_batch.number][0]
        return Op("send q,k,v", D2H, work, None, micro_batch.layer, micro_batch.requests)

    def cpu_attention(self, micro_batch: MicroBatch, priority: int) -> Op:
        work = self._attending[micro_batch.number][1]
        return Op("attention", CPU, work, None, micro_batch.layer, micro_batch.requests, priority)

    def fetch_output(self, micro_batch: MicroBatch) -> Op:
        work = self._attending[micro_batch.number][2]
        return Op("fetch output", H2D, work, None, micro_batch.layer, micro_batch.requests)

    def send_q(self, layer: int, batch: Batch) -> Op:
        return self._of_split("send q", D2H, 0, layer, batch)

    def cold_attention(self, layer: int, batch: Batch) -> Op:
        return self._of_split("cold attention", CPU, 1, layer, batch)

    def fetch_cold(self, layer: int, batch: Batch) -> Op:
        return self._of_split("fetch cold part", H2D, 2, layer, batch)

    def merge(self, layer: int, batch: Batch) -> Op:
        return self._of_split("merge", GPU, 3, layer, batch)

    def _of_split(self, name: str, lane: str, which: int, layer: int, batch: Batch) -> Op:
        assert self._cold is not None
        return Op(name, lane, self._cold[which], None, layer, tuple([s.request.request_id for s in batch.split]))

    def move(self, request: RequestLike, source: str, blocks: Sequence[int], tokens: int) -> Op:
        """K,V of ``tokens`` tokens goes from ``blocks`` of tier ``source`` to the pages of the other that arrive."""
        lane = D2H if source == GPU_TIER else H2D
        return Op("move k,v", lane, self.cost.move_request(tokens), requests=(request.request_id,))

    def load_kv(self, layer: int, segment: Segment) -> Op:
        return Op("load k,v", H2D, self.cost.offload_kv(segment.loads), layer=layer)

    def offload_kv(self, layer: int, segment: Segment) -> Op:
        return Op("offload k,v", D2H, self.cost.offload_kv(segment.num_tokens), layer=layer)
