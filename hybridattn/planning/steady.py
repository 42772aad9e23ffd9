"""Steady decode on a simulated machine: a constant number of rows of constant context, for as many steps as asked.

What a policy is worth in a given situation, without arrivals and ends: the grid of settings, closed forms, and the
short simulations of a planner are all made of this. It runs the real executor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridattn.core.device import Device
from hybridattn.core.op import GPU
from hybridattn.core.request import DeclaredTokens, Request, State
from hybridattn.core.stages import CPU_TIER, GPU_TIER, Batch, CpuRow, Segment
from hybridattn.cost.costs import Costs
from hybridattn.cost.priced_stages import EXPOSED, PricedStages
from hybridattn.cost.pricing import Pricing
from hybridattn.executor.fast_path import executor_class
from hybridattn.policies.base import Policy, StepView
from hybridattn.policies.load import Load

CHUNK = 512  # prompt tokens that are prefilled in one step
_TIMEOUT_NS = 10**13


@dataclass(frozen=True, slots=True)
class Steady:
    """Decode rates and times per output token. A TPOT is None where no row of the tier made a token.

    ``cpu_tpot_ns`` is rows over rate (Little's law) of the rows that took part, so that those which wait for their turn
    in between count, and those which the policy never admits do not.
    """

    tokens_per_s: float
    gpu_tokens_per_s: float
    cpu_tokens_per_s: float
    gpu_tpot_ns: float | None
    cpu_tpot_ns: float | None
    steps: int
    duration_ns: int
    cpu_rows: int = 0  # that took part


def rows_under(policy: Policy, requests: int, gpu_capacity: int, cpu_capacity: int) -> tuple[int, int]:
    """Requests that decode on each tier under a policy: first those that the GPU tier holds, then the CPU tier, as far
    as the policy uses them; the rest waits."""
    gpu = min(requests, gpu_capacity)
    if policy.cpu_fraction is not None:  # a forced share, whatever fits
        gpu = min(gpu_capacity, round(requests * (1 - policy.cpu_fraction)))
    if GPU_TIER not in policy.tiers:
        gpu = 0
    return gpu, min(requests - gpu, cpu_capacity) if CPU_TIER in policy.tiers else 0


def steady(
    costs: Costs,
    policy: Policy,
    load: Load,
    open_device: Callable[[Pricing], Device],
    warmup: int | None = None,
    steps: int | None = None,
) -> Steady:
    """What ``policy`` does under ``load``: over two steps per layer after one per layer, unless told otherwise."""
    layers = costs.num_layers + 1
    run = SteadyRun(costs, costs.pricing, policy, load, open_device)
    return run.measure(layers if warmup is None else warmup, 2 * layers if steps is None else steps)


class SteadyRun:
    """An executor under a load, step by step. ``cold`` tokens of each GPU row lie on the CPU tier."""

    def __init__(
        self,
        costs: Costs,
        pricing: Pricing,
        policy: Policy,
        load: Load,
        open_device: Callable[[Pricing], Device],
        cold: int = 0,
    ):
        self.load = load
        self.costs = costs
        self.policy = policy
        self.device = open_device(pricing)
        exposed = (GPU, EXPOSED) in pricing.models
        stages = PricedStages(costs.cost.shape, costs.cost.dtype, costs.cost.kv_dtype, exposed)
        self.executor = executor_class(stages, self.device)(
            stages,
            self.device,
            policy,
            max_rows=max(1, load.cpu_rows),
            run_ahead=1,
            op_timeout_ns=_TIMEOUT_NS,
            on_release=lambda request: None,
            any_leaving=lambda: False,
        )
        self.executor.on_step = None
        self.gpu_tokens = 0
        self._taking_part: set[int] = set()
        self._plans = "begin" in policy.hooks
        self._decodes = tuple(
            Segment(_request(i, GPU_TIER), GPU_TIER, load.context - 1, 1, samples=True, prefill=False, cold=cold)
            for i in range(load.gpu_rows)
        )
        self._batch = Batch(self._decodes) if self._decodes else None
        self._rows = [CpuRow(_request(i, CPU_TIER), load.context - 1) for i in range(load.cpu_rows)]
        self._idle = list(range(load.cpu_rows))
        self._owed = {GPU_TIER: 0.0, CPU_TIER: 0.0}  # prompt tokens to prefill

    @property
    def owed(self) -> float:
        """Prompt tokens not yet prefilled."""
        return sum(self._owed.values())

    def step(self) -> None:
        """One step."""
        executor, before = self.executor, self.executor.tokens
        cap = self.policy.dispatch_cap
        idle = tuple([self._rows[i] for i in (self._idle if cap is None else self._idle[:cap])])
        batch = self._next_batch()
        sampled = executor.run(batch, idle, self._view(batch) if self._plans else None)
        returned = {t.request.index for t in sampled if t.request.tier == CPU_TIER}  # type: ignore[attr-defined]
        free = returned.copy()
        free.update(i for i in self._idle if not self._rows[i].request.in_flight)  # type: ignore[attr-defined]
        self._taking_part.update(set(self._idle).difference(i for i in free if i not in returned), returned)
        self._idle = sorted(free)  # the oldest first, as a scheduler would
        self.gpu_tokens += self.load.gpu_rows
        made = executor.tokens - before
        self._owed[GPU_TIER] += self.load.prompt_per_token * self.load.gpu_rows
        self._owed[CPU_TIER] += self.load.prompt_per_token * (made - self.load.gpu_rows)

    def _next_batch(self) -> Batch | None:
        tier = max(self._owed, key=lambda t: self._owed[t])
        if self._owed[tier] < CHUNK:
            return self._batch
        self._owed[tier] -= CHUNK
        prompt = Segment(_request(0, tier), tier, 0, CHUNK, samples=False, prefill=True)
        return Batch((*self._decodes, prompt))

    def _view(self, batch: Batch | None) -> StepView:
        load, executor = self.load, self.executor
        return StepView(
            executor.step_number,
            self.device.now_ns(),
            load.gpu_rows,
            load.gpu_rows * load.context,
            load.cpu_rows,
            load.cpu_rows * load.context,
            batch.prefill_tokens if batch is not None else 0,
            executor.tokens,
            executor.forecast.cpu_factor,
        )

    def measure(self, warmup: int, steps: int) -> Steady:
        """Rates over ``steps`` steps after ``warmup``; prompts owed at the end count as if they had been done."""
        for _ in range(warmup):
            self.step()
        start_ns, tokens, gpu_tokens, owed = self.device.now_ns(), self.executor.tokens, self.gpu_tokens, self.owed
        self._taking_part = {i for i, row in enumerate(self._rows) if row.request.in_flight}  # type: ignore[attr-defined]
        for _ in range(steps):
            self.step()
        took_ns = self.device.now_ns() - start_ns
        if self.load.prompt_per_token:
            took_ns += round((self.owed - owed) * self._prefill_token_ns())
        made, gpu = self.executor.tokens - tokens, self.gpu_tokens - gpu_tokens
        cpu = made - gpu
        return Steady(
            tokens_per_s=made / took_ns * 1e9,
            gpu_tokens_per_s=gpu / took_ns * 1e9,
            cpu_tokens_per_s=cpu / took_ns * 1e9,
            gpu_tpot_ns=took_ns / steps if gpu else None,
            cpu_tpot_ns=len(self._taking_part) * took_ns / cpu if cpu > 1e-9 else None,
            steps=steps,
            duration_ns=took_ns,
            cpu_rows=len(self._taking_part),
        )

    def _prefill_token_ns(self) -> float:
        """GPU time that a prompt token adds to a step."""
        load, costs = self.load, self.costs
        kv_tokens = load.gpu_rows * load.context
        more = costs.linear_ns(load.gpu_rows + CHUNK) - costs.linear_ns(load.gpu_rows)
        chunk = costs.attention_ns(load.gpu_rows, kv_tokens, [(CHUNK, CHUNK)]) - costs.attention_ns(
            load.gpu_rows, kv_tokens
        )
        return costs.num_layers * (more + chunk) / CHUNK


def _request(index: int, tier: str) -> Request:
    request = Request(f"{tier}{index}", index, DeclaredTokens(1), 1 << 40, None, 0)
    request.tier = tier
    request.state = State.DECODE
    return request
