"""Counts of the pass under way, and the record they become."""

from __future__ import annotations

from hybridattn.core.records import PassRecord
from hybridattn.core.stages import Batch


class Tally:
    """What happened since the pass began. ``row_layers`` counts rows that advanced by a layer, cohort by cohort."""

    __slots__ = (
        "cohorts", "cpu_rows", "detours", "joins", "layers_advanced", "polls_hit", "polls_made", "row_layers", "skips",
        "started_ns", "waits",
    )  # fmt: skip

    def __init__(self, started_ns: int) -> None:
        self.started_ns = started_ns
        self.cohorts = self.cpu_rows = 0
        self.polls_made = self.polls_hit = self.joins = self.skips = self.waits = self.detours = 0
        self.layers_advanced = self.row_layers = 0

    def record(self, index: int, end_ns: int, batch: Batch | None) -> PassRecord:
        """The record of the pass of ``batch`` that ends now."""
        return PassRecord(
            index=index,
            start_ns=self.started_ns,
            end_ns=end_ns,
            gpu_rows=len(batch.segments) if batch is not None else 0,
            prefill_tokens=batch.prefill_tokens if batch is not None else 0,
            cpu_rows=self.cpu_rows,
            cohorts=self.cohorts,
            layers_advanced=self.layers_advanced,
            polls_made=self.polls_made,
            polls_hit=self.polls_hit,
            joins=self.joins,
            skips=self.skips,
            waits=self.waits,
            detours=self.detours,
        )
