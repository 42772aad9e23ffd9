"""The executor, scheduler and engine on the deterministic asynchronous device: hypothesis decides when the CPU ends."""

from __future__ import annotations

import random
import re

import pytest
from held_pages import check_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_stages import ToyStages, reference

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU
from hybridattn.core.trace import violations
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.policies.base import Decision, Policy
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly, SyncOffload

LAYERS, PAGE = 3, 16


class Restless(Policy):
    """Uses all four decisions, by a seeded coin: whatever a policy decides, tokens must stay right."""

    name = "restless"
    hooks = frozenset({"detour"})

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.coin = random.Random(seed)

    def dispatch(self, view):
        sizes, left = [], view.idle_rows
        while left and self.coin.random() < 0.7:
            sizes.append(self.coin.randint(1, left))
            left -= sizes[-1]
        return tuple(sizes)

    def ask(self, micro_batch, at):
        return self.coin.choice([Decision.JOIN if micro_batch.ready else Decision.SKIP, Decision.DETOUR, Decision.WAIT])

    def detour(self, ready, at):
        return self.coin.choice(ready).number if self.coin.random() < 0.3 else None


def build(policy, seed, *, gpu_blocks, cpu_blocks, max_tokens=48, max_seqs=6, run_ahead=2, cpu_scale=1):
    """An engine over the toy model; op durations are drawn from ``seed``, CPU attention ``cpu_scale`` times longer."""
    durations = random.Random(seed)
    price = lambda op: durations.randint(0, 40 * (cpu_scale if op.lane == CPU else 1))  # noqa: E731
    device = SimDevice(price, execute=True)
    stages = ToyStages(LAYERS, gpu_blocks, cpu_blocks, PAGE, max_seqs)
    config = EngineConfig(
        gpu_blocks, cpu_blocks, PAGE, max_model_len=200, max_num_seqs=max_seqs, max_num_batched_tokens=max_tokens,
        run_ahead=run_ahead, op_timeout_ns=10**9,
    )  # fmt: skip
    return Engine(stages, device, policy, config)


def check_conservation(engine):
    """Every page is held once or free; nobody is in two queues."""
    check_pages(engine)
    queues = engine.scheduler.queues
    assert len({id(r) for r in queues.running + queues.waiting}) == len(queues)
    assert len(queues.running) <= engine.config.max_num_seqs


def serve(engine, jobs, aborts=()):
    """Run all jobs (prompt, count); returns the outputs. ``aborts`` maps a step to a request index."""
    requests = [engine.add(prompt, count) for prompt, count in jobs]
    step, limit = 0, 4000
    while engine.unfinished:
        for at, which in aborts:
            if at == step:
                engine.abort(f"r{which}")
        engine.step()
        check_conservation(engine)
        step += 1
        assert step < limit, "no progress"
    assert violations(engine.drain()) == []
    engine.taken = engine.take_records()
    assert all(pool.num_free == pool.num_blocks for pool in engine.kv.pools.values())
    return [r.token_ids[r.num_prompt :] for r in requests]


def jobs_of(seed, count, longest=70):
    rng = random.Random(seed)
    return [([rng.randrange(50) for _ in range(rng.randint(1, longest))], rng.randint(1, 12)) for _ in range(count)]


POLICIES = {
    "gpu_only": lambda seed: GpuOnly(),
    "sync_offload": lambda seed: SyncOffload(),
    "async_overlap": lambda seed: AsyncOverlap(),
    "one_layer_per_step": lambda seed: AsyncOverlap(same_step=False, max_micro_batches=2),
    "patient": lambda seed: AsyncOverlap(max_micro_batches=2, max_wait_us=0.02),
    "all_on_cpu": lambda seed: AsyncOverlap(cpu_fraction=1.0),
    "half_on_cpu": lambda seed: SyncOffload(cpu_fraction=0.5),
    "restless": Restless,
}


@pytest.mark.parametrize("name", POLICIES)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1, 20, 300]),
    tight=st.booleans(),
    budget=st.sampled_from([8, 17, 48]),
)
@settings(max_examples=12, deadline=None)
def test_tokens_blocks_and_progress_hold_for_every_schedule(name, seed, scale, tight, budget):
    jobs = jobs_of(seed, 6)
    blocks = dict(gpu_blocks=6, cpu_blocks=6) if tight else dict(gpu_blocks=14, cpu_blocks=40)
    engine = build(POLICIES[name](seed), seed, max_tokens=budget, cpu_scale=scale, **blocks)
    assert serve(engine, jobs) == [reference(p, n, LAYERS) for p, n in jobs]


@given(seed=st.integers(0, 10**6), aborts=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5)), max_size=8))
@settings(max_examples=40, deadline=None)
def test_aborts_at_any_time_leave_the_others_alone(seed, aborts):
    jobs = jobs_of(seed, 6)
    engine = build(Restless(seed), seed, gpu_blocks=6, cpu_blocks=7, cpu_scale=30)
    outputs = serve(engine, jobs, aborts)
    ended = {r.request_id: r for r in engine.taken.requests}
    assert len(engine.taken.requests) == len(jobs)  # each reported once
    for i, ((prompt, count), got) in enumerate(zip(jobs, outputs, strict=True)):
        want = reference(prompt, count, LAYERS)
        if ended[f"r{i}"].finish_reason == "abort":
            assert got == want[: len(got)]
        else:
            assert got == want


def test_preemption_happens_and_changes_nothing():
    jobs = [([1, 2, 3] * 5, 40), ([4] * 15, 40), ([5, 6] * 7, 40)]
    engine = build(GpuOnly(), 1, gpu_blocks=6, cpu_blocks=0)
    assert serve(engine, jobs) == [reference(p, n, LAYERS) for p, n in jobs]
    assert sum(r.preemptions for r in engine.taken.requests) > 0


def test_preemption_on_the_cpu_tier_with_rows_in_flight_changes_nothing():
    jobs = [([1, 2, 3] * 5, 40), ([4] * 15, 40), ([5, 6] * 7, 40)]
    policy = AsyncOverlap(cpu_fraction=1.0, max_micro_batches=4)
    engine = build(policy, 1, gpu_blocks=0, cpu_blocks=6, cpu_scale=50)
    assert serve(engine, jobs) == [reference(p, n, LAYERS) for p, n in jobs]
    assert sum(r.preemptions for r in engine.taken.requests) > 0


def test_with_max_wait_for_its_attention_a_micro_batch_makes_a_token_per_step():
    advanced = {}
    for max_wait_us in (0.0, 1000.0):
        policy = AsyncOverlap(cpu_fraction=0.5, max_wait_us=max_wait_us)
        engine = build(policy, 3, gpu_blocks=20, cpu_blocks=20, cpu_scale=20)
        serve(engine, [([7] * 5, 30), ([8] * 5, 6)])
        busy = [p for p in engine.taken.steps if p.gpu_rows and p.micro_batches and not p.prefill_tokens]
        advanced[max_wait_us] = max(p.layers_advanced for p in busy)
    assert advanced == {0.0: 1, 1000.0: LAYERS}


def test_a_micro_batch_advances_one_layer_per_step_without_same_step_joins():
    engine = build(AsyncOverlap(cpu_fraction=0.5, same_step=False), 3, gpu_blocks=20, cpu_blocks=20, cpu_scale=0)
    serve(engine, [([7] * 5, 30), ([8] * 5, 6)])
    busy = [p for p in engine.taken.steps if p.gpu_rows and p.micro_batches and not p.prefill_tokens]
    assert busy and all(p.layers_advanced <= p.micro_batches for p in busy)
    # a token takes L + 1 steps: launched in one, then one layer in each of the next L
    assert sum(p.layers_advanced for p in busy) / sum(p.micro_batches for p in busy) == pytest.approx(
        LAYERS / (LAYERS + 1), abs=0.06
    )


def test_sync_offload_finishes_a_cpu_token_in_every_step():
    engine = build(SyncOffload(cpu_fraction=0.5), 3, gpu_blocks=20, cpu_blocks=20, cpu_scale=100)
    serve(engine, [([7] * 5, 10), ([8] * 5, 10)])
    busy = [p for p in engine.taken.steps if p.micro_batches]
    assert all(p.layers_advanced == LAYERS * p.micro_batches and p.joins == LAYERS for p in busy if p.gpu_rows)


def test_gpu_only_makes_no_polls():
    engine = build(GpuOnly(), 3, gpu_blocks=20, cpu_blocks=20)
    serve(engine, jobs_of(4, 4, longest=30))
    assert sum(p.polls_made for p in engine.taken.steps) == 0


class Apart(SyncOffload):
    """CPU rows get their linear stages alone, at the layer of the GPU; waits are as long as ``bound_ns``."""

    hooks = frozenset({"detour"})

    def __init__(self, bound_ns):
        super().__init__(cpu_fraction=0.5)
        self.bound_ns = bound_ns

    def ask(self, micro_batch, at):
        return Decision.DETOUR

    def max_wait_ns(self, micro_batch, at):
        return self.bound_ns


def test_a_detour_where_the_gpu_stands_is_waited_for_and_neither_a_join_nor_a_skip():
    engine = build(Apart(None), 3, gpu_blocks=20, cpu_blocks=20, cpu_scale=100)
    serve(engine, [([7] * 5, 10), ([8] * 5, 10)])
    busy = [p for p in engine.taken.steps if p.micro_batches and p.gpu_rows]
    assert busy and all((p.detours, p.joins, p.skips) == (LAYERS * p.micro_batches, 0, 0) for p in busy)
    assert sum(p.waits for p in busy) > 0


def test_a_detour_that_is_not_ready_within_its_wait_is_a_skip():
    engine = build(Apart(0), 3, gpu_blocks=20, cpu_blocks=20, cpu_scale=100)
    serve(engine, [([7] * 5, 10), ([8] * 5, 10)])
    busy = [p for p in engine.taken.steps if p.micro_batches and p.gpu_rows]
    assert sum(p.skips for p in busy) > 0 and sum(p.joins for p in busy) == 0


class TwoByTwo(AsyncOverlap):
    """Two micro-batches are dispatched together and stay together: the first that is ready elsewhere takes a detour."""

    hooks = frozenset({"detour"})

    def dispatch(self, view):
        return (1, 1) if view.idle_rows >= 2 else ()

    def ask(self, micro_batch, at):
        return Decision.SKIP

    def detour(self, micro_batches, at):
        both = [c for c in micro_batches if c.ready and c.layer != at.layer + 1]
        self.chosen = len(both) == 2
        return both[-1].number if self.chosen else None


def test_ready_micro_batches_at_one_layer_share_a_detour():
    policy = TwoByTwo(cpu_fraction=2 / 3)
    engine = build(policy, 3, gpu_blocks=5, cpu_blocks=12)
    prompts = [prompt for prompt, _ in jobs_of(3, 3, longest=9)]
    jobs = [(prompts[0], 60), (prompts[1], 8), (prompts[2], 8)]
    shared = []
    linear = engine.executor.stages.linear

    def watched(layer, batch, micro_batches):
        if getattr(policy, "chosen", False):
            shared.append((batch, len(micro_batches)))
            policy.chosen = False
        return linear(layer, batch, micro_batches)

    engine.executor.stages.linear = watched
    assert serve(engine, jobs) == [reference(prompt, count, LAYERS) for prompt, count in jobs]
    assert shared and set(shared) == {(None, 2)}


class Answering(TwoByTwo):
    """Gives one answer of its own."""

    hooks = frozenset({"detour", "prompts"})

    def __init__(self, hook, answer):
        super().__init__(None if hook == "prompts" else 2 / 3)
        setattr(self, hook, lambda *args: answer)


@pytest.mark.parametrize(
    ("hook", "answer", "expected"),
    [
        ("allowed", ("disk",), "tiers of gpu, cpu, got ('disk',)"),
        ("dispatch", None, "a tuple of sizes, got None"),
        ("dispatch", (2, -1), "a tuple of sizes, got (2, -1)"),
        ("ask", "join", "a Decision, got 'join'"),
        ("detour", 10**6, "the number of a micro-batch in flight, got 1000000"),
        ("priority_of", 2, "0 (waited for) or 1, got 2"),
        ("prompts", -1, "how many prompts to read, got -1"),
    ],
)
def test_an_answer_of_a_policy_that_makes_no_sense_is_refused_by_the_name_of_its_hook(hook, answer, expected):
    jobs = [([7] * 5, 20), ([8] * 5, 20), ([9] * 5, 20)]
    with pytest.raises(InputError, match=re.escape(f"'async_overlap': {hook}() must return {expected}")):
        serve(build(Answering(hook, answer), 3, gpu_blocks=2 if hook == "prompts" else 20, cpu_blocks=20), jobs)


def test_sizes_of_zero_dispatch_nothing_and_end_in_no_endless_loop():
    engine = build(Answering("dispatch", (0,)), 3, gpu_blocks=20, cpu_blocks=20)
    jobs = [([7] * 5, 9), ([8] * 5, 9), ([9] * 5, 9)]
    assert serve(engine, jobs) == [reference(prompt, count, LAYERS) for prompt, count in jobs]


def test_a_policy_that_raises_where_a_request_comes_is_named_and_the_engine_goes_on():
    policy = AsyncOverlap()
    policy.allowed = lambda index: 1 // 0
    engine = build(policy, 3, gpu_blocks=20, cpu_blocks=20)
    with pytest.raises(InputError, match="request r0 cannot be added: ZeroDivisionError.*: integer division or modulo"):
        engine.add([7] * 5, 3)
    del policy.allowed
    assert serve(engine, [([7] * 5, 3)]) == [reference([7] * 5, 3, LAYERS)]
