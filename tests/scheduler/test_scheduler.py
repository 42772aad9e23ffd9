"""Admission, refusal, order and reservation, without any device."""

from __future__ import annotations

import pytest

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import CapacityError, InputError
from hybridattn.core.request import Request, State
from hybridattn.core.stages import CPU_TIER, GPU_TIER
from hybridattn.kv.manager import KVManager
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly, SyncOffload
from hybridattn.scheduler.scheduler import Scheduler


def scheduler(gpu, cpu=0, policy=None, page=16, can_move=False, **limits):
    config = EngineConfig(gpu, cpu, page, **{"max_model_len": 4096, "max_num_batched_tokens": 4096, **limits})
    kv = KVManager(config, can_move)
    made = Scheduler(config, policy or GpuOnly(), kv, lambda request: made.ended.append(request))
    made.kv, made.ended = kv, []
    return made


def request(index, prompt, max_tokens=1):
    return Request(f"r{index}", index, [1] * prompt, max_tokens, None, 0)


def add(made, *requests):
    for r in requests:
        made.refuse_impossible(r)
        made.queues.wait(r)
    return requests


def decoded(made, plan):
    """Pretend that the step ran and every sampled row got a token."""
    made.computed(plan.batch)
    for s in plan.batch.segments:
        if s.samples:
            s.request.token_ids.append(1)


def test_E01_a_request_that_can_never_fit_is_refused_with_need_and_capacity_and_blocks_nobody():
    made = scheduler(49)
    with pytest.raises(CapacityError, match="request r0 needs 63 blocks of 16 tokens .*but the gpu tier has 49"):
        add(made, request(0, 1002))
    add(made, *(request(i, 10) for i in range(1, 6)))
    plan = made.schedule(0)
    assert [s.request.request_id for s in plan.batch.segments] == ["r1", "r2", "r3", "r4", "r5"]


def test_E01_prompt_fits_but_prompt_and_output_do_not():
    made = scheduler(4)
    with pytest.raises(CapacityError, match=r"needs 5 blocks .*\(60 prompt \+ up to 6 output tokens\).* has 4"):
        add(made, request(0, 60, max_tokens=6))
    add(made, request(1, 60, max_tokens=5))  # the last token needs no K,V


def test_E01_two_tiers_are_both_named():
    made = scheduler(2, 3, AsyncOverlap())
    with pytest.raises(CapacityError, match="the gpu tier has 2 and the cpu tier has 3"):
        add(made, request(0, 64, max_tokens=1))
    add(made, request(1, 48))  # fits the CPU tier only


@pytest.mark.parametrize(("prompt", "fits"), [(80, True), (81, False)])
def test_E02_every_block_can_be_used(prompt, fits):
    made = scheduler(5)
    if fits:
        add(made, request(0, prompt))
        assert made.schedule(0).batch.num_tokens == prompt
    else:
        with pytest.raises(CapacityError, match="needs 6 blocks.* has 5"):
            add(made, request(0, prompt))


def test_E03_the_one_that_can_finish_runs_though_the_head_of_the_queue_is_blocked():
    made = scheduler(27)
    (long,) = add(made, request(0, 25 * 16, max_tokens=2))
    decoded(made, made.schedule(0))  # holds 25 blocks and needs one more to finish
    head, small = add(made, request(1, 10 * 16), request(2, 1))
    plan = made.schedule(0)
    assert [s.request for s in plan.batch.segments] == [long]
    decoded(made, plan)
    made.finish.end(long, "length", 0)
    assert [s.request for s in made.schedule(0).batch.segments] == [head, small]


def test_a_prompt_above_the_token_budget_is_prefilled_in_chunks():
    made = scheduler(20, max_num_batched_tokens=100, max_num_seqs=4)
    (r,) = add(made, request(0, 250, max_tokens=3))
    seen = []
    while r.state is not State.DECODE:
        plan = made.schedule(0)
        seen += [(s.start, s.num_tokens, s.samples) for s in plan.batch.segments]
        made.computed(plan.batch)
    assert seen == [(0, 100, False), (100, 100, False), (200, 50, True)]


def test_a_short_prompt_behind_a_long_one_comes_within_the_bound_that_limits_md_names():
    made = scheduler(80, max_num_batched_tokens=20, max_num_seqs=4)
    (old,) = add(made, request(0, 1, max_tokens=100))
    decoded(made, made.schedule(0))
    _, short = add(made, request(1, 800), request(2, 10, max_tokens=2))
    steps = 0
    while not short.num_output:
        output = made.schedule(0)
        assert output.batch.segments[0].request is old  # who decodes goes on in every step
        decoded(made, output)
        steps += 1
    assert steps == -(-810 // 19) <= -(-810 // (20 - 4 + 1))


def test_one_chunked_prefill_for_the_cpu_tier_at_a_time():
    made = scheduler(0, 60, SyncOffload(cpu_fraction=1.0), max_num_batched_tokens=100, max_num_seqs=8)
    add(made, request(0, 150), request(1, 150), request(2, 30))
    first = made.schedule(0)
    assert [(s.request.index, s.num_tokens) for s in first.batch.segments] == [(0, 100)]
    made.computed(first.batch)
    second = made.schedule(0)  # r0 ends here, so r1 may begin
    assert [(s.request.index, s.num_tokens) for s in second.batch.segments] == [(0, 50), (1, 50)]
    made.computed(second.batch)
    third = made.schedule(0)
    assert [(s.request.index, s.start) for s in third.batch.segments] == [(1, 50)]


def test_the_youngest_is_preempted_and_comes_back_before_later_arrivals():
    made = scheduler(4)
    old, young = add(made, request(0, 32, 17), request(1, 32, 17))
    decoded(made, made.schedule(0))
    add(made, request(2, 16))
    plan = made.schedule(0)  # both need a third block: the younger one gives its two back
    assert [s.request for s in plan.batch.segments] == [old]
    assert young.state is State.WAITING and not young.pages and young.preemptions == 1
    assert [r.index for r in made.queues.waiting] == [1, 2]


def test_nobody_is_preempted_while_pages_are_on_their_way_back():
    made = scheduler(0, 4, SyncOffload(cpu_fraction=1.0))
    old, young, gone = add(made, request(0, 16, 17), request(1, 16, 17), request(2, 32, 1))
    decoded(made, made.schedule(0))
    gone.in_flight = True
    made.finish.end(gone, "abort", 1)
    assert gone.state is State.LEAVING and made.schedule(0).idle == ()  # both want a second page
    assert young.preemptions == old.preemptions == 0
    made.finish.released(gone, 2)
    assert [row.request for row in made.schedule(0).idle] == [old, young]


def test_who_moved_between_the_tiers_gives_way_last():
    made = scheduler(4, 4, AsyncOverlap(), can_move=True)
    old, young = add(made, request(0, 32, 17), request(1, 16, 17))
    decoded(made, made.schedule(0))
    assert made.swaps.move(young, CPU_TIER)
    made.swaps.arrived(made.kv.take_begun()[0], 0)
    assert made.swaps.move(young, GPU_TIER)  # the tier is full now, and the older one wants a page
    output = made.schedule(0)
    assert output.batch is None and (young.state, old.state) == (State.MOVING, State.WAITING)
    assert (young.preemptions, old.preemptions) == (0, 1)


def test_blocks_of_a_row_in_flight_are_held_until_it_is_released():
    made = scheduler(0, 4, SyncOffload(cpu_fraction=1.0))
    (r,) = add(made, request(0, 20, 5))
    decoded(made, made.schedule(0))
    assert made.schedule(0).idle[0].request is r
    r.in_flight = True
    made.finish.end(r, "abort", 7)
    assert r.state is State.LEAVING and made.kv.pools[CPU_TIER].num_free == 2 and made.ended == []
    made.finish.end(r, "abort", 9)  # twice is once
    made.finish.released(r, 11)
    assert made.kv.pools[CPU_TIER].num_free == 4 and made.ended == [r] and r.end_ns in (7, 9)


def test_the_gpu_tier_is_filled_first_then_the_cpu_tier_then_the_queue():
    made = scheduler(2, 2, AsyncOverlap())
    add(made, *(request(i, 30) for i in range(3)))
    made.schedule(0)
    assert [(r.index, r.tier) for r in made.queues.running] == [(0, GPU_TIER), (1, CPU_TIER)]
    assert [r.index for r in made.queues.waiting] == [2]


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, "gggggggg"), (0.5, "gcgcgcgc"), (0.25, "gggcgggc"), (1.0, "cccccccc")]
)
def test_a_forced_cpu_fraction_is_exact(fraction, expected):
    policy = AsyncOverlap(cpu_fraction=fraction)
    assert "".join(policy.allowed(i)[0][0] for i in range(8)) == expected


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"page_size": 20}, "page_size must be one of 16, 32, 64, 128, got 20"),
        ({"gpu_kv_blocks": -1}, "gpu_kv_blocks and cpu_kv_blocks must be >= 0 and not both 0, got -1 and 4"),
        ({"gpu_kv_blocks": 0, "cpu_kv_blocks": 0}, "not both 0, got 0 and 0"),
        ({"max_num_seqs": 600}, r"max_num_batched_tokens \(512\) must be at least max_num_seqs \(600\)"),
        ({"run_ahead": 0}, "run_ahead must be at least 1, got 0"),
    ],
)
def test_limits_that_cannot_be_met_are_refused(limits, message):
    with pytest.raises(InputError, match=message):
        EngineConfig(**{"gpu_kv_blocks": 4, "cpu_kv_blocks": 4, **limits})
