"""The executor of a device whose ops only have a price: layers and steps at which nothing is decided pass in one call.

    layers     | 0 | 1 | 2 | 3 | 4 | 5 |      a micro-batch waits at layer 3
    Executor    ask each layer in turn
    here       |-- stretch --| 3 |-stretch-|

Nothing else differs: times, tokens and statistics are those of the plain executor
(``tests/simulation/test_fast_equals_slow.py``).
"""

from __future__ import annotations

from hybridattn.core.device import Device, Future, PricedDevice
from hybridattn.core.stages import Batch, RepeatedStages, Stages
from hybridattn.executor.executor import Executor


def executor_class(stages: Stages, device: Device) -> type[Executor]:
    """The executor for this model on this device."""
    fast = isinstance(device, PricedDevice) and device.resolves and isinstance(stages, RepeatedStages)
    return FastExecutor if fast else Executor


class FastExecutor(Executor):
    """An executor on a ``PricedDevice``, for stages whose steps can be repeated."""

    stages: RepeatedStages
    device: PricedDevice

    # -- layers ------------------------------------------------------------------------------------------------------

    def _stretch(self, layer: int, batch: Batch, last: int, made: Future) -> tuple[int, Future | None]:
        until_ns = None
        if self._decisions.takes_detours and self._in_flight.micro_batches:
            if self.device.poll_ns:
                return 0, None  # polls move the clock: none may be left out
            back_ns = min([c.future.end_ns for c in self._in_flight.micro_batches])
            until_ns = max(back_ns, self.policy.next_detour_ns)  # from then on a detour might be taken
            if until_ns <= self.device.gpu_free_ns:
                return 0, None  # the GPU does not even come to the next attention before that
        count = self._in_flight.next_layer(layer, last) - layer
        attention, linear = self.stages.attention(layer, batch), self.stages.linear(layer, batch, ())
        return self.device.stretch(attention, linear, count, self._ahead, self._run_ahead, self._timeout_ns, until_ns)

    # -- steps -------------------------------------------------------------------------------------------------------

    @property
    def can_repeat(self) -> bool:
        """Whole steps may pass in one call now: nobody is in flight, and submissions cost the driver nothing."""
        return not (self.micro_batches or self.moves or self.device.submit_ns)

    def repeat(self, batch: Batch, steps: int, until_ns: int | None) -> list[int]:
        """At least one and at most ``steps`` decode steps of the same rows; ends after the first at or past
        ``until_ns``. Returns when each ended, as ``run`` would have."""
        times_ns: list[int] = []
        for step in range(steps):
            self._stats.begin(self.device.now_ns(), None)
            self.device.step_alone(self.stages.alone(batch, step))
            self.tokens += len(batch.segments)
            self._record(batch)
            times_ns.append(self.device.now_ns())
            if until_ns is not None and times_ns[-1] >= until_ns:
                break
        return times_ns
