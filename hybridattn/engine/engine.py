"""The engine loop: arrivals, one step at a time, tokens to their requests, records at the end."""

from __future__ import annotations

import os
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hybridattn.core.config import EngineConfig
from hybridattn.core.device import Device, Span
from hybridattn.core.errors import DeviceError, HybridAttnError, InputError
from hybridattn.core.records import RequestRecord, RunRecords, StepRecord
from hybridattn.core.request import DeclaredTokens, Request
from hybridattn.core.stages import GPU_TIER, AheadStages, Batch, Stages
from hybridattn.core.weakly import weakly
from hybridattn.engine.at_work import AtWork
from hybridattn.engine.output import Event, OutputProcessor
from hybridattn.engine.quiet_steps import QuietSteps
from hybridattn.engine.request_queue import RequestQueue
from hybridattn.executor.fast_path import FastExecutor, executor_class
from hybridattn.kv.manager import KVManager, Move
from hybridattn.kv.prefixes import PageStore
from hybridattn.policies.base import Policy, StepView
from hybridattn.scheduler.scheduler import Scheduler, SchedulerOutput


class _Holder(weakref.ref):
    """Who waits for requests; when it goes away they are for nobody.

    Its death is noted by C code alone (``deque.append``): Ctrl-C amid a finalizer in Python would be lost.
    """

    __slots__ = ("request_ids",)
    request_ids: list[str]


class Engine:
    """One model on one device under one policy. Not thread-safe: a single driver thread calls it.

    Ctrl-C comes through between its calls, so that it can go on afterwards; only a second one, or one that a lane keeps
    waiting, cuts a step short. After that, and after an error of a lane, the engine is ``broken``: its requests have
    ended with that error, their blocks are back, and every further call raises it again. A new engine can be made in
    the same process.

    Parameters
    ----------
    eos_ids : ids that end a request
    on_broken : called once when the engine breaks, e.g. to end what planned for it
    open_store : with ``share_prefixes``: makes the file tier, given how to read and to replace a page of the CPU tier
    """

    def __init__(
        self,
        stages: Stages,
        device: Device,
        policy: Policy,
        config: EngineConfig,
        eos_ids: frozenset[int] = frozenset(),
        on_broken: Callable[[], None] = lambda: None,
        open_store: Callable[[Callable[[int], bytes], Callable[[int, bytes], None]], PageStore] | None = None,
    ) -> None:
        self.device = device
        self.policy = policy
        self.config = config
        self.broken: HybridAttnError | None = None
        store = None
        if open_store is not None:
            store = open_store(weakly(self._read_page), weakly(self._write_page))
        self.kv = KVManager(config, hasattr(stages, "move"), store, getattr(stages, "window", None))
        self.scheduler = scheduler = Scheduler(config, policy, self.kv, weakly(self._ended))
        self.executor = executor_class(stages, device)(
            stages,
            device,
            policy,
            max_rows=config.max_num_seqs,
            run_ahead=config.run_ahead,
            op_timeout_ns=config.op_timeout_ns,
            on_release=lambda request: scheduler.finish.released(request, device.now_ns()),
            any_leaving=lambda: scheduler.finish.leaving > 0,
        )
        self._on_broken = on_broken
        self._plans = "begin" in policy.hooks
        self._ended_requests: list[RequestRecord] = []
        self._taken_until = 0  # step before which all records were taken
        self.on_record: Callable[[RequestRecord], None] = self._ended_requests.append
        self._output = OutputProcessor(self.scheduler, eos_ids)
        self._requests: dict[str, Request] = {}
        self._queue = RequestQueue(config.max_model_len)
        self._quiet_steps: QuietSteps | None = None
        if isinstance(self.executor, FastExecutor):
            self._quiet_steps = QuietSteps(self.executor, self.scheduler, self.kv, self._queue)
        self._holders: set[_Holder] = set()
        self._gone: deque[_Holder] = deque()
        self.at_work = AtWork(device.kind != "simulated", weakly(self._end_abandoned))

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int] | DeclaredTokens,
        max_tokens: int | None,
        params: object = None,
        *,
        request_id: str | None = None,
        arrival_ns: int | None = None,
        session: str = "",
        keep: bool = True,
    ) -> Request:
        """Queue a request.

        Parameters
        ----------
        prompt : sequence of int
            Token ids, at least one; for a simulation only their number.
        max_tokens : int or None
            Output tokens at most, at least 1; cut to the room that ``max_model_len`` leaves (None: all of it).
        arrival_ns : int, optional
            When it arrives on the device's clock; default now.
        session : str, optional
            The conversation that this is a turn of. K,V of the turn before are found again for as many tokens as its
            context and ``prompt`` (history included) have in common from the start.
        keep : bool
            With ``session``: keep K,V at the end, for the next turn; they rest on the CPU tier where that has room
            (``EngineConfig.pause_tier``), and go as soon as a running request needs the blocks.

        Raises
        ------
        InputError
            Empty prompt, no token asked for, a prompt that leaves no room for one, a request id in use.
        CapacityError
            No tier that the policy allows can ever hold it.
        """
        with self.at_work:
            self._refuse_if_broken()
            now_ns = self.device.now_ns()
            when_ns = now_ns if arrival_ns is None else arrival_ns
            request = self._queue.request(prompt, max_tokens, params, request_id, when_ns, self._requests)
            request.session, request.keep = session, bool(session) and keep
            try:
                self.scheduler.refuse_impossible(request)
            except HybridAttnError:
                raise
            except Exception as error:  # of a policy
                why = f"request {request.request_id} cannot be added: {type(error).__name__}{self._place(error)}"
                raise InputError(f"{why}: {error}") from error
            if not self._queue.accept(request, now_ns):
                self.scheduler.queues.wait(request)
            self._requests[request.request_id] = request
            return request

    def abort(self, *request_ids: str) -> None:
        """End requests early; unknown and finished ids are ignored."""
        with self.at_work:
            for request_id in request_ids:
                self._abort(request_id)
            self.finish_moves()

    def hold(self, holder: object, request_ids: list[str]) -> Callable[[], None]:
        """From now on ``holder`` waits for these requests: if it goes away, they are aborted with the next call.
        Returns what ends that."""
        ref = _Holder(holder, self._gone.append)
        ref.request_ids = request_ids
        self._holders.add(ref)
        return partial(self._holders.discard, ref)

    def _end_abandoned(self) -> None:
        while self._gone:
            ref = self._gone.popleft()
            self._holders.discard(ref)
            for request_id in ref.request_ids:
                self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        if not self._queue.withdraw(request):
            self.scheduler.finish.end(request, "abort", self.device.now_ns())
            return
        request.finish_reason, request.end_ns = "abort", max(request.arrival_ns, self.device.now_ns())
        self._ended(request)

    def move(self, request_id: str, tier: str) -> bool:
        """Move K,V of a decoding request to ``tier``, beside the steps; it decodes on there once they have arrived.

        Policies move requests by themselves; this is for who wants to choose. False when nothing was begun: the id is
        unknown, the prompt is under way, its row is in flight, or the tier has no room.
        """
        with self.at_work:
            self._refuse_if_broken()
            if tier not in self.policy.tiers:
                tiers = ", ".join(self.policy.tiers)
                raise InputError(f"tier '{tier}' is none of policy '{self.policy.name}': {tiers}")
            request = self._requests.get(request_id)
            if request is None or self.executor.under_way or not self.scheduler.swaps.move(request, tier):
                return False
            try:
                self._begin(self.kv.take_begun())
            except HybridAttnError as error:
                self._fail(error)
                raise
            return True

    def end_session(self, session: str) -> None:
        """Forget the context of a session; unknown ones are ignored. With no request left its pages are back then."""
        with self.at_work:
            for request in self._requests.values():
                if request.session == session:
                    request.keep = False  # nothing is left behind at the end of a turn that is under way
            self.kv.contexts.drop(session)
            self.finish_moves()

    def finish_moves(self) -> None:
        """Copies under way end now where no request is left: they would hold their pages until the next step."""
        if not self.unfinished and self.broken is None:
            self.executor.moves.wait_all()

    def save_pages(self) -> None:
        """Contexts of sessions and common prefixes go to the file tier, where there is one, and are forgotten here."""
        if self.broken is not None or self.kv.prefixes is None or self.kv.prefixes.store is None:
            return
        with self.at_work:
            self.executor.moves.wait_all()
            self.kv.contexts.clear()
            self.kv.lower()
            self._begin(self.kv.take_begun())
            self.executor.moves.wait_all()
            self.kv.prefixes.save_all()

    def _read_page(self, page: int) -> bytes:
        return self.executor.read_page(page)

    def _write_page(self, page: int, data: bytes) -> None:
        self.executor.write_page(page, data)

    @property
    def unfinished(self) -> int:
        """Requests that somebody waits for."""
        if self._gone and not self.at_work:
            with self.at_work:  # which begins with an end of those that nobody does
                pass
        return len(self.scheduler.queues) + len(self._queue)

    @property
    def next_arrival_ns(self) -> int | None:
        """When the next request arrives that was added ahead of its time."""
        return self._queue.next_ns

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _place(self, error: BaseException) -> str:
        """Where in the policy's own file it was raised, if it was: policies are other people's code."""
        home = type(self.policy).__module__
        frames = [
            (f, line) for f, line in traceback.walk_tb(error.__traceback__) if f.f_globals.get("__name__") == home
        ]
        if not frames:
            return ""
        frame, line = frames[-1]
        where = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
        return f" in {frame.f_code.co_name}() of policy '{self.policy.name}' ({where})"

    def step(self) -> list[Event]:
        """One step. Returns the tokens it brought; with nothing to do yet, sleeps until the next arrival."""
        with self.at_work:
            self._refuse_if_broken()
            try:
                return self._step()
            except HybridAttnError as error:
                self._fail(error)
                raise
            except BaseException as error:  # Ctrl-C twice, no memory for a plan: ops are in flight that nobody owns
                why = f"a step was cut short by {type(error).__name__}{self._place(error)}: {error}"
                cut = DeviceError(why.removesuffix(": "))
                self._fail(cut)
                if isinstance(error, Exception):
                    raise cut from error
                raise

    def _step(self) -> list[Event]:
        if self.kv.contexts and self.executor.moves:
            self.executor.moves.arrive()  # while nothing ran, contexts came to rest
        now_ns = self.device.now_ns()
        for request in self._queue.due(now_ns):
            self.scheduler.queues.wait(request)
        under_way = self.executor.under_way
        output = self._schedule(now_ns) if under_way is None else SchedulerOutput(under_way, (), ())
        if output.batch is None and not output.idle and not self.executor.micro_batches:
            self._idle()
            return []
        if self._quiet_steps is not None and output.batch is not None and self._quiet_steps.take(output.batch):
            return []
        view = self._step_view(now_ns, output.batch) if self._plans else None
        sampled = self.executor.run(output.batch, output.idle, view, self._following)
        if output.batch is not None:
            self.scheduler.computed(output.batch)
        events = [self._output.deliver(s) for s in sampled]
        self.scheduler.swaps.park()
        self.kv.lower()
        self._begin(self.kv.take_begun())
        return events

    def _following(self, batch: Batch) -> Batch | None:
        """The rows of the step after ``batch``, where its tokens need not be known for that."""
        stages = self.executor.stages
        if self._plans or not isinstance(stages, AheadStages) or not stages.can_follow(batch):
            return None
        return self.scheduler.following(batch)

    def _schedule(self, now_ns: int) -> SchedulerOutput:
        """What the step may do, with its moves begun, or made where the policy lets the step wait for them."""
        output = self.scheduler.schedule(now_ns)
        self._begin(output.moves)
        times = 1 if self.scheduler.swaps.wanted else self.config.max_num_seqs  # else what went down may come up again
        while output.moves and self.policy.moves_block and times:
            self.executor.moves.wait_all()
            output = self.scheduler.schedule(self.device.now_ns())
            self._begin(output.moves)
            times -= 1
        return output

    def _begin(self, moves: Sequence[Move]) -> None:
        for move in moves:
            arrived = partial(self._arrived, move)
            self.executor.move(move.request, move.source, move.pages, move.tokens, arrived)

    def _arrived(self, move: Move) -> None:
        self.scheduler.swaps.arrived(move, self.device.now_ns())

    def _step_view(self, now_ns: int, batch: Batch | None) -> StepView:
        """What a policy that plans sees before each step."""
        queues = self.scheduler.queues
        rows, kv_tokens = queues.cpu_load()
        gpu_rows = batch.num_decodes if batch is not None else 0
        if batch is not None and batch.split:  # rows over both tiers count on each by their tokens
            cold = batch.cold_kv_tokens
            moved = round(gpu_rows * cold / (batch.decode_kv_tokens + cold))
            gpu_rows, rows, kv_tokens = gpu_rows - moved, rows + moved, kv_tokens + cold
        coming = queues.prefilling
        on_gpu = sum([r.tier == GPU_TIER for r in coming])
        return StepView(
            number=self.executor.step_number,
            now_ns=now_ns,
            gpu_rows=gpu_rows,
            gpu_kv_tokens=batch.decode_kv_tokens if batch is not None else 0,
            cpu_rows=rows,
            cpu_kv_tokens=kv_tokens,
            prefill_tokens=batch.prefill_tokens if batch is not None else 0,
            tokens=self.executor.tokens,
            cpu_factor=self.executor.forecast.cpu_factor,
            waiting=len(queues.waiting),
            gpu_coming=on_gpu,
            cpu_coming=len(coming) - on_gpu,
            coming_tokens=sum([r.num_tokens for r in coming]),
            gpu_factor=self.executor.forecast.gpu_factor,
        )

    def run(self) -> None:
        """Step until every request has ended."""
        while self.unfinished:
            self.step()

    def _idle(self) -> None:
        if self.executor.moves:
            self.executor.moves.wait()
        elif self._queue.next_ns is not None:
            self.device.sleep_until_ns(self._queue.next_ns)
        elif self.scheduler.queues:
            raise self.scheduler.stall()

    def _ended(self, request: Request) -> None:
        del self._requests[request.request_id]
        self.on_record(request.record())

    def _refuse_if_broken(self) -> None:
        if self.broken is not None:
            raise type(self.broken)(f"this engine stopped earlier: {self.broken}") from self.broken

    def _fail(self, error: HybridAttnError) -> None:
        """Nothing is in flight for us any more: every request ends with the error, every block goes back."""
        self.broken = error
        self._on_broken()
        self.kv.give_up()
        now_ns = self.device.now_ns()
        for request in self._queue.clear():
            request.finish_reason, request.error, request.end_ns = "error", str(error), max(request.arrival_ns, now_ns)
            self._ended(request)
        for request in self.scheduler.queues.running + self.scheduler.queues.waiting:
            request.in_flight = False
            request.error = str(error)
            self.scheduler.finish.end(request, "error", now_ns)

    def take_records(self) -> RunRecords:
        """Records of the requests that ended, of the steps and of changes of the layout, since the last call (none
        that went to a sink)."""
        with self.at_work:
            steps = list(self.executor.steps)
            layouts = [c for c in self.policy.choices if c.step >= self._taken_until]
            taken = RunRecords(self.executor.stages.num_layers, list(self._ended_requests), steps, layouts)
            self._ended_requests.clear()
            self.executor.steps.clear()
            self._taken_until = self.executor.step_number
            return taken

    def send_records(
        self, on_record: Callable[[RequestRecord], None], on_step: Callable[[StepRecord], None] | None = None
    ) -> None:
        """From now on give records to these sinks (steps to nobody, if None) and keep none: memory stays flat."""
        self.on_record = on_record
        self.executor.on_step = on_step

    def drain(self) -> list[Span]:
        """Wait for what is still on the lanes; the spans since the last call."""
        return self.device.drain(self.config.op_timeout_ns)
