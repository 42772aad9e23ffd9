"""The four verbs: what the policy says about a micro-batch, carried out.

    gpu.compute    |attention l of G|linear l of G (+ those that JOIN)|linear m of one (a DETOUR)|attention l+1 ...
    driver       ask, micro-batches at l: JOIN, SKIP or WAIT     detour? one at m, ready     detour? none

Asked as late as may be: the driver first lets the GPU come to the op before, so that polls are fresh, and the GPU still
has the op under way to do while the policy thinks.
"""

from __future__ import annotations

from hybridattn.core.device import Device, Future
from hybridattn.core.errors import StallError
from hybridattn.core.stages import Batch, MicroBatch
from hybridattn.executor.forecast import Forecast
from hybridattn.executor.in_flight import InFlight
from hybridattn.executor.step_stats import StepStats
from hybridattn.executor.submission import Submitter
from hybridattn.policies.base import LayerView, Policy, Verb


class Decisions:
    """Asks the policy, polls and waits for micro-batches. ``takes_detours``: the policy may want one at all."""

    __slots__ = (
        "_at", "_device", "_in_flight", "_forecast", "_policy", "_submitter", "_stats", "_timeout_ns", "takes_detours",
    )  # fmt: skip

    def __init__(
        self,
        device: Device,
        policy: Policy,
        in_flight: InFlight,
        stats: StepStats,
        forecast: Forecast | None,
        submitter: Submitter,
        num_layers: int,
        timeout_ns: int,
    ) -> None:
        self._device = device
        self._policy = policy
        self._in_flight = in_flight
        self._stats = stats
        self._forecast = forecast
        self._submitter = submitter
        self._timeout_ns = timeout_ns
        self._at = LayerView(0, num_layers, 0, 0)
        self.takes_detours = type(policy).detour is not Policy.detour

    def begin(self, batch: Batch) -> None:
        """A step of ``batch`` begins: what stays the same at all its layers."""
        self._at.gpu_rows, self._at.gpu_kv_tokens = len(batch.segments), self._stats.gpu_kv_tokens

    def join(self, here: list[MicroBatch], layer: int, batch: Batch, made: Future) -> list[MicroBatch]:
        """Of the micro-batches ``here``, those that enter the linear stage of ``layer`` together with the GPU rows."""
        forecast = self._forecast
        if forecast is None:
            return [c for c in tuple(here) if self._ask(c, layer, made)]
        made.wait(self._timeout_ns)  # predictions start from where the GPU is
        forecast.gpu_free_ns = self._device.now_ns() + forecast.attention_ns(batch)
        joined = [c for c in tuple(here) if self._ask(c, layer, made)]
        forecast.gpu_works(self._device.now_ns(), self._stats.gpu_tokens + sum([c.size for c in joined]))
        return joined

    def detours(self, layer: int, attended: Future, joined: list[MicroBatch]) -> None:
        """Linear stages of micro-batches elsewhere, as long as the policy wants them.

        Decided when the GPU has come to the linear stage of this layer, which it still has to do meanwhile.
        """
        attended.wait(self._timeout_ns)
        tokens = self._stats.gpu_tokens
        for c in joined:
            tokens += c.size
        if self._forecast is not None:
            self._forecast.gpu_free_ns = self._device.now_ns() + self._forecast.linear_ns(tokens)
        policy, in_flight, after = self._policy, self._in_flight, layer + 1
        micro_batches, standing = in_flight.micro_batches, in_flight.standing
        while self._device.now_ns() >= policy.next_detour_ns:
            possible = policy.detours_wait and len(micro_batches) > len(standing.get(after, ()))
            for c in micro_batches:
                c.ready = ready = c.future.done()
                if ready and c.layer != after:
                    possible = True
            if not possible:
                return
            at = self._where(layer, tokens)
            chosen = None if policy.no_detour(at) else policy.detour(micro_batches, at)
            if chosen is None:
                return
            one = in_flight.by_number[chosen]
            if not one.ready and not self._wait(one, at):
                return
            alone = len(standing[one.layer]) == 1
            beside = [] if alone else [c for c in micro_batches if c.ready and c.layer == one.layer and c is not one]
            self._detour([one, *beside])

    def _detour(self, micro_batches: list[MicroBatch]) -> None:
        """Micro-batches at one layer share a detour: its weights are read once for all of them."""
        for micro_batch in micro_batches:
            self._poll(micro_batch)
        self._stats.detours += len(micro_batches)
        if self._forecast is not None:
            self._forecast.gpu_works(self._device.now_ns(), sum([c.size for c in micro_batches]))
        self._submitter.linear(micro_batches[0].layer, None, micro_batches)

    def round(self) -> None:
        """No GPU rows: wait, bounded, for the earliest micro-batch, then give each ready one its linear stage."""
        micro_batches = self._in_flight.micro_batches
        if not micro_batches:
            return
        self._device.wait_any([c.future for c in micro_batches], self._timeout_ns)
        by_layer: dict[int, list[MicroBatch]] = {}
        for micro_batch in micro_batches:
            if self._poll(micro_batch):
                by_layer.setdefault(micro_batch.layer, []).append(micro_batch)
        for layer, ready in by_layer.items():
            self._stats.detours += len(ready)
            if self._forecast is not None:
                self._forecast.gpu_works(self._device.now_ns(), sum([c.size for c in ready]))
            self._submitter.linear(layer, None, ready)

    # -- one micro-batch -----------------------------------------------------------------------------------------------

    def _ask(self, micro_batch: MicroBatch, layer: int, made: Future) -> bool:
        """True when the micro-batch enters the linear stage of ``layer`` together with the GPU rows.

        If it is not ready yet, the poll is put off until the GPU has come to its attention of this layer (``made`` has
        ended): the driver then is less than a layer ahead, and the GPU still has that attention to do meanwhile.
        """
        if not micro_batch.future.done():
            made.wait(self._timeout_ns)
        ready = self._poll(micro_batch)
        at = self._where(layer, self._stats.gpu_tokens)
        verb = self._policy.ask(micro_batch, at)
        if verb is Verb.SKIP or not (ready or self._wait(micro_batch, at)):
            self._stats.skips += 1
            return False
        self._stats.joins += 1
        return True

    def _poll(self, micro_batch: MicroBatch) -> bool:
        """Ask whether the micro-batch's attention has ended; raises its error, and StallError past the time-out."""
        future = micro_batch.future
        self._stats.polls_made += 1
        if future.done():
            if future.error is not None:
                future.wait(0)  # raises with the op's name
            micro_batch.ready = True
            self._stats.polls_hit += 1
            if self._forecast is not None:
                self._forecast.returned(micro_batch)
            return True
        if self._device.now_ns() - micro_batch.submitted_ns > self._timeout_ns:
            raise StallError(f"{future.op.describe()} did not end within {self._timeout_ns / 1e9:g} s")
        return False

    def _wait(self, micro_batch: MicroBatch, at: LayerView) -> bool:
        """Wait for the micro-batch within the policy's patience; False when that passed first."""
        self._stats.waits += 1
        max_wait_ns, future = self._policy.max_wait_ns(micro_batch, at), micro_batch.future
        if max_wait_ns is None or max_wait_ns >= self._timeout_ns:
            future.wait(self._timeout_ns)
        elif not future.done():
            try:
                future.wait(max(0, max_wait_ns))
            except StallError:  # not the device's failure: the policy gives up and asks again later
                return False
        if self._forecast is not None:
            self._forecast.returned(micro_batch)
        return True

    def _where(self, layer: int, tokens: int) -> LayerView:
        """What the policy sees of the GPU: one object, brought up to date."""
        at = self._at
        at.layer = layer
        at.now_ns = self._device.now_ns()
        at.tokens = tokens
        if self._forecast is not None:
            at.gpu_free_ns = self._forecast.gpu_free_ns
            at.cpu_free_ns = self._forecast.cpu_free_ns
        return at
