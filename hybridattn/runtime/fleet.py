"""The cohorts in flight: where each stands, and which slots it holds."""

from __future__ import annotations

from collections.abc import Callable

from hybridattn.core.stages import Cohort, CpuRow, Stages
from hybridattn.runtime.forecast import Forecast
from hybridattn.runtime.request import Request, State
from hybridattn.runtime.slots import SlotRanges


class Fleet:
    """Cohorts by number and by layer.

    A cohort is *launched* (it gets a number and slots), *stands* at a layer while its attention is in flight, *departs*
    from it with its linear stage, and is *closed* when its tokens are known or all its rows died. The stages plan and
    forget it accordingly.

    ``on_release`` is called for a leaving request whose row died; ``any_leaving`` says whether there is one at all, so
    that cohorts are searched only then.
    """

    __slots__ = (
        "_any_leaving", "_forecast", "_on_release", "_stages", "by_number", "cohorts", "next_number", "slots",
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
        self.cohorts: list[Cohort] = []
        self.by_number: dict[int, Cohort] = {}
        self.standing: dict[int, list[Cohort]] = {}  # layers at which nobody stands are left out
        self.slots = SlotRanges(max_rows)
        self.next_number = 0
        self._stages = stages
        self._forecast = forecast
        self._on_release = on_release
        self._any_leaving = any_leaving

    def launch(self, rows: list[CpuRow], size: int) -> Cohort | None:
        """A new cohort of the first ``size`` rows, or of fewer where slabs are fragmented; None: no slot is free."""
        first, size = self.slots.take(min(size, len(rows)))
        if size == 0:
            return None
        cohort = Cohort(self.next_number, rows[:size], first)
        self.next_number += 1
        for row in cohort.rows:
            request_of(row).in_flight = True
        self.cohorts.append(cohort)
        self.by_number[cohort.number] = cohort
        self._stages.launch(cohort)
        return cohort

    def begin_pass(self) -> None:
        """What was submitted up to now belongs to earlier passes."""
        for cohort in self.cohorts:
            cohort.same_pass = False

    def stand(self, cohort: Cohort, layer: int) -> None:
        """Its attention of ``layer`` is about to be submitted."""
        cohort.layer, cohort.ready, cohort.same_pass = layer, False, True
        self.standing.setdefault(layer, []).append(cohort)

    def depart(self, cohort: Cohort) -> None:
        here = self.standing[cohort.layer]
        here.remove(cohort)
        if not here:
            del self.standing[cohort.layer]

    def bury(self, cohort: Cohort) -> bool:
        """Rows whose request left die: no op made from now on touches their blocks. True when all rows are dead."""
        if not self._any_leaving():
            return False
        leaving = _leaving_rows(cohort)
        if not leaving:
            return False
        cohort.dead.update(leaving)
        for i in leaving:
            self._on_release(request_of(cohort.rows[i]))
        if len(cohort.dead) == len(cohort.rows):
            self.land(cohort)
            self.close(cohort)
            return True
        cohort.count_keys()
        if self._forecast is not None:
            self._forecast.forget(cohort)
        self._stages.replan(cohort)
        return False

    def land(self, cohort: Cohort) -> None:
        """It is in flight no longer."""
        self.cohorts.remove(cohort)
        del self.by_number[cohort.number]

    def close(self, cohort: Cohort) -> None:
        """It is through, or all its rows died: give its slots back."""
        self.slots.give_back(cohort.first_slot, cohort.size)
        self._stages.finish(cohort)
        if self._forecast is not None:
            self._forecast.forget(cohort)

    def next_layer(self, layer: int, last: int) -> int:
        """The first layer from ``layer`` on at which some cohort stands, at most ``last``."""
        return min([at for at in self.standing if at >= layer], default=last)


def _leaving_rows(cohort: Cohort) -> list[int]:
    """Rows whose request left since they were last counted as dead."""
    return [i for i, r in enumerate(cohort.rows) if i not in cohort.dead and request_of(r).state is State.LEAVING]


def request_of(row: CpuRow) -> Request:
    assert isinstance(row.request, Request)
    return row.request
