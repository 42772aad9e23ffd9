"""Rows whose tokens are being sampled, until the step ends and hands the tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridattn.core.device import Device, Future
from hybridattn.core.request import Request, State
from hybridattn.core.stages import Batch, MicroBatch, Sampled, Segment
from hybridattn.executor.in_flight import InFlight
from hybridattn.executor.step_stats import StepStats


class SamplingQueue:
    """Last linear stages of the step under way, in the order in which they were submitted.

        gpu.compute   |linear L-1 of G + micro-batch 3|linear L-1 of micro-batch 4 (a detour)|
        here            add                        add                                collect: tokens of G, 3, 4

    ``on_release`` is called for a request that left while its row was in flight.
    """

    __slots__ = ("_device", "_in_flight", "_on_release", "_queued", "_stats", "_timeout_ns")

    def __init__(
        self,
        device: Device,
        in_flight: InFlight,
        stats: StepStats,
        timeout_ns: int,
        on_release: Callable[[Request], None],
    ) -> None:
        self._device = device
        self._in_flight = in_flight
        self._stats = stats
        self._timeout_ns = timeout_ns
        self._on_release = on_release
        self._queued: list[tuple[Future, tuple[Segment, ...], tuple[MicroBatch, ...]]] = []

    def add(self, future: Future, batch: Batch | None, micro_batches: Sequence[MicroBatch]) -> None:
        """``future`` will bring a token for each sampling segment of ``batch``, then for each row of
        ``micro_batches``."""
        segments = tuple([s for s in batch.segments if s.samples]) if batch is not None else ()
        self._queued.append((future, segments, tuple(micro_batches)))

    def collect(self) -> list[Sampled]:
        """Wait, bounded, for all of them; hand out the tokens in the order in which they were sampled."""
        sampled: list[Sampled] = []
        for future, segments, micro_batches in self._queued:
            tokens = future.wait(self._timeout_ns)
            now_ns = self._device.now_ns()
            owners: list[Request | None] = [s.request for s in segments]  # type: ignore[misc]
            self._stats.gpu_made += len(owners)
            for micro_batch in micro_batches:
                dead = micro_batch.dead
                owners += [None if i in dead else r.request for i, r in enumerate(micro_batch.rows)]  # type: ignore[misc]
                self._in_flight.close(micro_batch)
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
