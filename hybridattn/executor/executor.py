"""The layer-wise asynchronous executor: one step over the layers, and the four verbs.

One micro-batch, three layers; it joins at layer 1, is skipped at layer 2 and joins there one step later:

    gpu.compute   |attn1|-linear 1-|attn2|-linear 2-|sample| ... next step ... |attn2|-linear 2-|sample|
    gpu.h2d          |o1|                                                         |o2|
    gpu.d2h                        |qkv2|
    cpu.attention  1|                   |------- attention 2 -------|
    driver         poll: ready          poll: not ready                        poll: ready

The driver never computes and never waits for the CPU unless the policy says WAIT; it does wait for the GPU, so that it
is at most ``run_ahead`` layers ahead and its polls are fresh. Every wait is bounded by ``op_timeout_ns``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hybridattn.core.device import Device, Future
from hybridattn.core.records import StepRecord
from hybridattn.core.request import Request
from hybridattn.core.stages import Batch, CpuRow, MicroBatch, Sampled, Stages
from hybridattn.executor.decisions import Decisions
from hybridattn.executor.forecast import Forecast
from hybridattn.executor.in_flight import InFlight
from hybridattn.executor.moves import Moves
from hybridattn.executor.sampling_queue import SamplingQueue
from hybridattn.executor.step_stats import StepStats
from hybridattn.executor.submission import Submitter
from hybridattn.policies.base import DispatchView, Policy, StepView


class Executor:
    """Runs steps. ``on_release`` is called for a leaving request once its row is no longer in flight; ``any_leaving``
    says whether there is one at all, so that micro-batches are searched only then."""

    def __init__(
        self,
        stages: Stages,
        device: Device,
        policy: Policy,
        *,
        max_rows: int,
        run_ahead: int,
        op_timeout_ns: int,
        on_release: Callable[[Request], None],
        any_leaving: Callable[[], bool] = lambda: True,
    ) -> None:
        self.stages = stages
        self.device = device
        self.policy = policy
        self.steps: list[StepRecord] = []  # since the engine last took them
        self.on_step: Callable[[StepRecord], None] | None = self.steps.append
        self.tokens = 0.0  # made so far; a CPU row that advanced one layer counts 1 / num_layers
        self.forecast = Forecast(policy.costs) if policy.forecasts and policy.costs is not None else None
        self.moves = Moves(device, op_timeout_ns)
        self._run_ahead = run_ahead
        self._timeout_ns = op_timeout_ns
        self._ahead: deque[Future] = deque()
        self._stats = stats = StepStats()
        self._in_flight = in_flight = InFlight(stages, max_rows, self.forecast, on_release, any_leaving)
        self._sampling = SamplingQueue(device, in_flight, stats, op_timeout_ns, on_release)
        self._submitter = Submitter(stages, device, policy, in_flight, stats, self.forecast, self._sampling)
        self._decisions = Decisions(
            device, policy, in_flight, stats, self.forecast, self._submitter, stages.num_layers, op_timeout_ns
        )
        self._stretch = getattr(device, "stretch", None) if getattr(device, "resolves", False) else None

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Those in flight."""
        return self._in_flight.micro_batches

    @property
    def step_number(self) -> int:
        """Passes so far."""
        return self._stats.number

    def move(self, request: Request, source: str, blocks: Sequence[int], tokens: int, done: Callable[[], None]) -> None:
        """K,V of ``tokens`` tokens of a request goes from ``blocks`` of tier ``source`` to the blocks that it has now;
        ``done`` is called at the end of the first step after which it has arrived."""
        self.moves.add(self._submitter.move(request, source, blocks, tokens), done)

    # -- steps -------------------------------------------------------------------------------------------------------

    def run(self, batch: Batch | None, idle: Sequence[CpuRow], view: StepView | None = None) -> list[Sampled]:
        """One step for the GPU rows of ``batch``, or one round of detours when there are none."""
        with self.device.driving():
            return self._run(batch, idle, view)

    def _run(self, batch: Batch | None, idle: Sequence[CpuRow], view: StepView | None) -> list[Sampled]:
        self._stats.begin(self.device.now_ns())
        self._in_flight.begin_step()
        if view is not None:
            self.policy.begin(view)
        if batch is not None:
            self._stats.hold(batch)
            self._decisions.begin(batch)
        dispatched = self._dispatch(idle, batch) if idle else []
        self._stats.micro_batches, self._stats.cpu_rows = (
            len(self.micro_batches),
            sum([c.size for c in self.micro_batches]),
        )
        if batch is not None:
            self.stages.begin(batch)
        if batch is not None or dispatched:
            made = self._submitter.linear(-1, batch, dispatched)
            if batch is not None:
                self._layers(batch, made)
        else:
            self._decisions.round()
        sampled = self._collect()
        self._end_step(batch)
        if self.moves:
            self.moves.arrive()
        return sampled

    @property
    def can_repeat(self) -> bool:
        """Whole steps can be priced as one step: a device that resolves times, launches hidden, nobody in flight."""
        idle = not self.micro_batches and not self.moves
        return self._stretch is not None and idle and not self.device.submit_ns  # type: ignore[attr-defined]

    def repeat(self, batch: Batch, steps: int, until_ns: int | None) -> list[int]:
        """At least one and at most ``steps`` decode steps of the same rows; ends after the first at or past
        ``until_ns``. Returns when each ended, as ``run`` would have."""
        times_ns: list[int] = []
        rows = len(batch.segments)
        for step in range(steps):
            self._stats.begin(self.device.now_ns())
            self.device.step_alone(*self.stages.alone(batch, step))  # type: ignore[attr-defined]
            self.tokens += rows
            self._end_step(batch)
            times_ns.append(self.device.now_ns())
            if until_ns is not None and times_ns[-1] >= until_ns:
                break
        return times_ns

    def _layers(self, batch: Batch, made: Future) -> None:
        """The main loop: G goes through all layers; micro-batches join, are skipped, are waited for, or take a
        detour."""
        submit, submitter, decisions = self.device.submit, self._submitter, self._decisions
        micro_batches, standing, last = self.micro_batches, self._in_flight.standing, self.stages.num_layers - 1
        copies = batch.offloaded
        alone = self._stretch is not None and not copies  # layers may be passed in one step
        attended: Future | None = None
        layer = 0
        while layer <= last:
            if alone and layer < last:
                passed, future = self._skip_layers(layer, batch)
                if future is not None:  # the next layer is one at which something is decided
                    layer, made = layer + passed, future
            before: tuple[Future, ...] = (made,)  # each op names the one before it, so that a failure ends the step
            if copies:
                submitter.offload_kv(layer, copies, made)
                before += submitter.load_kv(layer, copies, attended)
            attended = submit(self.stages.attention(layer, batch), before)
            here = standing.get(layer)
            joined = decisions.join(here, layer, batch, made) if here else []
            made = submitter.linear(layer, batch, joined, attended)
            if decisions.takes_detours and micro_batches:
                decisions.detours(layer, attended, joined)
            self._bound_run_ahead(made)
            layer += 1

    def _skip_layers(self, layer: int, batch: Batch) -> tuple[int, Future | None]:
        """Layers at which nobody stands and nothing is decided, as one priced step of a device that resolves times."""
        if layer in self._in_flight.standing:
            return 0, None
        until_ns, micro_batches = None, self._in_flight.micro_batches
        if self._decisions.takes_detours and micro_batches:
            if self.policy.detours_wait or self.device.poll_ns:  # type: ignore[attr-defined]
                return 0, None
            until_ns = max(min([c.future.end_ns for c in micro_batches]), self.policy.next_detour_ns)
            if until_ns <= self.device.gpu_free_ns:  # type: ignore[attr-defined]
                return 0, None  # the GPU does not even come to the next attention before that
        assert self._stretch is not None
        count = self._in_flight.next_layer(layer, self.stages.num_layers - 1) - layer
        attention, linear = self.stages.attention(layer, batch), self.stages.linear(layer, batch, ())
        return self._stretch(attention, linear, count, self._ahead, self._run_ahead, self._timeout_ns, until_ns)

    def _bound_run_ahead(self, made: Future) -> None:
        self._ahead.append(made)
        while len(self._ahead) > self._run_ahead:
            self._ahead.popleft().wait(self._timeout_ns)

    # -- new micro-batches ---------------------------------------------------------------------------------------------

    def _dispatch(self, idle: Sequence[CpuRow], batch: Batch | None) -> list[MicroBatch]:
        """New micro-batches at layer 0, of the sizes that the policy names and the slabs have room for."""
        view = self._dispatch_view(idle, batch)
        sizes = self.policy.dispatch(view) or (() if batch is not None or self.micro_batches else (len(idle),))
        dispatched: list[MicroBatch] = []
        rest = list(idle)
        for size in sizes:
            micro_batch = self._in_flight.dispatch(rest, size)
            if micro_batch is None:
                break
            rest = rest[micro_batch.size :]
            dispatched.append(micro_batch)
        return dispatched

    def _dispatch_view(self, idle: Sequence[CpuRow], batch: Batch | None) -> DispatchView:
        return DispatchView(
            len(idle),
            len(self.micro_batches),
            len(batch.segments) if batch is not None else 0,
            tuple([r.position + 1 for r in idle]),
            self._stats.gpu_kv_tokens,
            batch.chunks if batch is not None else (),
            self._in_flight.next_number,
            tuple([(c.number, c.size) for c in self.micro_batches]),
        )

    # -- the end of a step -------------------------------------------------------------------------------------------

    def _collect(self) -> list[Sampled]:
        """Wait for the step to end; hand out the tokens of its rows, in the order in which they were sampled."""
        while self._ahead:
            self._ahead.popleft().wait(self._timeout_ns)
        self._submitter.check_copies()
        sampled = self._sampling.collect()
        self.tokens += self._stats.gpu_made
        self.tokens += self._stats.row_layers / self.stages.num_layers
        return sampled

    def _end_step(self, batch: Batch | None) -> None:
        if self.on_step is not None:
            self.on_step(self._stats.record(self.device.now_ns(), batch))
        self._stats.number += 1
