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
from hybridattn.core.errors import StallError
from hybridattn.core.records import PassRecord
from hybridattn.core.stages import GPU_TIER, Batch, Cohort, CpuRow, Sampled, Segment, Stages
from hybridattn.policies.base import CohortView, LaunchView, LayerView, PassView, Policy, Verb
from hybridattn.runtime.fleet import Fleet, leaving_rows, request_of, ticket_of
from hybridattn.runtime.forecast import Forecast
from hybridattn.runtime.moves import Moves
from hybridattn.runtime.request import Request, State
from hybridattn.runtime.tally import Tally


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
        self.pass_number = 0
        self.tokens = 0.0  # made so far; a CPU row that advanced one layer counts 1 / num_layers
        self.forecast = Forecast(policy.costs) if policy.forecasts and policy.costs is not None else None
        self.moves = Moves(device, op_timeout_ns)
        self._fleet = Fleet(max_rows)
        self._run_ahead = run_ahead
        self._timeout_ns = op_timeout_ns
        self._on_release = on_release
        self._any_leaving = any_leaving
        self._ahead: deque[Ticket] = deque()
        self._sampling: list[tuple[Ticket, tuple[Segment, ...], tuple[Cohort, ...]]] = []
        self._copies: deque[Ticket] = deque()  # hand-downs not known to have ended
        self._last_down: Ticket | None = None  # newest op of gpu.d2h: the lane is in order
        self._tally = Tally(0)
        self._batch_keys = self._batch_tokens = 0
        self._takes_detours = type(policy).detour is not Policy.detour
        self._stretch = getattr(device, "stretch", None) if getattr(device, "resolves", False) else None

    @property
    def cohorts(self) -> list[Cohort]:
        """Those in flight."""
        return self._fleet.cohorts

    def move(self, request: Request, source: str, blocks: Sequence[int], tokens: int, done: Callable[[], None]) -> None:
        """K,V of ``tokens`` tokens of a request goes from ``blocks`` of tier ``source`` to the blocks that it has now;
        ``done`` is called at the end of the first pass after which it has arrived."""
        after = () if self._last_down is None else (self._last_down,)
        ticket = self.device.submit(self.stages.move(request, source, blocks, tokens), after)  # type: ignore[attr-defined]
        if source == GPU_TIER:
            self._last_down = ticket
        self.moves.add(ticket, done)

    # -- passes ------------------------------------------------------------------------------------------------------

    def run(self, batch: Batch | None, idle: Sequence[CpuRow], view: PassView | None = None) -> list[Sampled]:
        """One pass for the GPU rows of ``batch``, or one round of detours when there are none."""
        self._tally = Tally(self.device.now_ns())
        if view is not None:
            self.policy.begin(view)
        self._batch_keys = 0 if batch is None else sum([s.start + 1 for s in batch.segments if not s.prefill])
        self._batch_tokens = 0 if batch is None else batch.num_tokens
        launched = self._launch(idle, batch) if idle else []
        self._tally.cohorts, self._tally.cpu_rows = len(self.cohorts), sum(len(c.rows) for c in self.cohorts)
        if batch is not None:
            self.stages.begin(batch)
        if batch is not None or launched:
            made = self._submit_linear(-1, batch, launched)
            if batch is not None:
                self._pass(batch, made)
        else:
            self._round()
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
            self._tally = Tally(self.device.now_ns())
            self.device.pass_alone(*self.stages.alone(batch, step))  # type: ignore[attr-defined]
            self.tokens += rows
            self._end_pass(batch)
            times_ns.append(self.device.now_ns())
            if until_ns is not None and times_ns[-1] >= until_ns:
                break
        return times_ns

    def _pass(self, batch: Batch, made: Ticket) -> None:
        """The main loop: G goes through all layers; cohorts join, are skipped, are waited for, or take a detour."""
        submit, standing, last = self.device.submit, self._fleet.standing, self.stages.num_layers - 1
        copies = batch.handed_down
        attended: Ticket | None = None
        layer = 0
        while layer <= last:
            if self._stretch is not None and not copies and layer < last:
                passed, ticket = self._pass_alone(layer, batch)
                if ticket is not None:
                    layer, made = layer + passed, ticket
                    continue
            before: tuple[Ticket, ...] = (made,)  # each op names the one before it, so that a failure ends the pass
            if copies:
                self._hand_down(layer, batch, made)
                before += self._pull(layer, batch, attended)
            attended = submit(self.stages.attention(layer, batch), before)
            here = standing.get(layer)
            joined = self._join(here, layer, batch, made) if here else []
            made = self._submit_linear(layer, batch, joined, attended)
            if self._takes_detours and self.cohorts:
                self._detours(layer, batch, attended, self._batch_tokens + sum([len(c.rows) for c in joined]))
            self._bound_run_ahead(made)
            layer += 1

    def _pass_alone(self, layer: int, batch: Batch) -> tuple[int, Ticket | None]:
        """Layers at which nobody stands and nothing is decided, as one priced step of a device that resolves times."""
        last = self.stages.num_layers - 1
        count = self._fleet.next_layer(layer, last) - layer
        until_ns = None
        if self._takes_detours and self.cohorts:
            if self.policy.detours_wait or self.device.poll_ns:  # type: ignore[attr-defined]
                return 0, None
            until_ns = max(min([c.ticket.end_ns for c in self.cohorts]), self.policy.quiet_until_ns)  # type: ignore[union-attr]
        if count <= 0:
            return 0, None
        assert self._stretch is not None
        attention, linear = self.stages.attention(layer, batch), self.stages.linear(layer, batch, ())
        return self._stretch(attention, linear, count, self._ahead, self._run_ahead, self._timeout_ns, until_ns)

    def _round(self) -> None:
        """No GPU rows: wait, bounded, for the earliest cohort, then give each ready one its linear stage."""
        if not self.cohorts:
            return
        self.device.wait_any([ticket_of(c) for c in self.cohorts], self._timeout_ns)
        by_layer: dict[int, list[Cohort]] = {}
        for cohort in self.cohorts:
            if self._poll(cohort):
                by_layer.setdefault(cohort.layer, []).append(cohort)
        for layer, ready in by_layer.items():
            self._tally.detours += len(ready)
            if self.forecast is not None:
                self.forecast.gpu_works(self.device.now_ns(), sum(len(c.rows) for c in ready))
            self._submit_linear(layer, None, ready)

    # -- the verbs ---------------------------------------------------------------------------------------------------

    def _poll(self, cohort: Cohort) -> bool:
        """Ask whether the cohort's attention has ended; raises its error, and StallError past the time-out."""
        ticket = ticket_of(cohort)
        self._tally.polls_made += 1
        if ticket.done():
            if ticket.error is not None:
                ticket.wait(0)  # raises with the op's name
            self._tally.polls_hit += 1
            if self.forecast is not None:
                self.forecast.returned(cohort)
            return True
        if self.device.now_ns() - cohort.submitted_ns > self._timeout_ns:
            raise StallError(f"{ticket.op.describe()} did not end within {self._timeout_ns / 1e9:g} s")
        return False

    def _join(self, here: list[Cohort], layer: int, batch: Batch, made: Ticket) -> list[Cohort]:
        """The cohorts that enter the linear stage of ``layer`` together with the GPU rows."""
        forecast = self.forecast
        if forecast is None:
            return [c for c in tuple(here) if self._ask(c, layer, batch, made)]
        made.wait(self._timeout_ns)  # predictions start from where the GPU is
        forecast.gpu_free_ns = self.device.now_ns() + forecast.attention_ns(batch, self._batch_keys)
        joined = [c for c in tuple(here) if self._ask(c, layer, batch, made)]
        forecast.gpu_works(self.device.now_ns(), self._batch_tokens + sum([len(c.rows) for c in joined]))
        return joined

    def _ask(self, cohort: Cohort, layer: int, batch: Batch, made: Ticket) -> bool:
        """True when the cohort enters the linear stage of ``layer`` together with the GPU rows.

        If it is not ready yet, the poll is put off until the GPU has come to its attention of this layer (``made`` has
        ended): the driver then is less than a layer ahead, and the GPU still has that attention to do meanwhile.
        """
        if not ticket_of(cohort).done():
            made.wait(self._timeout_ns)
        ready = self._poll(cohort)
        view, at = self._view(cohort, ready), self._where(layer, batch, self._batch_tokens)
        verb = self.policy.ask(view, at)
        if verb is Verb.SKIP or not (ready or self._wait(cohort, view, at)):
            self._tally.skips += 1
            return False
        self._tally.joins += 1
        return True

    def _wait(self, cohort: Cohort, view: CohortView, at: LayerView) -> bool:
        """Wait for the cohort within the policy's patience; False when that passed first."""
        self._tally.waits += 1
        patience_ns = self.policy.patience_ns(view, at)
        ticket = ticket_of(cohort)
        if patience_ns is None or patience_ns >= self._timeout_ns:
            ticket.wait(self._timeout_ns)
        elif not ticket.done():
            try:
                ticket.wait(max(0, patience_ns))
            except StallError:  # not the device's failure: the policy gives up and asks again later
                return False
        if self.forecast is not None:
            self.forecast.returned(cohort)
        return True

    def _detours(self, layer: int, batch: Batch, attended: Ticket, tokens: int) -> None:
        """Linear stages of cohorts elsewhere, as long as the policy wants them.

        Decided when the GPU has come to the linear stage of this layer, which it still has to do meanwhile.
        """
        attended.wait(self._timeout_ns)
        if self.forecast is not None:
            self.forecast.gpu_free_ns = self.device.now_ns() + self.forecast.linear_ns(tokens)
        policy, after = self.policy, layer + 1
        while self.device.now_ns() >= policy.quiet_until_ns:
            ready = [c.ticket.done() for c in self.cohorts]  # type: ignore[union-attr]
            for c, r in zip(self.cohorts, ready, strict=True):
                if c.layer != after and (r or policy.detours_wait):
                    break
            else:
                return
            at = self._where(layer, batch, tokens)
            views = tuple([self._view(c, r) for c, r in zip(self.cohorts, ready, strict=True)])
            chosen = policy.detour(views, at)
            if chosen is None:
                return
            where = next(i for i, v in enumerate(views) if v.number == chosen)
            cohort = self.cohorts[where]
            if not ready[where] and not self._wait(cohort, views[where], at):
                return
            self._poll(cohort)
            self._tally.detours += 1
            if self.forecast is not None:
                self.forecast.gpu_works(self.device.now_ns(), len(cohort.rows))
            self._submit_linear(cohort.layer, None, [cohort])

    def _view(self, cohort: Cohort, ready: bool) -> CohortView:
        return CohortView(
            cohort.number,
            len(cohort.rows),
            cohort.layer,
            ready,
            cohort.submitted_pass == self.pass_number,
            self.device.now_ns() - cohort.submitted_ns,
            self._fleet.keys[cohort.number],
            self.forecast.return_ns(cohort) if self.forecast is not None else 0,
        )

    def _where(self, layer: int, batch: Batch, tokens: int) -> LayerView:
        return LayerView(
            layer,
            self.stages.num_layers,
            len(batch.segments),
            self.device.now_ns(),
            self._batch_keys,
            tokens,
            self.forecast.gpu_free_ns if self.forecast is not None else 0,
            self.forecast.cpu_free_ns if self.forecast is not None else 0,
        )

    # -- submitting --------------------------------------------------------------------------------------------------

    def _submit_linear(
        self, layer: int, batch: Batch | None, cohorts: Sequence[Cohort], attended: Ticket | None = None
    ) -> Ticket:
        """post(layer) and pre(layer + 1) for the rows present; then the cohorts' next attention goes to the CPU."""
        submit = self.device.submit
        after: tuple[Ticket, ...] = () if attended is None else (attended,)
        if cohorts and layer >= 0:
            after += tuple([submit(self.stages.fetch(c), (ticket_of(c),)) for c in cohorts])
        ticket = submit(self.stages.linear(layer, batch, cohorts), after)
        last = layer == self.stages.num_layers - 1
        if last:
            sampling = tuple(s for s in batch.segments if s.samples) if batch is not None else ()
            self._sampling.append((ticket, sampling, tuple(cohorts)))
        for cohort in cohorts:
            if layer >= 0:
                self._tally.layers_advanced += 1
                self._tally.row_layers += len(cohort.rows)
                self._fleet.depart(cohort)
            if last:
                self.cohorts.remove(cohort)
            else:
                self._send_down(cohort, layer + 1, ticket)
        return ticket

    def _send_down(self, cohort: Cohort, layer: int, made: Ticket) -> None:
        """q, k, v of the cohort go down and its attention of ``layer`` is queued behind the copy."""
        if self._bury(cohort):
            return
        self._fleet.stand(cohort, layer)
        cohort.submitted_pass = self.pass_number
        cohort.submitted_ns = self.device.now_ns()
        self._last_down = down = self.device.submit(self.stages.send(cohort), (made,))
        priority = self.policy.priority_of(cohort.number)
        cohort.ticket = self.device.submit(self.stages.cpu_attention(cohort, priority), (down,))
        if self.forecast is not None:
            self.forecast.sent(cohort, self._fleet.keys[cohort.number], cohort.submitted_ns)

    def _bury(self, cohort: Cohort) -> bool:
        """Rows whose request left die: no op made from now on touches their blocks. True when all rows are dead."""
        if not self._any_leaving():
            return False
        leaving = leaving_rows(cohort)
        if not leaving:
            return False
        cohort.dead.update(leaving)
        for i in leaving:
            self._on_release(request_of(cohort.rows[i]))
        if len(cohort.dead) == len(cohort.rows):
            self.cohorts.remove(cohort)
            self._close(cohort)
            return True
        self._fleet.count_keys(cohort)
        self.stages.replan(cohort)
        return False

    def _hand_down(self, layer: int, batch: Batch, made: Ticket) -> None:
        for segment in batch.handed_down:
            self._last_down = self.device.submit(self.stages.hand_down(layer, segment), (made,))
            self._copies.append(self._last_down)

    def _pull(self, layer: int, batch: Batch, attended: Ticket | None) -> tuple[Ticket, ...]:
        """Earlier K,V of a chunked CPU-tier prefill, once the layer before has done with the staging area."""
        after = tuple(t for t in (attended, self._last_down) if t is not None)
        return tuple(self.device.submit(self.stages.pull(layer, s), after) for s in batch.handed_down if s.start > 0)

    def _bound_run_ahead(self, made: Ticket) -> None:
        self._ahead.append(made)
        while len(self._ahead) > self._run_ahead:
            self._ahead.popleft().wait(self._timeout_ns)

    # -- cohorts and tokens ------------------------------------------------------------------------------------------

    def _launch(self, idle: Sequence[CpuRow], batch: Batch | None) -> list[Cohort]:
        """New cohorts at layer 0, of the sizes that the policy names and the slabs have room for."""
        view = self._launch_view(idle, batch)
        sizes = self.policy.launch(view) or (() if batch is not None or self.cohorts else (len(idle),))
        launched: list[Cohort] = []
        rest = list(idle)
        for size in sizes:
            cohort = self._fleet.launch(rest, size, self.pass_number)
            if cohort is None:
                break
            rest = rest[len(cohort.rows) :]
            self.stages.launch(cohort)
            launched.append(cohort)
        return launched

    def _launch_view(self, idle: Sequence[CpuRow], batch: Batch | None) -> LaunchView:
        segments = () if batch is None else batch.segments
        prefill = tuple([(s.num_tokens, s.start + s.num_tokens) for s in segments if s.prefill])
        return LaunchView(
            len(idle),
            len(self.cohorts),
            len(segments),
            tuple([r.position + 1 for r in idle]),
            self._batch_keys,
            prefill,
            self._fleet.next_number,
            tuple([(c.number, len(c.rows)) for c in self.cohorts]),
        )

    def _check_copies(self) -> None:
        """Raise the error of a hand-down that failed. A token that would read it comes later: its own copy goes down
        behind this one, and has ended when the token is handed out."""
        while self._copies and self._copies[0].done():
            self._copies.popleft().wait(0)

    def _collect(self) -> list[Sampled]:
        """Wait for the pass to end; hand out the tokens of its rows, in the order in which they were sampled."""
        while self._ahead:
            self._ahead.popleft().wait(self._timeout_ns)
        self._check_copies()
        sampled: list[Sampled] = []
        for ticket, segments, cohorts in self._sampling:
            tokens = ticket.wait(self._timeout_ns)
            now_ns = self.device.now_ns()
            owners: list[Request | None] = [s.request for s in segments]  # type: ignore[misc]
            self.tokens += len(owners)
            for cohort in cohorts:
                owners += [None if i in cohort.dead else request_of(r) for i, r in enumerate(cohort.rows)]
                self._close(cohort)
            for i, owner in enumerate(owners):
                if owner is not None and self._keeps(owner):
                    sampled.append(Sampled(owner, tokens[i] if tokens is not None else 0, now_ns))
        self._sampling.clear()
        self.tokens += self._tally.row_layers / self.stages.num_layers
        return sampled

    def _keeps(self, request: Request) -> bool:
        """A request that left while its row was in flight gets no token; its blocks go back now."""
        left = request.state is State.LEAVING
        if request.in_flight:
            request.in_flight = False
            if left:
                self._on_release(request)
        return not left

    def _close(self, cohort: Cohort) -> None:
        self._fleet.close(cohort)
        self.stages.finish(cohort)
        if self.forecast is not None:
            self.forecast.forget(cohort)

    def _end_pass(self, batch: Batch | None) -> None:
        if self.on_pass is not None:
            self.on_pass(self._tally.record(self.pass_number, self.device.now_ns(), batch))
        self.pass_number += 1
