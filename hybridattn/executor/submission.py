"""What goes onto the lanes in a step, and what each op comes after.

A linear stage in which a micro-batch takes part, and a chunk of a prompt whose K,V live on the CPU tier:

    gpu.h2d       |fetch l|                          |pull l+1|
    gpu.compute           |linear l of G + micro-batch|            |attention l+1 of G|
    gpu.d2h                                      |send l+1|hand down l+1|
    cpu.attention                                         |attention l+1 of the micro-batch ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hybridattn.core.device import Device, Future
from hybridattn.core.request import Request
from hybridattn.core.stages import GPU_TIER, Batch, MicroBatch, Segment, Stages
from hybridattn.executor.forecast import Forecast
from hybridattn.executor.in_flight import InFlight
from hybridattn.executor.sampling_queue import SamplingQueue
from hybridattn.executor.step_stats import StepStats
from hybridattn.policies.base import Policy


class Submitter:
    """Submits linear stages with the copies around them, and copies of K,V. It never waits."""

    __slots__ = (
        "_copies", "_device", "_in_flight", "_forecast", "_last", "_last_down", "_policy", "_sampling", "_stages",
        "_stats",
    )  # fmt: skip

    def __init__(
        self,
        stages: Stages,
        device: Device,
        policy: Policy,
        in_flight: InFlight,
        stats: StepStats,
        forecast: Forecast | None,
        sampling: SamplingQueue,
    ) -> None:
        self._stages = stages
        self._device = device
        self._policy = policy
        self._in_flight = in_flight
        self._stats = stats
        self._forecast = forecast
        self._sampling = sampling
        self._last = stages.num_layers - 1
        self._copies: deque[Future] = deque()  # hand-downs not known to have ended
        self._last_down: Future | None = None  # newest op of gpu.d2h: the lane is in order

    def linear(
        self, layer: int, batch: Batch | None, micro_batches: Sequence[MicroBatch], attended: Future | None = None
    ) -> Future:
        """post(layer) and pre(layer + 1) for the rows present; then the micro-batches' next attention goes to the
        CPU."""
        after: tuple[Future, ...] = () if attended is None else (attended,)
        if micro_batches and layer >= 0:
            after += tuple([self._fetch_output(c) for c in micro_batches])
        future = self._device.submit(self._stages.linear(layer, batch, micro_batches), after)
        if layer == self._last:
            self._sampling.add(future, batch, micro_batches)
            for micro_batch in micro_batches:
                self._in_flight.land(micro_batch)
        elif micro_batches:
            self._send_down(micro_batches, layer + 1, future)
        return future

    def _fetch_output(self, micro_batch: MicroBatch) -> Future:
        """The micro-batch leaves its layer: what its attention brought goes up."""
        stats = self._stats
        stats.layers_advanced += 1
        stats.row_layers += micro_batch.size
        self._in_flight.depart(micro_batch)
        return self._device.submit(self._stages.fetch_output(micro_batch), (micro_batch.future,))

    def _send_down(self, micro_batches: Sequence[MicroBatch], layer: int, made: Future) -> None:
        """q, k, v of micro-batches go down and their attention of ``layer`` is queued behind the copies."""
        device, in_flight, stages, forecast = self._device, self._in_flight, self._stages, self._forecast
        submit, priority_of = device.submit, self._policy.priority_of
        for micro_batch in micro_batches:
            if in_flight.bury(micro_batch):
                continue
            in_flight.stand(micro_batch, layer)
            micro_batch.submitted_ns = now_ns = device.now_ns()
            self._last_down = down = submit(stages.send_qkv(micro_batch), (made,))
            micro_batch.future = submit(stages.cpu_attention(micro_batch, priority_of(micro_batch.number)), (down,))
            if forecast is not None:
                forecast.sent(micro_batch, now_ns)

    def offload_kv(self, layer: int, segments: Sequence[Segment], made: Future) -> None:
        """K,V of this layer of prompts of the CPU tier go down."""
        for segment in segments:
            self._last_down = self._device.submit(self._stages.offload_kv(layer, segment), (made,))
            self._copies.append(self._last_down)

    def load_kv(self, layer: int, segments: Sequence[Segment], attended: Future | None) -> tuple[Future, ...]:
        """Earlier K,V of a chunked CPU-tier prefill, once the layer before has done with the staging area."""
        after = tuple(t for t in (attended, self._last_down) if t is not None)
        return tuple(self._device.submit(self._stages.load_kv(layer, s), after) for s in segments if s.start > 0)

    def move(self, request: Request, source: str, blocks: Sequence[int], tokens: int) -> Future:
        """K,V of ``tokens`` tokens of a request goes from ``blocks`` of tier ``source`` to the blocks that it has."""
        after = () if self._last_down is None else (self._last_down,)
        future = self._device.submit(self._stages.move(request, source, blocks, tokens), after)  # type: ignore[attr-defined]
        if source == GPU_TIER:
            self._last_down = future
        return future

    def check_copies(self) -> None:
        """Raise the error of a hand-down that failed. A token that would read it comes later: its own copy goes down
        behind this one, and has ended when the token is handed out."""
        while self._copies and self._copies[0].done():
            self._copies.popleft().wait(0)
