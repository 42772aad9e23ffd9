"""Rows whose tokens are being sampled, until the pass ends and hands the tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridattn.core.device import Device, Ticket
from hybridattn.core.stages import Batch, Cohort, Sampled, Segment
from hybridattn.runtime.fleet import Fleet
from hybridattn.runtime.request import Request, State
from hybridattn.runtime.tally import Tally


class SamplingQueue:
    """Last linear stages of the pass under way, in the order in which they were submitted.

        gpu.compute   |linear L-1 of G + cohort 3|linear L-1 of cohort 4 (a detour)|
        here            add                        add                                collect: tokens of G, 3, 4

    ``on_release`` is called for a request that left while its row was in flight.
    """

    __slots__ = ("_device", "_fleet", "_on_release", "_queued", "_tally", "_timeout_ns")

    def __init__(
        self, device: Device, fleet: Fleet, tally: Tally, timeout_ns: int, on_release: Callable[[Request], None]
    ) -> None:
        self._device = device
        self._fleet = fleet
        self._tally = tally
        self._timeout_ns = timeout_ns
        self._on_release = on_release
        self._queued: list[tuple[Ticket, tuple[Segment, ...], tuple[Cohort, ...]]] = []

    def add(self, ticket: Ticket, batch: Batch | None, cohorts: Sequence[Cohort]) -> None:
        """``ticket`` will bring a token for each sampling segment of ``batch``, then for each row of ``cohorts``."""
        segments = tuple([s for s in batch.segments if s.samples]) if batch is not None else ()
        self._queued.append((ticket, segments, tuple(cohorts)))

    def collect(self) -> list[Sampled]:
        """Wait, bounded, for all of them; hand out the tokens in the order in which they were sampled."""
        sampled: list[Sampled] = []
        for ticket, segments, cohorts in self._queued:
            tokens = ticket.wait(self._timeout_ns)
            now_ns = self._device.now_ns()
            owners: list[Request | None] = [s.request for s in segments]  # type: ignore[misc]
            self._tally.gpu_made += len(owners)
            for cohort in cohorts:
                dead = cohort.dead
                owners += [None if i in dead else r.request for i, r in enumerate(cohort.rows)]  # type: ignore[misc]
                self._fleet.close(cohort)
            for i, owner in enumerate(owners):
                if owner is not None and self._keeps(owner):
                    sampled.append(Sampled(owner, tokens[i] if tokens is not None else 0, now_ns))
        self._queued.clear()
        return sampled

    def _keeps(self, request: Request) -> bool:
        """A request that left while its row was in flight gets no token; its blocks go back now."""
        left = request.state is State.LEAVING
        if request.in_flight:
            request.in_flight = False
            if left:
                self._on_release(request)
        return not left
