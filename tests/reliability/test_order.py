"""First come, first served, and nobody starves: whatever arrives later, whatever is preempted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_stages import reference

from hybridattn.core.request import State
from hybridattn.core.stages import GPU_TIER

POLICIES = ["gpu_only", "sync_offload", "async_overlap", "all_on_cpu"]


@given(seed=st.integers(0, 10**6), policy=st.sampled_from(POLICIES), blocks=st.integers(5, 9))
@settings(max_examples=30, deadline=None)
def test_requests_are_first_scheduled_in_the_order_of_their_arrival(rig, seed, policy, blocks):
    engine = rig.build(rig.policies[policy](), seed, gpu=blocks, cpu=blocks)
    arrivals = random.Random(seed).sample(range(3000), 10)  # added in any order
    jobs = rig.jobs(seed, 10, longest=60)
    requests = [engine.add(p, n, arrival_ns=at) for at, (p, n) in zip(arrivals, jobs, strict=True)]
    rig.finish(engine)
    requests.sort(key=lambda r: r.arrival_ns)
    scheduled = [r.scheduled_ns for r in requests]
    assert scheduled == sorted(scheduled)
    assert all(when >= r.arrival_ns for when, r in zip(scheduled, requests, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_big_request_is_served_though_small_ones_never_stop_coming(rig, policy):
    """It needs nearly the whole tier; a scheduler that lets small ones pass would keep it out for ever."""
    engine = rig.build(rig.policies[policy](), gpu=8, cpu=8, max_num_seqs=4)
    small = [engine.add([i] * 10, 5) for i in range(4)]
    big = engine.add([7] * 110, 10)
    for step in range(1500):
        if step % 2 == 0 and engine.unfinished < 12:
            small.append(engine.add([step % 50] * 10, 5))
        engine.step()
        rig.check(engine)
        if big.state is State.FINISHED:
            break
    assert big.state is State.FINISHED and big.finish_reason == "length"
    rig.finish(engine)
    assert rig.outputs([big]) == [reference([7] * 110, 10, rig.layers)]


@pytest.mark.parametrize("budget", [4, 20])
def test_decode_rows_get_a_token_in_every_step_though_prompts_never_stop_coming(rig, budget):
    """Prefill takes what the budget leaves, so that the wait between two tokens is one step."""
    engine = rig.build(rig.policies["gpu_only"](), gpu=40, cpu=0, max_num_seqs=4, max_num_batched_tokens=budget)
    first = engine.add([1, 2, 3], 60)
    for step in range(300):
        if step % 3 == 0 and engine.unfinished < 6:
            engine.add([step % 50] * 40, 3)
        before = first.num_output
        decoding = first.state is State.DECODE
        engine.step()
        assert not decoding or first.num_output == before + 1
        if first.state is State.FINISHED:
            return
    raise AssertionError("no progress")


@pytest.mark.parametrize("budget", [5, 20])
def test_prompts_get_on_though_decode_rows_fill_most_of_the_budget(rig, budget):
    """The budget exceeds max_num_seqs, so that at least one token of a prompt fits beside all decode rows."""
    engine = rig.build(rig.policies["gpu_only"](), gpu=60, cpu=0, max_num_seqs=5, max_num_batched_tokens=budget)
    for i in range(4):
        engine.add([i] * 4, 200)
    late = engine.add([9] * 50, 3)
    for _ in range(200):
        engine.step()
        if late.state is State.FINISHED:
            return
    raise AssertionError("the prompt waits for ever")


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_the_oldest_request_of_a_tier_is_never_preempted(rig, seed):
    engine = rig.build(rig.policies["gpu_only"](), seed, gpu=7, cpu=0)
    requests = [engine.add(p, n) for p, n in rig.jobs(seed, 6, longest=20, most=50)]

    def between(step):
        running = [r for r in engine.scheduler.queues.running if r.tier == GPU_TIER]
        if running:
            oldest = min(running, key=lambda r: r.index)
            between.seen[oldest.request_id] = oldest.preemptions

    between.seen = {}
    rig.finish(engine, between)
    assert requests[0].preemptions == 0
    for r in requests:
        assert r.preemptions == between.seen.get(r.request_id, r.preemptions)  # none once it was the oldest
