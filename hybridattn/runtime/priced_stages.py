"""The stages of a model that only has a price: the same ops as the real one, without tensors."""

from __future__ import annotations

from collections.abc import Sequence

from hybridattn.core.op import CPU, D2H, GPU, H2D, Op
from hybridattn.core.shapes import ModelShape
from hybridattn.core.stages import Batch, Cohort, Segment
from hybridattn.cost.stages_cost import ModelCost, batch_attention


class PricedStages:
    """Ops with work and no closure, for the simulator. Output lengths are declared: every token id is 0."""

    def __init__(self, shape: ModelShape, dtype: str, kv_dtype: str = "") -> None:
        self.num_layers = shape.num_layers
        self.cost = ModelCost(shape, dtype, kv_dtype)
        self._attention = self.cost.decode_attention(0, 0)

    def begin(self, batch: Batch) -> None:
        self._attention = batch_attention(self.cost, batch)  # the same at every layer

    def launch(self, cohort: Cohort) -> None:
        pass

    def replan(self, cohort: Cohort) -> None:
        pass

    def finish(self, cohort: Cohort) -> None:
        pass

    def attention(self, layer: int, batch: Batch) -> Op:
        return Op("attention", GPU, self._attention, layer=layer)

    def linear(self, layer: int, batch: Batch | None, cohorts: Sequence[Cohort]) -> Op:
        rows = sum(len(c.rows) for c in cohorts)
        count = rows + (batch.num_tokens if batch is not None else 0)
        if layer < self.num_layers - 1:
            return Op("linear", GPU, self.cost.linear(count) if layer >= 0 else self.cost.first(count), layer=layer)
        sampled = rows + (sum(s.samples for s in batch.segments) if batch is not None else 0)
        return Op("linear+sample", GPU, self.cost.last(count, sampled), layer=layer)

    def send(self, cohort: Cohort) -> Op:
        return Op("send q,k,v", D2H, self.cost.send(len(cohort.rows)), layer=cohort.layer, requests=cohort.requests)

    def cpu_attention(self, cohort: Cohort, priority: int) -> Op:
        keys = [r.position + 1 for i, r in enumerate(cohort.rows) if i not in cohort.dead]
        work = self.cost.decode_attention_of(keys)
        return Op("attention", CPU, work, layer=cohort.layer, requests=cohort.requests, priority=priority)

    def fetch(self, cohort: Cohort) -> Op:
        return Op("fetch out", H2D, self.cost.fetch(len(cohort.rows)), layer=cohort.layer, requests=cohort.requests)

    def pull(self, layer: int, segment: Segment) -> Op:
        return Op("pull k,v", H2D, self.cost.hand_down(segment.start), layer=layer)

    def hand_down(self, layer: int, segment: Segment) -> Op:
        return Op("hand down k,v", D2H, self.cost.hand_down(segment.num_tokens), layer=layer)
