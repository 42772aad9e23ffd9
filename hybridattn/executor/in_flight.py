"""The micro-batches in flight: where each stands, and which slots it holds."""

from __future__ import annotations

from collections.abc import Callable

from hybridattn.core.request import Request, State
from hybridattn.core.stages import CpuRow, MicroBatch, Stages
from hybridattn.executor.forecast import Forecast
from hybridattn.executor.slots import SlotRanges


class InFlight:
    """Micro-batches by number and by layer.

    A micro-batch is *launched* (it gets a number and slots), *stands* at a layer while its attention is in flight,
    *departs* from it with its linear stage, and is *closed* when its tokens are known or all its rows died. The stages
    plan and forget it accordingly.

    ``on_release`` is called for a leaving request whose row died; ``any_leaving`` says whether there is one at all, so
    that micro-batches are searched only then.
    """

    __slots__ = (
        "_any_leaving", "_forecast", "_on_release", "_stages", "by_number", "micro_batches", "next_number", "slots",
        "standing",
    )  # fmt: skip

    def __init__(
        self,
        stages: Stages,
        max_rows: int,
        forecast: Forecast | None,
        on_release: Callable[[Request], None],
        any_leaving: Callable[[], bool],
    ) -> None:
        self.micro_batches: list[MicroBatch] = []
        self.by_number: dict[int, MicroBatch] = {}
        self.standing: dict[int, list[MicroBatch]] = {}  # layers at which nobody stands are left out
        self.slots = SlotRanges(max_rows)
        self.next_number = 0
        self._stages = stages
        self._forecast = forecast
        self._on_release = on_release
        self._any_leaving = any_leaving

    def dispatch(self, rows: list[CpuRow], size: int) -> MicroBatch | None:
        """A new micro-batch of the first ``size`` rows, or of fewer where slabs are fragmented; None: no slot is
        free."""
        first, size = self.slots.take(min(size, len(rows)))
        if size == 0:
            return None
        micro_batch = MicroBatch(self.next_number, rows[:size], first)
        self.next_number += 1
        for row in micro_batch.rows:
            request_of(row).in_flight = True
        self.micro_batches.append(micro_batch)
        self.by_number[micro_batch.number] = micro_batch
        self._stages.dispatch(micro_batch)
        return micro_batch

    def begin_step(self) -> None:
        """What was submitted up to now belongs to earlier steps."""
        for micro_batch in self.micro_batches:
            micro_batch.same_step = False

    def stand(self, micro_batch: MicroBatch, layer: int) -> None:
        """Its attention of ``layer`` is about to be submitted."""
        micro_batch.layer, micro_batch.ready, micro_batch.same_step = layer, False, True
        self.standing.setdefault(layer, []).append(micro_batch)

    def depart(self, micro_batch: MicroBatch) -> None:
        here = self.standing[micro_batch.layer]
        here.remove(micro_batch)
        if not here:
            del self.standing[micro_batch.layer]

    def bury(self, micro_batch: MicroBatch) -> bool:
        """Rows whose request left die: no op made from now on touches their blocks. True when all rows are dead."""
        if not self._any_leaving():
            return False
        leaving = _leaving_rows(micro_batch)
        if not leaving:
            return False
        micro_batch.dead.update(leaving)
        for i in leaving:
            self._on_release(request_of(micro_batch.rows[i]))
        if len(micro_batch.dead) == len(micro_batch.rows):
            self.land(micro_batch)
            self.close(micro_batch)
            return True
        micro_batch.count_kv_tokens()
        if self._forecast is not None:
            self._forecast.forget(micro_batch)
        self._stages.replan(micro_batch)
        return False

    def land(self, micro_batch: MicroBatch) -> None:
        """It is in flight no longer."""
        self.micro_batches.remove(micro_batch)
        del self.by_number[micro_batch.number]

    def close(self, micro_batch: MicroBatch) -> None:
        """It is through, or all its rows died: give its slots back."""
        self.slots.give_back(micro_batch.first_slot, micro_batch.size)
        self._stages.finish(micro_batch)
        if self._forecast is not None:
            self._forecast.forget(micro_batch)

    def next_layer(self, layer: int, last: int) -> int:
        """The first layer from ``layer`` on at which some micro-batch stands, at most ``last``."""
        return min([at for at in self.standing if at >= layer], default=last)


def _leaving_rows(micro_batch: MicroBatch) -> list[int]:
    """Rows whose request left since they were last counted as dead."""
    return [
        i for i, r in enumerate(micro_batch.rows) if i not in micro_batch.dead and request_of(r).state is State.LEAVING
    ]


def request_of(row: CpuRow) -> Request:
    assert isinstance(row.request, Request)
    return row.request
