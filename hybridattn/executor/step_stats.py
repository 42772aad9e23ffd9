"""The step under way: its number, what its batch holds, what happened in it, and the record it becomes."""

from __future__ import annotations

from collections.abc import Sequence

from hybridattn.core.records import StepRecord
from hybridattn.core.stages import Batch, MicroBatch


class StepStats:
    """One of these serves all steps of an executor; ``begin`` sets the counts back.

    Attributes
    ----------
    gpu_rows, gpu_tokens : GPU rows of the step, and its tokens, those of prompts included
    gpu_kv_tokens : what its decode rows attend to, together
    gpu_made : tokens that GPU rows got
    layers_advanced, row_layers : micro-batches, and their rows, that advanced by a layer, each time
    """

    __slots__ = (
        "micro_batches", "cpu_rows", "detours", "gpu_kv_tokens", "gpu_made", "gpu_rows", "gpu_tokens", "joins",
        "layers_advanced", "number", "polls_hit", "polls_made", "row_layers", "skips", "started_ns", "waits",
    )  # fmt: skip

    def __init__(self) -> None:
        self.number = 0
        self.begin(0, None)

    def begin(self, started_ns: int, batch: Batch | None) -> None:
        """A step of the rows of ``batch`` begins."""
        self.started_ns = started_ns
        self.micro_batches = self.cpu_rows = self.gpu_made = self.layers_advanced = self.row_layers = 0
        self.polls_made = self.polls_hit = self.joins = self.skips = self.waits = self.detours = 0
        self.gpu_rows = len(batch.segments) if batch is not None else 0
        self.gpu_tokens = batch.num_tokens if batch is not None else 0
        self.gpu_kv_tokens = batch.decode_kv_tokens if batch is not None else 0

    def count_rows(self, micro_batches: Sequence[MicroBatch]) -> None:
        """CPU rows in flight, those included that were dispatched just now."""
        self.micro_batches = len(micro_batches)
        self.cpu_rows = sum([c.size for c in micro_batches])

    def record(self, end_ns: int, batch: Batch | None) -> StepRecord:
        """The record of the step of ``batch`` that ends now."""
        return StepRecord(
            index=self.number,
            start_ns=self.started_ns,
            end_ns=end_ns,
            gpu_rows=len(batch.segments) if batch is not None else 0,
            prefill_tokens=batch.prefill_tokens if batch is not None else 0,
            cpu_rows=self.cpu_rows,
            micro_batches=self.micro_batches,
            layers_advanced=self.layers_advanced,
            polls_made=self.polls_made,
            polls_hit=self.polls_hit,
            joins=self.joins,
            skips=self.skips,
            waits=self.waits,
            detours=self.detours,
        )
