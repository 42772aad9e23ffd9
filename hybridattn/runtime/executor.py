"""The layer-wise asynchronous executor: one pass over the layers, and the four verbs.

One cohort, three layers; it joins at layer 1, is skipped at layer 2 and joins there one pass later:

    gpu.compute   |attn1|-linear 1-|attn2|-linear 2-|sample| ... next pass ... |attn2|-linear 2-|sample|
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

from hybridattn.core.device import Device, Ticket
from hybridattn.core.records import PassRecord
from hybridattn.core.stages import Batch, Cohort, CpuRow, Sampled, Stages
from hybridattn.policies.base import LaunchView, PassView, Policy
from hybridattn.runtime.fleet import Fleet
from hybridattn.runtime.forecast import Forecast
from hybridattn.runtime.moves import Moves
from hybridattn.runtime.request import Request
from hybridattn.runtime.sampling_queue import SamplingQueue
from hybridattn.runtime.submitter import Submitter
from hybridattn.runtime.tally import Tally
from hybridattn.runtime.verbs import Verbs


class Executor:
    """Runs passes. ``on_release`` is called for a leaving request once its row is no longer in flight; ``any_leaving``
    says whether there is one at all, so that cohorts are searched only then."""

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
        self.passes: list[PassRecord] = []  # since the engine last took them
        self.on_pass: Callable[[PassRecord], None] | None = self.passes.append
        self.tokens = 0.0  # made so far; a CPU row that advanced one layer counts 1 / num_layers
        self.forecast = Forecast(policy.costs) if policy.forecasts and policy.costs is not None else None
        self.moves = Moves(device, op_timeout_ns)
        self._run_ahead = run_ahead
        self._timeout_ns = op_timeout_ns
        self._ahead: deque[Ticket] = deque()
        self._tally = tally = Tally()
        self._fleet = fleet = Fleet(stages, max_rows, self.forecast, on_release, any_leaving)
        self._sampling = SamplingQueue(device, fleet, tally, op_timeout_ns, on_release)
        self._submitter = Submitter(stages, device, policy, fleet, tally, self.forecast, self._sampling)
        self._verbs = Verbs(
            device, policy, fleet, tally, self.forecast, self._submitter, stages.num_layers, op_timeout_ns
        )
        self._stretch = getattr(device, "stretch", None) if getattr(device, "resolves", False) else None

    @property
    def cohorts(self) -> list[Cohort]:
        """Those in flight."""
        return self._fleet.cohorts

    @property
    def pass_number(self) -> int:
        """Passes so far."""
        return self._tally.number

    def move(self, request: Request, source: str, blocks: Sequence[int], tokens: int, done: Callable[[], None]) -> None:
        """K,V of ``tokens`` tokens of a request goes from ``blocks`` of tier ``source`` to the blocks that it has now;
        ``done`` is called at the end of the first pass after which it has arrived."""
        self.moves.add(self._submitter.move(request, source, blocks, tokens), done)

    # -- passes ------------------------------------------------------------------------------------------------------

    def run(self, batch: Batch | None, idle: Sequence[CpuRow], view: PassView | None = None) -> list[Sampled]:
        """One pass for the GPU rows of ``batch``, or one round of detours when there are none."""
        with self.device.driving():
            return self._run(batch, idle, view)

    def _run(self, batch: Batch | None, idle: Sequence[CpuRow], view: PassView | None) -> list[Sampled]:
        self._tally.begin(self.device.now_ns())
        self._fleet.begin_pass()
        if view is not None:
            self.policy.begin(view)
        if batch is not None:
            self._tally.hold(batch)
            self._verbs.begin(batch)
        launched = self._launch(idle, batch) if idle else []
        self._tally.cohorts, self._tally.cpu_rows = len(self.cohorts), sum([c.size for c in self.cohorts])
        if batch is not None:
            self.stages.begin(batch)
        if batch is not None or launched:
            made = self._submitter.linear(-1, batch, launched)
            if batch is not None:
                self._pass(batch, made)
        else:
            self._verbs.round()
        sampled = self._collect()
        self._end_pass(batch)
        if self.moves:
            self.moves.arrive()
        return sampled

    @property
    def can_repeat(self) -> bool:
        """Whole passes can be priced as one step: a device that resolves times, launches hidden, nobody in flight."""
        idle = not self.cohorts and not self.moves
        return self._stretch is not None and idle and not self.device.submit_ns  # type: ignore[attr-defined]

    def repeat(self, batch: Batch, passes: int, until_ns: int | None) -> list[int]:
        """At least one and at most ``passes`` decode passes of the same rows; ends after the first at or past
        ``until_ns``. Returns when each ended, as ``run`` would have."""
        times_ns: list[int] = []
        rows = len(batch.segments)
        for step in range(passes):
            self._tally.begin(self.device.now_ns())
            self.device.pass_alone(*self.stages.alone(batch, step))  # type: ignore[attr-defined]
            self.tokens += rows
            self._end_pass(batch)
            times_ns.append(self.device.now_ns())
            if until_ns is not None and times_ns[-1] >= until_ns:
                break
        return times_ns

    def _pass(self, batch: Batch, made: Ticket) -> None:
        """The main loop: G goes through all layers; cohorts join, are skipped, are waited for, or take a detour."""
        submit, submitter, verbs = self.device.submit, self._submitter, self._verbs
        cohorts, standing, last = self.cohorts, self._fleet.standing, self.stages.num_layers - 1
        copies = batch.handed_down
        alone = self._stretch is not None and not copies  # layers may be passed in one step
        attended: Ticket | None = None
        layer = 0
        while layer <= last:
            if alone and layer < last:
                passed, ticket = self._pass_alone(layer, batch)
                if ticket is not None:  # the next layer is one at which something is decided
                    layer, made = layer + passed, ticket
            before: tuple[Ticket, ...] = (made,)  # each op names the one before it, so that a failure ends the pass
            if copies:
                submitter.hand_down(layer, copies, made)
                before += submitter.pull(layer, copies, attended)
            attended = submit(self.stages.attention(layer, batch), before)
            here = standing.get(layer)
            joined = verbs.join(here, layer, batch, made) if here else []
            made = submitter.linear(layer, batch, joined, attended)
            if verbs.takes_detours and cohorts:
                verbs.detours(layer, attended, joined)
            self._bound_run_ahead(made)
            layer += 1

    def _pass_alone(self, layer: int, batch: Batch) -> tuple[int, Ticket | None]:
        """Layers at which nobody stands and nothing is decided, as one priced step of a device that resolves times."""
        if layer in self._fleet.standing:
            return 0, None
        until_ns, cohorts = None, self._fleet.cohorts
        if self._verbs.takes_detours and cohorts:
            if self.policy.detours_wait or self.device.poll_ns:  # type: ignore[attr-defined]
                return 0, None
            until_ns = max(min([c.ticket.end_ns for c in cohorts]), self.policy.quiet_until_ns)
            if until_ns <= self.device.gpu_free_ns:  # type: ignore[attr-defined]
                return 0, None  # the GPU does not even come to the next attention before that
        assert self._stretch is not None
        count = self._fleet.next_layer(layer, self.stages.num_layers - 1) - layer
        attention, linear = self.stages.attention(layer, batch), self.stages.linear(layer, batch, ())
        return self._stretch(attention, linear, count, self._ahead, self._run_ahead, self._timeout_ns, until_ns)

    def _bound_run_ahead(self, made: Ticket) -> None:
        self._ahead.append(made)
        while len(self._ahead) > self._run_ahead:
            self._ahead.popleft().wait(self._timeout_ns)

    # -- new cohorts -------------------------------------------------------------------------------------------------

    def _launch(self, idle: Sequence[CpuRow], batch: Batch | None) -> list[Cohort]:
        """New cohorts at layer 0, of the sizes that the policy names and the slabs have room for."""
        view = self._launch_view(idle, batch)
        sizes = self.policy.launch(view) or (() if batch is not None or self.cohorts else (len(idle),))
        launched: list[Cohort] = []
        rest = list(idle)
        for size in sizes:
            cohort = self._fleet.launch(rest, size)
            if cohort is None:
                break
            rest = rest[cohort.size :]
            launched.append(cohort)
        return launched

    def _launch_view(self, idle: Sequence[CpuRow], batch: Batch | None) -> LaunchView:
        return LaunchView(
            len(idle),
            len(self.cohorts),
            len(batch.segments) if batch is not None else 0,
            tuple([r.position + 1 for r in idle]),
            self._tally.gpu_keys,
            batch.chunks if batch is not None else (),
            self._fleet.next_number,
            tuple([(c.number, c.size) for c in self.cohorts]),
        )

    # -- the end of a pass -------------------------------------------------------------------------------------------

    def _collect(self) -> list[Sampled]:
        """Wait for the pass to end; hand out the tokens of its rows, in the order in which they were sampled."""
        while self._ahead:
            self._ahead.popleft().wait(self._timeout_ns)
        self._submitter.check_copies()
        sampled = self._sampling.collect()
        self.tokens += self._tally.gpu_made
        self.tokens += self._tally.row_layers / self.stages.num_layers
        return sampled

    def _end_pass(self, batch: Batch | None) -> None:
        if self.on_pass is not None:
            self.on_pass(self._tally.record(self.device.now_ns(), batch))
        self._tally.number += 1
