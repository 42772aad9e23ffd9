"""What goes onto the lanes in a step, what each op comes after, and the tokens that come back.

A linear stage in which a micro-batch takes part, and a chunk of a prompt whose K,V live on the CPU tier:

    gpu.h2d       |fetch output l|                   |load k,v l+1|
    gpu.compute           |linear l of G + micro-batch|            |attention l+1 of G|
    gpu.d2h                                      |send q,k,v l+1|offload k,v l+1|
    cpu.attention                                         |attention l+1 of the micro-batch ...

Rows with pages on both tiers (see ``hybridattn.core.stages``) are waited for within their layer, by the card where it
can, so that their cold parts are submitted before what micro-batches send after the same stage and go before everything
else on the CPU's lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hybridattn.core.device import Future, PassDevice
from hybridattn.core.op import SKIPPED, WAITED, Op
from hybridattn.core.request import Request
from hybridattn.core.stages import GPU_TIER, Batch, MicroBatch, RequestLike, Sampled, Segment
from hybridattn.executor.shared import Shared
from hybridattn.policies.answers import refused

Sampling = tuple[Future, tuple[Segment, ...], tuple[MicroBatch, ...]]  # a last stage, and whose tokens it brings


class Submitter:
    """Submits the stages of a step with the copies around them, and copies of K,V. It waits for nothing but tokens and
    cold parts."""

    __slots__ = (
        "_attended", "_cold", "_device", "_forecast", "_in_flight", "_last", "_last_down", "_loaded", "_offloaded",
        "_offloads", "_passes", "_policy", "_sampling", "_stages", "_stats", "_timeout_ns",
    )  # fmt: skip

    def __init__(self, shared: Shared) -> None:
        self._stages = shared.stages
        self._device = shared.device
        self._passes = shared.device if isinstance(shared.device, PassDevice) else None
        self._policy = shared.policy
        self._in_flight = shared.in_flight
        self._stats = shared.stats
        self._forecast = shared.forecast
        self._timeout_ns = shared.timeout_ns
        self._last = shared.stages.num_layers - 1
        self._offloaded: tuple[Segment, ...] = ()  # prompts of the step whose K,V go to the CPU tier
        self._loaded: tuple[Segment, ...] = ()  # prompts of the step for which K,V come up from there
        self._offloads: deque[Future] = deque()  # copies of their K,V that are not known to have ended
        self._attended: Future | None = None  # the GPU rows' attention of the layer before
        self._cold: Future | None = None  # the cold parts of the layer to come
        self._last_down: Future | None = None  # newest op of gpu.d2h: the lane is in order
        self._sampling: list[Sampling] = []  # last stages of the step

    # -- the GPU rows --------------------------------------------------------------------------------------------------

    def first(self, batch: Batch | None, dispatched: Sequence[MicroBatch]) -> Future:
        """A step begins: embed the rows of ``batch`` and of new micro-batches, and make their q, k, v of layer 0."""
        if batch is not None:
            self._stages.begin(batch)
            self._offloaded, self._loaded, self._attended, self._cold = batch.offloaded, batch.loaded, None, None
        return self.linear(-1, batch, dispatched)

    def attention(self, layer: int, batch: Batch, made: Future) -> Future:
        """Attention of the GPU rows, whose q, k, v ``made`` makes, cold parts included.

        Each op names the one before it, so that a failure ends the step.
        """
        after: tuple[Future, ...] = (made,)
        if self._offloaded or self._loaded:
            after += self._move_prompts(layer, made)
        self._attended = attended = self._device.submit(self._stages.attention(layer, batch), after)
        return attended if self._cold is None else self._merge(layer, batch, attended, self._cold)

    def _attend_cold(self, layer: int, batch: Batch, made: Future) -> None:
        """q of the split rows goes down, and the CPU attends to their cold pages."""
        self._last_down = down = self._device.submit(self._stages.send_q(layer, batch), (made,))
        self._cold = self._device.submit(self._stages.cold_attention(layer, batch), (down,))

    def _merge(self, layer: int, batch: Batch, attended: Future, cold: Future) -> Future:
        """The cold parts, once they are there, go up and are merged with the hot ones. The driver waits for them only
        where the lane of the copy cannot."""
        if not self._device.waits_for(cold, self._timeout_ns):
            cold.wait(self._timeout_ns)
        up = self._device.submit(self._stages.fetch_cold(layer, batch), (cold,))
        return self._device.submit(self._stages.merge(layer, batch), (attended, up))

    def _move_prompts(self, layer: int, made: Future) -> tuple[Future, ...]:
        """K,V of this layer of prompts of the CPU tier go down; those of earlier tokens come up, once the layer before
        has done with the staging area. Returns what the attention comes after."""
        submit = self._device.submit
        for segment in self._offloaded:
            self._last_down = submit(self._stages.offload_kv(layer, segment), (made,))
            self._offloads.append(self._last_down)
        after = tuple([f for f in (self._attended, self._last_down) if f is not None])
        return tuple([submit(self._stages.load_kv(layer, s), after) for s in self._loaded])

    def linear(
        self, layer: int, batch: Batch | None, micro_batches: Sequence[MicroBatch], attended: Future | None = None
    ) -> Future:
        """post(layer) and pre(layer + 1) for the rows present; then the next attention of the micro-batches goes to the
        CPU, or their tokens are sampled."""
        after: tuple[Future, ...] = () if attended is None else (attended,)
        if micro_batches and layer >= 0 and self._forecast.predicts:
            rows = sum([c.size for c in micro_batches]) + (self._stats.gpu_tokens if batch is not None else 0)
            self._forecast.gpu_works(self._device.now_ns(), rows)
        split = batch is not None and bool(batch.split)
        if micro_batches and self._passes is not None and layer < self._last and not split:
            return self._pass(self._passes, layer, batch, micro_batches, after)
        if layer >= 0:
            after += tuple([self._device.submit(self._leave(c), (c.future,)) for c in micro_batches])
        future = self._device.submit(self._stages.linear(layer, batch, micro_batches), after)
        if layer == self._last:
            self._sample(future, batch, micro_batches)
            return future
        if batch is not None and split:
            self._attend_cold(layer + 1, batch, future)
        if micro_batches:
            self._send_qkv(micro_batches, layer + 1, future)
        return future

    # -- micro-batches -------------------------------------------------------------------------------------------------

    def _leave(self, micro_batch: MicroBatch) -> Op:
        """The micro-batch leaves its layer: what its attention brought goes up."""
        stats = self._stats
        stats.layers_advanced += 1
        stats.row_layers += micro_batch.size
        self._in_flight.leave(micro_batch)
        return self._stages.fetch_output(micro_batch)

    def _pass(
        self, device: PassDevice, layer: int, batch: Batch | None, micro_batches: Sequence[MicroBatch],
        after: tuple[Future, ...],
    ) -> Future:  # fmt: skip
        """``linear`` and all that ``_send_qkv`` does in one call of the device."""
        in_flight, stages = self._in_flight, self._stages
        ups = [(c.future, self._leave(c)) for c in micro_batches] if layer >= 0 else []
        linear = stages.linear(layer, batch, micro_batches)
        stay = in_flight.alive(micro_batches)
        downs = []
        for c in stay:
            in_flight.wait_at(layer + 1, c)
            downs.append((stages.send_qkv(c), stages.cpu_attention(c, self._priority(c))))
        future, attended = device.submit_pass(ups, linear, after, downs)
        now_ns = device.now_ns()
        for c, c.future in zip(stay, attended, strict=True):
            c.submitted_ns = now_ns
            self._forecast.sent(c, now_ns)
        return future

    def _send_qkv(self, micro_batches: Sequence[MicroBatch], layer: int, made: Future) -> None:
        """q, k, v of micro-batches go down and their attention of ``layer`` is queued behind the copies."""
        device, in_flight, stages, forecast = self._device, self._in_flight, self._stages, self._forecast
        submit = device.submit
        for micro_batch in in_flight.alive(micro_batches):
            in_flight.wait_at(layer, micro_batch)
            micro_batch.submitted_ns = now_ns = device.now_ns()
            self._last_down = down = submit(stages.send_qkv(micro_batch), (made,))
            micro_batch.future = submit(stages.cpu_attention(micro_batch, self._priority(micro_batch)), (down,))
            forecast.sent(micro_batch, now_ns)

    def _priority(self, micro_batch: MicroBatch) -> int:
        """The class of its ops on the cpu.attention lane."""
        priority = self._policy.priority_of(micro_batch.number)
        if priority not in (WAITED, SKIPPED):
            raise refused(self._policy, "priority_of", f"{WAITED} (waited for) or {SKIPPED}", priority)
        return priority

    def move(self, request: Request, source: str, blocks: Sequence[int], tokens: int) -> Future:
        """K,V of ``tokens`` tokens of a request goes from ``blocks`` of tier ``source`` to its arriving pages on the
        other."""
        after = () if self._last_down is None else (self._last_down,)
        future = self._device.submit(self._stages.move(request, source, blocks, tokens), after)  # type: ignore[attr-defined]
        if source == GPU_TIER:
            self._last_down = future
        return future

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _sample(self, future: Future, batch: Batch | None, micro_batches: Sequence[MicroBatch]) -> None:
        """``future`` will bring a token for each sampling segment of ``batch``, then for each row of the others."""
        segments = tuple([s for s in batch.segments if s.samples]) if batch is not None else ()
        self._sampling.append((future, segments, tuple(micro_batches)))
        for micro_batch in micro_batches:
            self._in_flight.done(micro_batch)

    def sampling(self) -> list[Sampling]:
        """What is being sampled in the step that was submitted last, for ``collect``."""
        sampling, self._sampling = self._sampling, []
        return sampling

    def collect(self, sampling: list[Sampling]) -> list[Sampled]:
        """Wait, bounded, for what is being sampled; the tokens in the order in which they were sampled.

        gpu.compute   |linear L-1 of G + micro-batch 3|linear L-1 of micro-batch 4 (a detour)|
        here           ..............................  ....................................  tokens of G, 3, 4
        """
        self._check_offloads()
        sampled: list[Sampled] = []
        keeps = self._in_flight.keeps
        for future, segments, micro_batches in sampling:
            tokens = future.wait(self._timeout_ns)
            now_ns = self._device.now_ns()
            owners: list[RequestLike | None] = [s.request for s in segments]
            self._stats.gpu_made += len(owners)
            for micro_batch in micro_batches:
                dead = micro_batch.dead
                owners += [None if i in dead else r.request for i, r in enumerate(micro_batch.rows)]
                self._in_flight.close(micro_batch)
            for i, owner in enumerate(owners):
                if owner is not None and keeps(owner):  # type: ignore[arg-type]
                    sampled.append(Sampled(owner, tokens[i] if tokens is not None else 0, now_ns))
        return sampled

    def settle(self) -> None:
        """Wait, bounded, until all K,V that went down are there."""
        while self._offloads:
            self._offloads.popleft().wait(self._timeout_ns)

    def _check_offloads(self) -> None:
        """Raise the error of a copy of K,V that failed. A token that would read it comes later: its own copy goes down
        behind this one, and has ended when the token is handed out."""
        while self._offloads and self._offloads[0].done():
            self._offloads.popleft().wait(0)
