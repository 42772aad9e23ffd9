"""Nothing is lost or made up: requests, tokens, blocks and time, over many random small workloads (M13)."""

from __future__ import annotations

import random

import pytest
from held_pages import check_pages

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import CapacityError
from hybridattn.core.request import DeclaredTokens
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.engine.replay import Replay
from hybridattn.planning.predict import by_simulation
from hybridattn.policies.registry import make_policy
from hybridattn.workload.arrivals import AllAtOnce, ClosedLoop, Gamma, synthetic
from hybridattn.workload.item import WorkItem, Workload
from hybridattn.workload.lengths import Fixed, Uniform

SHAPE = ModelShape("small", 3, 256, 512, 4, 2, 32, 1024, 1024)
PRICING = machine("t4", "xeon-8259cl-8c", "pcie3-x16")
COSTS = Costs(ModelCost(SHAPE, "fp16"), PRICING)
POLICIES = ("gpu_only", "cpu_only", "sync_offload", "fixed_fraction", "async_overlap", "asymmetric", "adaptive", "auto")


def engine_for(policy, gpu_blocks, cpu_blocks, tokens=48, **options):
    chosen = make_policy(policy, costs=COSTS, predict=by_simulation(), **options)
    config = EngineConfig(gpu_blocks, cpu_blocks, 16, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=tokens)
    return Engine(PricedStages(SHAPE, "fp16"), SimDevice(PRICING, record=False), chosen, config)


def check(engine, arrived, refused, ended):
    """The invariants that hold after every step."""
    running = engine.scheduler.queues.running
    assert arrived == refused + ended + engine.unfinished
    check_pages(engine)
    assert len(running) <= engine.config.max_num_seqs
    assert all(r.num_output <= r.max_tokens for r in running)


def serve(policy, seed):
    rng = random.Random(seed)
    gpu, cpu = rng.randint(0, 20), rng.randint(3, 40)
    engine = engine_for(policy, gpu, cpu)
    jobs = [(rng.randint(1, 50), rng.randint(1, 50), rng.randint(0, 10**7)) for _ in range(rng.randint(1, 9))]
    refused, ended, steps, clock = 0, [], [], -1
    engine.send_records(ended.append, steps.append)
    for prompt, output, arrival_ns in jobs:
        try:
            engine.add(DeclaredTokens(prompt), output, arrival_ns=arrival_ns)
        except CapacityError:
            refused += 1
    taken = 0
    while engine.unfinished:
        engine.step()
        check(engine, len(jobs), refused, len(ended))
        assert engine.device.now_ns() >= clock
        clock = engine.device.now_ns()
        taken += 1
        assert taken < 20_000, "no progress"
    assert len(ended) + refused == len(jobs)
    assert (
        sum(r.output_tokens for r in ended)
        == sum(min(o, 256 - p) for i, (p, o, _) in enumerate(jobs) if any(r.request_id == f"r{i}" for r in ended))
        or refused
    )
    assert all(r.finish_reason == "length" for r in ended)
    assert all(pool.num_free == pool.num_blocks for pool in engine.kv.pools.values())
    assert all(a.end_ns <= b.start_ns for a, b in zip(steps, steps[1:], strict=False))
    fastest = min((p.end_ns - p.start_ns for p in steps if p.gpu_rows), default=1)
    made = sum(r.output_tokens for r in ended)
    if steps and policy == "gpu_only" and clock:
        assert made / clock <= 8 / fastest  # no step makes more tokens than it has rows
    return ended, steps, clock


@pytest.mark.parametrize("policy", POLICIES)
def test_M13_random_small_workloads(policy):
    for seed in range(12 if policy in ("adaptive", "auto") else 165):  # a thousand workloads in all
        serve(policy, seed)


@pytest.mark.parametrize("policy", ["async_overlap", "asymmetric", "adaptive"])
def test_the_same_seed_gives_the_same_run(policy):
    assert serve(policy, 7) == serve(policy, 7)


@pytest.mark.parametrize("arrivals", [AllAtOnce(), Gamma(400.0, 0.2), ClosedLoop(3, think_ns=1000)])
def test_feeds_bring_every_request_exactly_once(arrivals):
    workload = synthetic(40, arrivals, Uniform(30, 0.9), Uniform(12, 0.9), seed=2)
    engine = engine_for("async_overlap", 12, 30)
    served = Replay(engine, workload).run()
    assert sorted(int(r.request_id) for r in served.requests) == list(range(40))
    assert [r.output_tokens for r in sorted(served.requests, key=lambda r: int(r.request_id))] == [
        i.output_tokens for i in workload.items
    ]
    if isinstance(arrivals, ClosedLoop):
        events = sorted([(r.arrival_ns, 1) for r in served.requests] + [(r.end_ns, 0) for r in served.requests])
        level = peak = 0
        for _, kind in events:
            level += 1 if kind else -1
            peak = max(peak, level)
        assert peak == 3


def test_a_session_resumes_after_its_pause_with_its_history():
    items = (WorkItem(0, 20, 5, "s"), WorkItem(0, 4, 3, "s", history_tokens=25, after=0, delay_ns=10**9))
    served = Replay(engine_for("gpu_only", 12, 0), Workload("one session", items)).run()
    first, second = sorted(served.requests, key=lambda r: int(r.request_id))
    assert second.arrival_ns == first.end_ns + 10**9
    assert second.prompt_tokens == 29


def test_what_can_never_fit_is_refused_and_does_not_stop_the_feed():
    items = (WorkItem(0, 200, 20), WorkItem(0, 10, 5), WorkItem(5, 10, 0), WorkItem(9, 10, 5))
    served = Replay(engine_for("gpu_only", 6, 0), Workload("mixed", items, concurrency=1)).run()
    assert (served.arrived, served.ended, served.refused, served.empty) == (4, 2, 1, 1)


def test_memory_does_not_grow_with_the_number_of_requests():
    """Records go to a sink; what the engine keeps after 3,000 requests is what it kept after 300."""
    sizes = []
    for count in (300, 3000):
        workload = synthetic(count, ClosedLoop(6), Fixed(20), Fixed(6), seed=1)
        engine = engine_for("async_overlap", 12, 12)
        Replay(engine, workload, on_record=lambda record: None).run()
        executor = engine.executor
        kept = [
            engine._requests,
            engine._ended_requests,
            executor.steps,
            executor._in_flight.waiting,
            executor.micro_batches,
        ]
        kept += [executor.stages._attending, executor.device._spans, executor.device._queued_skipped]
        sizes.append(([len(k) for k in kept], len(executor.stages._linear) < 200))
    assert sizes[0] == sizes[1]
