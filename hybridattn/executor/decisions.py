"""What the policy decides about micro-batches, carried out.

    gpu.compute    |attention l of G|linear l of G (+ those that JOIN)|linear m of one (a DETOUR)|attention l+1 ...
    driver       ask, micro-batches at l                         detour? one at m, ready     detour? none

Asked as late as may be: the driver first lets the GPU come to the op before, so that polls are fresh, and the GPU still
has the op under way to do while the policy thinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from hybridattn.core.device import Future
from hybridattn.core.errors import StallError
from hybridattn.core.params import as_number
from hybridattn.core.stages import Batch, CpuRow, MicroBatch
from hybridattn.executor.shared import Shared
from hybridattn.executor.submission import Submitter
from hybridattn.policies.answers import refused, whole_numbers
from hybridattn.policies.base import Decision, DispatchView, LayerView


class Decisions:
    """Asks the policy, polls and waits for micro-batches. ``takes_detours``: in this step it is asked about those
    elsewhere, too."""

    __slots__ = (
        "_apart", "_at", "_device", "_forecast", "_in_flight", "_policy", "_stats", "_submitter", "_timeout_ns",
        "takes_detours",
    )  # fmt: skip

    def __init__(self, shared: Shared, submitter: Submitter) -> None:
        self._device = shared.device
        self._policy = shared.policy
        self._in_flight = shared.in_flight
        self._stats = shared.stats
        self._forecast = shared.forecast
        self._timeout_ns = shared.timeout_ns
        self._submitter = submitter
        self._at = LayerView(0, shared.stages.num_layers, 0, 0)
        self._apart: list[MicroBatch] = []  # asked about at this layer: a DETOUR
        self.takes_detours = False

    # -- before the layers ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: what stays the same at all its layers."""
        self._at.gpu_rows, self._at.gpu_kv_tokens = self._stats.gpu_rows, self._stats.gpu_kv_tokens
        self.takes_detours = self._policy.takes_detours

    def dispatch(self, idle: Sequence[CpuRow], batch: Batch | None) -> list[MicroBatch]:
        """New micro-batches at layer 0, of the sizes that the policy names and the slabs have room for."""
        in_flight = self._in_flight
        answer = self._policy.dispatch(self._dispatch_view(idle, batch))
        sizes = [n for n in whole_numbers(self._policy, "dispatch", "a tuple of sizes", answer) if n]
        if not sizes and batch is None and not in_flight.micro_batches:
            sizes = [len(idle)]  # else nothing would ever happen
        dispatched: list[MicroBatch] = []
        rest = list(idle)
        for size in sizes:
            micro_batch = in_flight.dispatch(rest, size)
            if micro_batch is None:
                break
            rest = rest[micro_batch.size :]
            dispatched.append(micro_batch)
        return dispatched

    def _dispatch_view(self, idle: Sequence[CpuRow], batch: Batch | None) -> DispatchView:
        in_flight = self._in_flight
        return DispatchView(
            len(idle),
            len(in_flight.micro_batches),
            len(batch.segments) if batch is not None else 0,
            tuple([r.position + 1 for r in idle]),
            self._stats.gpu_kv_tokens,
            batch.chunks if batch is not None else (),
            in_flight.next_number,
            tuple([(c.number, c.size) for c in in_flight.micro_batches]),
        )

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
            self._submitter.linear(layer, None, ready)

    # -- at a layer ----------------------------------------------------------------------------------------------------

    def join(self, layer: int, batch: Batch, made: Future) -> Sequence[MicroBatch]:
        """Of the micro-batches that wait at ``layer``, those that enter its linear stage together with the GPU rows.

        ``made`` is the stage before: it made q, k, v of this layer.
        """
        if self._forecast.predicts:
            made.wait(self._timeout_ns)  # predictions start from where the GPU is
            self._forecast.gpu_attends(self._device.now_ns(), batch)
        return [c for c in self._in_flight.waiting[layer] if self._joins(c, layer, made)]

    def _joins(self, micro_batch: MicroBatch, layer: int, made: Future) -> bool:
        """Ask about one that waits at the layer of the GPU.

        If it is not ready yet, the poll is put off until the GPU has come to its attention of this layer (``made`` has
        ended): the driver then is less than a layer ahead, and the GPU still has that attention to do meanwhile.
        """
        if not micro_batch.future.done():
            made.wait(self._timeout_ns)
        ready = self._poll(micro_batch)
        at = self._where(layer, self._stats.gpu_tokens)
        decision = self._policy.ask(micro_batch, at)
        if not isinstance(decision, Decision):
            raise refused(self._policy, "ask", "a Decision", decision)
        if decision is Decision.DETOUR:
            self._apart.append(micro_batch)
            return False
        if decision is Decision.SKIP or not (ready or self._wait(micro_batch, at)):
            self._stats.skips += 1
            return False
        self._stats.joins += 1
        return True

    def detours(self, layer: int, attended: Future, joined: Sequence[MicroBatch]) -> None:
        """Linear stages of micro-batches alone: of those about which DETOUR was said at this layer, then of others
        elsewhere, as long as the policy wants them.

        Decided when the GPU has come to the linear stage of this layer, which it still has to do meanwhile.
        """
        asks = self.takes_detours and self._in_flight.micro_batches
        if not (asks or self._apart):
            return
        attended.wait(self._timeout_ns)
        tokens = self._stats.gpu_tokens
        for c in joined:
            tokens += c.size
        self._forecast.gpu_comes_to_linear(self._device.now_ns(), tokens)
        if self._apart:
            self._detour_here(self._where(layer, tokens))
        while asks and self._device.now_ns() >= self._policy.next_detour_ns and self._look_around(layer + 1):
            one = self._wanted(layer, tokens)
            if one is None:
                return
            self._detour(self._ready_beside(one))

    def _detour_here(self, at: LayerView) -> None:
        """Those at the layer of the GPU about which DETOUR was said, once they are ready."""
        self._look_around(at.layer + 1)
        apart, self._apart = self._apart, []
        ready = [c for c in apart if c.ready or self._wait(c, at)]
        self._stats.skips += len(apart) - len(ready)
        if ready:
            self._detour(ready)

    def _wanted(self, layer: int, tokens: int) -> MicroBatch | None:
        """The micro-batch that gets a detour now, which has been waited for if it was not ready; None: none."""
        policy, in_flight = self._policy, self._in_flight
        at = self._where(layer, tokens)
        number = None if policy.no_detour(at) else policy.detour(in_flight.micro_batches, at)
        if number is None:
            return None
        one = in_flight.by_number.get(number) if isinstance(number, Integral) else None
        if one is None:
            raise refused(policy, "detour", "the number of a micro-batch in flight", number)
        return one if one.ready or self._wait(one, at) else None

    def _look_around(self, after: int) -> bool:
        """See which micro-batches are ready; True where one could take a detour: the GPU does not come to it next. One
        that is known to be ready stays so until its next attention."""
        possible = False
        for c in self._in_flight.micro_batches:
            if not c.ready:
                c.ready = c.future.done()
            if c.ready and c.layer != after:
                possible = True
        return possible

    def _ready_beside(self, one: MicroBatch) -> list[MicroBatch]:
        """``one`` and those that are ready at its layer: they share a detour."""
        if len(self._in_flight.waiting[one.layer]) == 1:
            return [one]
        return [one, *(c for c in self._in_flight.micro_batches if c.ready and c.layer == one.layer and c is not one)]

    def _detour(self, together: list[MicroBatch]) -> None:
        """A linear stage for micro-batches at one layer: its weights are read once for all of them."""
        for micro_batch in together:
            self._poll(micro_batch)
        self._stats.detours += len(together)
        self._submitter.linear(together[0].layer, None, together)

    # -- one micro-batch -----------------------------------------------------------------------------------------------

    def _poll(self, micro_batch: MicroBatch) -> bool:
        """Ask whether the micro-batch's attention has ended; raises its error, and StallError past the time-out."""
        future = micro_batch.future
        self._stats.polls_made += 1
        if future.done():
            if future.error is not None:
                future.wait(0)  # raises with the op's name
            micro_batch.ready = True
            self._stats.polls_hit += 1
            self._forecast.returned(micro_batch)
            return True
        if self._device.now_ns() - micro_batch.submitted_ns > self._timeout_ns:
            raise StallError(f"{future.op.describe()} did not end within {self._timeout_ns / 1e9:g} s")
        return False

    def _wait(self, micro_batch: MicroBatch, at: LayerView) -> bool:
        """Wait for the micro-batch as long as the policy allows; False when that passed first. Where a policy needs no
        predictions, and so no times, the wait may be the stream's."""
        self._stats.waits += 1
        max_wait_ns, future = self._policy.max_wait_ns(micro_batch, at), micro_batch.future
        if not (max_wait_ns is None or isinstance(max_wait_ns, int) or as_number(max_wait_ns) is not None):
            raise refused(self._policy, "max_wait_ns", "nanoseconds or None", max_wait_ns)
        if max_wait_ns is None or max_wait_ns >= self._timeout_ns:
            if not self._forecast.predicts and self._device.waits_for(future, self._timeout_ns):
                return True  # the card's stream waits, and the driver goes on
            future.wait(self._timeout_ns)
        elif not future.done():
            try:
                future.wait(max(0, max_wait_ns))
            except StallError:  # not the device's failure: the policy gives up and asks again later
                return False
        self._forecast.returned(micro_batch)
        return True

    def _where(self, layer: int, tokens: int) -> LayerView:
        """What the policy sees of the GPU: one object, brought up to date."""
        at, forecast = self._at, self._forecast
        at.layer = layer
        at.now_ns = self._device.now_ns()
        at.tokens = tokens
        if forecast.predicts:
            at.gpu_free_ns = forecast.gpu_free_ns
            at.cpu_free_ns = forecast.cpu_free_ns
        return at
