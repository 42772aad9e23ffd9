"""The executor: one step over the layers, with micro-batches of CPU rows beside the GPU's.

One micro-batch, three layers; it joins at layer 1, is skipped at layer 2 and joins there one step later:

    gpu.compute   |attn1|-linear 1-|attn2|-linear 2-|sample| ... next step ... |attn2|-linear 2-|sample|
    gpu.h2d          |o1|                                                         |o2|
    gpu.d2h                        |qkv2|
    cpu.attention  1|                   |------- attention 2 -------|
    driver         poll: ready          poll: not ready                        poll: ready

The driver never computes and never waits for the CPU unless the policy says so; it does wait for the GPU, so that it is
at most ``run_ahead`` layers ahead and its polls are fresh. Every wait is bounded by ``op_timeout_ns``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from hybridattn.core.device import Device, Future
from hybridattn.core.records import StepRecord
from hybridattn.core.request import Request
from hybridattn.core.stages import Batch, CpuRow, MicroBatch, RunStages, Sampled, Stages
from hybridattn.executor.decisions import Decisions
from hybridattn.executor.moves import Moves
from hybridattn.executor.shared import Shared
from hybridattn.executor.submission import Submitter
from hybridattn.policies.base import Policy, StepView


class Executor:
    """Runs steps (see ``Shared`` for its parts and for ``max_rows``, ``on_release`` and ``any_leaving``).

    Attributes
    ----------
    steps : records of the steps since the engine last took them
    on_step : where each record goes; None: nowhere
    tokens : made so far; a CPU row that advanced one layer counts 1 / num_layers
    under_way : GPU rows of a step that was submitted with the one before it, and whose tokens are not handed out
    """

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
        shared = Shared(stages, device, policy, max_rows, op_timeout_ns, on_release, any_leaving)
        self.stages = stages
        self._runs = stages if isinstance(stages, RunStages) else None
        self.device = device
        self.policy = policy
        self.steps: list[StepRecord] = []
        self.on_step: Callable[[StepRecord], None] | None = self.steps.append
        self.tokens = 0.0
        self.forecast = shared.forecast
        self.moves = Moves(device, op_timeout_ns)
        self._stats = shared.stats
        self._in_flight = shared.in_flight
        self._submitter = Submitter(shared)
        self._decisions = Decisions(shared, self._submitter)
        self._run_ahead = run_ahead
        self._timeout_ns = op_timeout_ns
        self._ahead: deque[Future] = deque()  # linear stages that the driver is ahead of the GPU
        self.under_way: Batch | None = None
        self._sample: tuple[Future, int] | None = None  # a linear stage of this step and its rows, to learn from

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Those in flight."""
        return self._in_flight.micro_batches

    @property
    def step_number(self) -> int:
        """Steps so far."""
        return self._stats.number

    def move(self, request: Request, source: str, blocks: Sequence[int], tokens: int, done: Callable[[], None]) -> None:
        """K,V of ``tokens`` tokens of a request goes from ``blocks`` of tier ``source`` to its arriving pages on the
        other; ``done`` is called at the end of the first step after which it has come."""
        self.moves.add(self._submitter.move(request, source, blocks, tokens), done)

    def read_page(self, page: int) -> bytes:
        """The content of a page of the CPU tier that nobody writes to, all layers."""
        self._submitter.settle()
        return self.stages.read_page(page)  # type: ignore[attr-defined]

    def write_page(self, page: int, data: bytes) -> None:
        """Replace it. Copies of prompts that have ended may still be on their way to pages that were given back."""
        self._submitter.settle()
        self.stages.write_page(page, data)  # type: ignore[attr-defined]

    # -- a step --------------------------------------------------------------------------------------------------------

    def run(
        self,
        batch: Batch | None,
        idle: Sequence[CpuRow],
        view: StepView | None = None,
        following: Callable[[Batch], Batch | None] = lambda batch: None,
    ) -> list[Sampled]:
        """One step for the GPU rows of ``batch``, or one round of detours when there are none.

        ``following`` is asked for the rows of the next step, as far as they are certain. That step is submitted before
        the tokens of this one are waited for, is ``under_way`` from then on, and has to be the next one that is run.
        """
        with self.device.driving():
            if self.under_way is None:
                self._submit(batch, idle, view)
            self.under_way = None
            if batch is not None and not (self.micro_batches or self.moves):
                self.under_way = following(batch)
            return self._end(batch) if self.under_way is None else self._end_before(self.under_way, batch)

    def _submit(self, batch: Batch | None, idle: Sequence[CpuRow], view: StepView | None) -> None:
        self._begin(batch, view)
        dispatched = self._decisions.dispatch(idle, batch) if idle else []
        self._stats.count_rows(self.micro_batches)
        if batch is None and not dispatched:
            self._decisions.round()
        else:
            made = self._submitter.first(batch, dispatched)
            if batch is not None:
                self._layers(batch, made)

    def _begin(self, batch: Batch | None, view: StepView | None) -> None:
        self._stats.begin(self.device.now_ns(), batch)
        self._in_flight.begin_step()
        if view is not None:
            self.policy.begin(view)
        self._decisions.begin()

    def _layers(self, batch: Batch, made: Future) -> None:
        """The GPU rows go through all layers; ``made`` is the stage that made the first layer's q, k, v.

        Layers at which nothing is to be decided may pass together, but for the last."""
        waiting, last = self._in_flight.waiting, self.stages.num_layers - 1
        copies = batch.split or batch.offloaded or batch.loaded  # at every layer
        layer = 0
        while layer <= last:
            if layer < last and layer not in waiting and not copies:
                passed, future = self._stretch(layer, batch, last, made)
                if future is not None:
                    layer, made = layer + passed, future
            made = self._layer(layer, batch, made)
            layer += 1

    def _stretch(self, layer: int, batch: Batch, last: int, made: Future) -> tuple[int, Future | None]:
        """Pass the layers up to the next at which something may be decided, ``last`` at most: how many, and the future
        of their last stage; None where they go one by one."""
        if self._runs is None or (self._decisions.takes_detours and self.micro_batches):
            return 0, None
        stop = self._in_flight.next_layer(layer, last)
        op = self._runs.layers(layer, stop, batch)
        if op is None:
            return 0, None
        future = self.device.submit(op, (made,))
        self._run_on(future)
        return stop - layer, future

    def _layer(self, layer: int, batch: Batch, made: Future) -> Future:
        """One layer: micro-batches that wait there join, are skipped or are waited for; others may take detours."""
        attended = self._submitter.attention(layer, batch, made)
        joined = self._decisions.join(layer, batch, made) if layer in self._in_flight.waiting else ()
        made = self._submitter.linear(layer, batch, joined, attended)
        if layer == 1 and self.forecast.predicts and not batch.prefill_tokens:
            self._sample = made, self._stats.gpu_tokens + sum([c.size for c in joined])
        self._decisions.detours(layer, attended, joined)
        self._run_on(made)
        return made

    def _run_on(self, made: Future) -> None:
        """``made`` was submitted: the driver may be ahead of the GPU by so much and no more."""
        self._ahead.append(made)
        while len(self._ahead) > self._run_ahead:
            self._ahead.popleft().wait(self._timeout_ns)

    def _end(self, batch: Batch | None) -> list[Sampled]:
        """Wait for the step to end; hand out the tokens of its rows, in the order in which they were sampled."""
        while self._ahead:
            self._ahead.popleft().wait(self._timeout_ns)
        if self._sample is not None:
            self.forecast.linear_took(*self._sample)
            self._sample = None
        sampled = self._submitter.collect(self._submitter.sampling())
        self.tokens += self._stats.gpu_made
        self.tokens += self._stats.row_layers / self.stages.num_layers
        self._record(batch)
        if self.moves:
            self.moves.arrive()
        return sampled

    def _end_before(self, after: Batch, batch: Batch | None) -> list[Sampled]:
        """The tokens of this step, once the one of ``after`` is submitted.

        gpu.compute   |... linear L-1, sample|first|attention 0 ...|
        driver            plan, submit .......|tokens: text, ends|plan the next ...
        """
        sampling, sample, self._sample = self._submitter.sampling(), self._sample, None
        record = self._stats.record(0, batch)
        self._stats.number += 1
        self._submit(after, (), None)
        sampled = self._submitter.collect(sampling)
        self.tokens, self._stats.gpu_made = self.tokens + self._stats.gpu_made, 0
        if sample is not None:
            self.forecast.linear_took(*sample)
        if self.on_step is not None:
            self.on_step(replace(record, end_ns=self.device.now_ns()))
        return sampled

    def _record(self, batch: Batch | None) -> None:
        if self.on_step is not None:
            self.on_step(self._stats.record(self.device.now_ns(), batch))
        self._stats.number += 1
