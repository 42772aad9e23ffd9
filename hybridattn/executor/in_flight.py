"""The micro-batches in flight: at which layer each waits for its attention, and which slots it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridattn.core.request import Request, State
from hybridattn.core.stages import CpuRow, MicroBatch, Stages
from hybridattn.executor.forecast import Forecast, NoForecast
from hybridattn.executor.slots import SlotRanges


class InFlight:
    """Micro-batches by number and by layer.

        dispatch -> wait_at(0) -> leave -> wait_at(1) -> ... -> leave -> done -> close
        a number, slots                                     last stage ^         ^ its tokens are known

    Whenever its next attention is about to be queued, a micro-batch drops the rows that died meanwhile; one without
    any row left is done and closed at once. The stages plan and forget it accordingly.

    Attributes
    ----------
    micro_batches : those in flight, oldest first
    waiting : those that wait for their attention of a layer, by layer; layers at which nobody waits are left out
    """

    __slots__ = (
        "_any_leaving", "_forecast", "_on_release", "_stages", "by_number", "micro_batches", "next_number", "slots",
        "waiting",
    )  # fmt: skip

    def __init__(
        self,
        stages: Stages,
        max_rows: int,
        forecast: Forecast | NoForecast,
        on_release: Callable[[Request], None],
        any_leaving: Callable[[], bool],
    ) -> None:
        self.micro_batches: list[MicroBatch] = []
        self.by_number: dict[int, MicroBatch] = {}
        self.waiting: dict[int, list[MicroBatch]] = {}
        self.slots = SlotRanges(max_rows)
        self.next_number = 0
        self._stages = stages
        self._forecast = forecast
        self._on_release = on_release
        self._any_leaving = any_leaving

    def begin_step(self) -> None:
        """What was submitted up to now belongs to earlier steps."""
        for micro_batch in self.micro_batches:
            micro_batch.same_step = False

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

    def wait_at(self, layer: int, micro_batch: MicroBatch) -> None:
        """Its attention of ``layer`` is about to be submitted."""
        micro_batch.layer, micro_batch.ready, micro_batch.same_step = layer, False, True
        self.waiting.setdefault(layer, []).append(micro_batch)

    def next_layer(self, layer: int, last: int) -> int:
        """The first layer from ``layer`` on at which some micro-batch waits, at most ``last``."""
        return min([at for at in self.waiting if at >= layer], default=last)

    def leave(self, micro_batch: MicroBatch) -> None:
        """Its linear stage is about to be submitted: it waits at its layer no longer."""
        here = self.waiting[micro_batch.layer]
        here.remove(micro_batch)
        if not here:
            del self.waiting[micro_batch.layer]

    def alive(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Those that have a row left. Rows whose request left die: no op made from now on touches their blocks."""
        if not self._any_leaving():
            return micro_batches
        return [c for c in micro_batches if not self._drop_dead_rows(c)]

    def _drop_dead_rows(self, micro_batch: MicroBatch) -> bool:
        """True when no row is left."""
        leaving = _leaving_rows(micro_batch)
        if not leaving:
            return False
        micro_batch.dead.update(leaving)
        for i in leaving:
            self._on_release(request_of(micro_batch.rows[i]))
        if len(micro_batch.dead) == len(micro_batch.rows):
            self.done(micro_batch)
            self.close(micro_batch)
            return True
        micro_batch.count_kv_tokens()
        self._forecast.forget(micro_batch)
        self._stages.replan(micro_batch)
        return False

    def done(self, micro_batch: MicroBatch) -> None:
        """Its last stage is submitted, or it has no row left: it is in flight no longer."""
        self.micro_batches.remove(micro_batch)
        del self.by_number[micro_batch.number]

    def close(self, micro_batch: MicroBatch) -> None:
        """Nothing of it is on a lane any more: give its slots back."""
        self.slots.give_back(micro_batch.first_slot, micro_batch.size)
        self._stages.finish(micro_batch)
        self._forecast.forget(micro_batch)

    def keeps(self, request: Request) -> bool:
        """The request gets the token that was sampled for it. One that left or ended meanwhile gets none; if a row of
        it was in flight until now, its blocks go back."""
        left = request.state is State.LEAVING
        if request.in_flight:
            request.in_flight = False
            if left:
                self._on_release(request)
        return not left and request.state is not State.FINISHED


def _leaving_rows(micro_batch: MicroBatch) -> list[int]:
    """Rows whose request left since they were last counted as dead."""
    return [
        i for i, r in enumerate(micro_batch.rows) if i not in micro_batch.dead and request_of(r).state is State.LEAVING
    ]


def request_of(row: CpuRow) -> Request:
    assert isinstance(row.request, Request)
    return row.request
