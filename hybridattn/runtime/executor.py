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
from hybridattn.core.stages import Batch, Cohort, CpuRow, Sampled, Segment, Stages
from hybridattn.policies.base import CohortView, LaunchView, LayerView, Policy, Verb
from hybridattn.runtime.request import Request, State
from hybridattn.runtime.slots import SlotRanges


class Executor:
    """Runs passes. ``on_release`` is called for a leaving request once its row is no longer in flight."""

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
    ) -> None:
        self.stages = stages
        self.device = device
        self.policy = policy
        self.cohorts: list[Cohort] = []
        self.passes: list[PassRecord] = []  # since the engine last took them
        self.pass_number = 0
        self._slots = SlotRanges(max_rows)
        self._run_ahead = run_ahead
        self._timeout_ns = op_timeout_ns
        self._on_release = on_release
        self._ahead: deque[Ticket] = deque()
        self._sampling: list[tuple[Ticket, tuple[Segment, ...], tuple[Cohort, ...]]] = []
        self._last_down: Ticket | None = None  # newest op of gpu.d2h: the lane is in order
        self._number = 0
        self._tally = Tally()

    # -- passes ------------------------------------------------------------------------------------------------------

    def run(self, batch: Batch | None, idle: Sequence[CpuRow]) -> list[Sampled]:
        """One pass for the GPU rows of ``batch``, or one round of detours when there are none."""
        started_ns = self.device.now_ns()
        self._tally = Tally()
        launched = self._launch(idle, batch)
        cohorts, cpu_rows = len(self.cohorts), sum(len(c.rows) for c in self.cohorts)
        if batch is not None:
            self.stages.begin(batch)
        if batch is not None or launched:
            made = self._submit_linear(-1, batch, launched)
            if batch is not None:
                self._pass(batch, made)
        else:
            self._round()
        sampled = self._collect()
        self._record(started_ns, batch, cohorts, cpu_rows)
        self.pass_number += 1
        return sampled

    def _pass(self, batch: Batch, made: Ticket) -> None:
        """The main loop: G goes through all layers; cohorts join, are skipped, are waited for, or take a detour."""
        attended: Ticket | None = None
        for layer in range(self.stages.num_layers):
            self._hand_down(layer, batch, made)
            pulled = self._pull(layer, batch, attended)
            attended = self.device.submit(self.stages.attention(layer, batch), pulled)
            joined = [c for c in self.cohorts if c.layer == layer and self._ask(c, layer, batch, made)]
            made = self._submit_linear(layer, batch, joined)
            self._detours(layer, batch)
            self._bound_run_ahead(made)

    def _round(self) -> None:
        """No GPU rows: wait, bounded, for the earliest cohort, then give each ready one its linear stage."""
        if not self.cohorts:
            return
        self.device.wait_any([_ticket(c) for c in self.cohorts], self._timeout_ns)
        by_layer: dict[int, list[Cohort]] = {}
        for cohort in self.cohorts:
            if self._poll(cohort):
                by_layer.setdefault(cohort.layer, []).append(cohort)
        for layer, ready in by_layer.items():
            self._tally.detours += len(ready)
            self._submit_linear(layer, None, ready)

    # -- the verbs ---------------------------------------------------------------------------------------------------

    def _poll(self, cohort: Cohort) -> bool:
        """Ask whether the cohort's attention has ended; raises its error, and StallError past the time-out."""
        ticket = _ticket(cohort)
        self._tally.polls_made += 1
        if ticket.done():
            if ticket.error is not None:
                ticket.wait(0)  # raises with the op's name
            self._tally.polls_hit += 1
            return True
        if self.device.now_ns() - cohort.submitted_ns > self._timeout_ns:
            raise StallError(f"{ticket.op.describe()} did not end within {self._timeout_ns / 1e9:g} s")
        return False

    def _ask(self, cohort: Cohort, layer: int, batch: Batch, made: Ticket) -> bool:
        """True when the cohort enters the linear stage of ``layer`` together with the GPU rows.

        If it is not ready yet, the poll is put off until the GPU has come to its attention of this layer (``made`` has
        ended): the driver then is less than a layer ahead, and the GPU still has that attention to do meanwhile.
        """
        if not _ticket(cohort).done():
            made.wait(self._timeout_ns)
        ready = self._poll(cohort)
        verb = self.policy.ask(self._view(cohort, ready), self._where(layer, batch))
        if verb is Verb.SKIP:
            self._tally.skips += 1
            return False
        if not ready:  # WAIT, or a JOIN that has to wait
            self._tally.waits += 1
            _ticket(cohort).wait(self._timeout_ns)
        self._tally.joins += 1
        return True

    def _detours(self, layer: int, batch: Batch) -> None:
        """Linear stages of ready cohorts elsewhere, as long as the policy wants them."""
        if type(self.policy).detour is Policy.detour or not self.cohorts:
            return
        while ready := [c for c in self.cohorts if c.layer != layer + 1 and _ticket(c).done()]:
            views = tuple(self._view(c, True) for c in ready)
            chosen = self.policy.detour(views, self._where(layer, batch))
            if chosen is None:
                return
            cohort = next(c for c in ready if c.number == chosen)
            self._poll(cohort)
            self._tally.detours += 1
            self._submit_linear(cohort.layer, None, [cohort])

    def _view(self, cohort: Cohort, ready: bool) -> CohortView:
        same_pass = cohort.submitted_pass == self.pass_number
        age_ns = self.device.now_ns() - cohort.submitted_ns
        return CohortView(cohort.number, len(cohort.rows), cohort.layer, ready, same_pass, age_ns)

    def _where(self, layer: int, batch: Batch) -> LayerView:
        return LayerView(layer, self.stages.num_layers, len(batch.segments), self.device.now_ns())

    # -- submitting --------------------------------------------------------------------------------------------------

    def _submit_linear(self, layer: int, batch: Batch | None, cohorts: Sequence[Cohort]) -> Ticket:
        """post(layer) and pre(layer + 1) for the rows present; then the cohorts' next attention goes to the CPU."""
        fetched = () if layer < 0 else tuple(self.device.submit(self.stages.fetch(c), (_ticket(c),)) for c in cohorts)
        ticket = self.device.submit(self.stages.linear(layer, batch, cohorts), fetched)
        last = layer == self.stages.num_layers - 1
        if last:
            sampling = tuple(s for s in batch.segments if s.samples) if batch is not None else ()
            self._sampling.append((ticket, sampling, tuple(cohorts)))
        for cohort in cohorts:
            self._tally.layers_advanced += layer >= 0
            if last:
                self.cohorts.remove(cohort)
            else:
                self._send_down(cohort, layer + 1, ticket)
        return ticket

    def _send_down(self, cohort: Cohort, layer: int, made: Ticket) -> None:
        """q, k, v of the cohort go down and its attention of ``layer`` is queued behind the copy."""
        if self._bury(cohort):
            return
        cohort.layer = layer
        cohort.submitted_pass = self.pass_number
        cohort.submitted_ns = self.device.now_ns()
        self._last_down = self.device.submit(self.stages.send(cohort), (made,))
        cohort.ticket = self.device.submit(self.stages.cpu_attention(cohort, self.policy.priority), (self._last_down,))

    def _bury(self, cohort: Cohort) -> bool:
        """Rows whose request left die: no op made from now on touches their blocks. True when all rows are dead."""
        leaving = [i for i, r in enumerate(cohort.rows) if i not in cohort.dead and _request(r).state is State.LEAVING]
        if not leaving:
            return False
        cohort.dead.update(leaving)
        for i in leaving:
            self._on_release(_request(cohort.rows[i]))
        if len(cohort.dead) == len(cohort.rows):
            self.cohorts.remove(cohort)
            self._close(cohort)
            return True
        self.stages.replan(cohort)
        return False

    def _hand_down(self, layer: int, batch: Batch, made: Ticket) -> None:
        for segment in batch.handed_down:
            self._last_down = self.device.submit(self.stages.hand_down(layer, segment), (made,))

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
        if not idle:
            return []
        view = LaunchView(len(idle), len(self.cohorts), len(batch.segments) if batch is not None else 0)
        sizes = self.policy.launch(view) or (() if batch is not None or self.cohorts else (len(idle),))
        launched: list[Cohort] = []
        rest = list(idle)
        for size in sizes:
            first, size = self._slots.take(min(size, len(rest)))
            if size == 0:
                break
            cohort = Cohort(self._number, rest[:size], first, self.pass_number)
            self._number += 1
            rest = rest[size:]
            for row in cohort.rows:
                _request(row).in_flight = True
            self.stages.launch(cohort)
            self.cohorts.append(cohort)
            launched.append(cohort)
        return launched

    def _collect(self) -> list[Sampled]:
        """Wait for the pass to end; hand out the tokens of its rows, in the order in which they were sampled."""
        while self._ahead:
            self._ahead.popleft().wait(self._timeout_ns)
        sampled: list[Sampled] = []
        for ticket, segments, cohorts in self._sampling:
            tokens = ticket.wait(self._timeout_ns)
            now_ns = self.device.now_ns()
            owners: list[Request | None] = [s.request for s in segments]  # type: ignore[misc]
            for cohort in cohorts:
                owners += [None if i in cohort.dead else _request(r) for i, r in enumerate(cohort.rows)]
                self._close(cohort)
            for i, owner in enumerate(owners):
                if owner is not None and self._keeps(owner):
                    sampled.append(Sampled(owner, tokens[i] if tokens is not None else 0, now_ns))
        self._sampling.clear()
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
        self._slots.give_back(cohort.first_slot, len(cohort.rows))
        self.stages.finish(cohort)

    def _record(self, started_ns: int, batch: Batch | None, cohorts: int, cpu_rows: int) -> None:
        t = self._tally
        self.passes.append(
            PassRecord(
                index=self.pass_number,
                start_ns=started_ns,
                end_ns=self.device.now_ns(),
                gpu_rows=len(batch.segments) if batch is not None else 0,
                prefill_tokens=batch.prefill_tokens if batch is not None else 0,
                cpu_rows=cpu_rows,
                cohorts=cohorts,
                layers_advanced=t.layers_advanced,
                polls_made=t.polls_made,
                polls_hit=t.polls_hit,
                joins=t.joins,
                skips=t.skips,
                waits=t.waits,
                detours=t.detours,
            )
        )


class Tally:
    """Counts of the pass under way."""

    __slots__ = ("detours", "joins", "layers_advanced", "polls_hit", "polls_made", "skips", "waits")

    def __init__(self) -> None:
        self.polls_made = self.polls_hit = self.joins = self.skips = self.waits = self.detours = (
            self.layers_advanced
        ) = 0


def _ticket(cohort: Cohort) -> Ticket:
    assert cohort.ticket is not None, "a cohort in flight always has a ticket"
    return cohort.ticket


def _request(row: CpuRow) -> Request:
    assert isinstance(row.request, Request)
    return row.request
