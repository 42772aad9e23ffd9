"""What goes onto the lanes in a pass, and what each op comes after.

A linear stage in which a cohort takes part, and a chunk of a prompt whose K,V live on the CPU tier:

    gpu.h2d       |fetch l|                          |pull l+1|
    gpu.compute           |linear l of G + cohort|            |attention l+1 of G|
    gpu.d2h                                      |send l+1|hand down l+1|
    cpu.attention                                         |attention l+1 of the cohort ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hybridattn.core.device import Device, Ticket
from hybridattn.core.stages import GPU_TIER, Batch, Cohort, Segment, Stages
from hybridattn.policies.base import Policy
from hybridattn.runtime.fleet import Fleet
from hybridattn.runtime.forecast import Forecast
from hybridattn.runtime.request import Request
from hybridattn.runtime.sampling_queue import SamplingQueue
from hybridattn.runtime.tally import Tally


class Submitter:
    """Submits linear stages with the copies around them, and copies of K,V. It never waits."""

    __slots__ = (
        "_copies", "_device", "_fleet", "_forecast", "_last", "_last_down", "_policy", "_sampling", "_stages", "_tally",
    )  # fmt: skip

    def __init__(
        self,
        stages: Stages,
        device: Device,
        policy: Policy,
        fleet: Fleet,
        tally: Tally,
        forecast: Forecast | None,
        sampling: SamplingQueue,
    ) -> None:
        self._stages = stages
        self._device = device
        self._policy = policy
        self._fleet = fleet
        self._tally = tally
        self._forecast = forecast
        self._sampling = sampling
        self._last = stages.num_layers - 1
        self._copies: deque[Ticket] = deque()  # hand-downs not known to have ended
        self._last_down: Ticket | None = None  # newest op of gpu.d2h: the lane is in order

    def linear(
        self, layer: int, batch: Batch | None, cohorts: Sequence[Cohort], attended: Ticket | None = None
    ) -> Ticket:
        """post(layer) and pre(layer + 1) for the rows present; then the cohorts' next attention goes to the CPU."""
        after: tuple[Ticket, ...] = () if attended is None else (attended,)
        if cohorts and layer >= 0:
            after += tuple([self._fetch(c) for c in cohorts])
        ticket = self._device.submit(self._stages.linear(layer, batch, cohorts), after)
        if layer == self._last:
            self._sampling.add(ticket, batch, cohorts)
            for cohort in cohorts:
                self._fleet.land(cohort)
        elif cohorts:
            self._send_down(cohorts, layer + 1, ticket)
        return ticket

    def _fetch(self, cohort: Cohort) -> Ticket:
        """The cohort leaves its layer: what its attention brought goes up."""
        tally = self._tally
        tally.layers_advanced += 1
        tally.row_layers += cohort.size
        self._fleet.depart(cohort)
        return self._device.submit(self._stages.fetch(cohort), (cohort.ticket,))

    def _send_down(self, cohorts: Sequence[Cohort], layer: int, made: Ticket) -> None:
        """q, k, v of cohorts go down and their attention of ``layer`` is queued behind the copies."""
        device, fleet, stages, forecast = self._device, self._fleet, self._stages, self._forecast
        submit, priority_of = device.submit, self._policy.priority_of
        for cohort in cohorts:
            if fleet.bury(cohort):
                continue
            fleet.stand(cohort, layer)
            cohort.submitted_ns = now_ns = device.now_ns()
            self._last_down = down = submit(stages.send(cohort), (made,))
            cohort.ticket = submit(stages.cpu_attention(cohort, priority_of(cohort.number)), (down,))
            if forecast is not None:
                forecast.sent(cohort, now_ns)

    def hand_down(self, layer: int, segments: Sequence[Segment], made: Ticket) -> None:
        """K,V of this layer of prompts of the CPU tier go down."""
        for segment in segments:
            self._last_down = self._device.submit(self._stages.hand_down(layer, segment), (made,))
            self._copies.append(self._last_down)

    def pull(self, layer: int, segments: Sequence[Segment], attended: Ticket | None) -> tuple[Ticket, ...]:
        """Earlier K,V of a chunked CPU-tier prefill, once the layer before has done with the staging area."""
        after = tuple(t for t in (attended, self._last_down) if t is not None)
        return tuple(self._device.submit(self._stages.pull(layer, s), after) for s in segments if s.start > 0)

    def move(self, request: Request, source: str, blocks: Sequence[int], tokens: int) -> Ticket:
        """K,V of ``tokens`` tokens of a request goes from ``blocks`` of tier ``source`` to the blocks that it has."""
        after = () if self._last_down is None else (self._last_down,)
        ticket = self._device.submit(self._stages.move(request, source, blocks, tokens), after)  # type: ignore[attr-defined]
        if source == GPU_TIER:
            self._last_down = ticket
        return ticket

    def check_copies(self) -> None:
        """Raise the error of a hand-down that failed. A token that would read it comes later: its own copy goes down
        behind this one, and has ended when the token is handed out."""
        while self._copies and self._copies[0].done():
            self._copies.popleft().wait(0)
