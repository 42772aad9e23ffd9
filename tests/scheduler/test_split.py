"""Requests over both tiers on the deterministic asynchronous device: whenever pages move, whatever the CPU takes."""

from __future__ import annotations

import random

import pytest
from held_pages import check_empty, check_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_moves import MovingToyStages
from toy_stages import reference

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import CapacityError, DeviceError, InputError
from hybridattn.core.op import CPU
from hybridattn.core.trace import violations
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.executor.moves import Moves
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly
from hybridattn.policies.split import Split

LAYERS, PAGE = 2, 16


class Mixed(AsyncOverlap):
    """Every second request lies on the CPU tier as a whole, the others on both."""

    hooks = frozenset({"cold_pages"})

    def place(self, request, tiers):
        tier = "cpu" if request.index % 2 else "gpu"
        return tier if tiers[tier].admits(request) else None

    def cold_pages(self, view):
        return 1, 3


def build(policy, seed=1, *, gpu=6, cpu=14, stages=MovingToyStages, cpu_ns=800, move_ns=3000, **limits):
    draw = random.Random(seed)
    longest = {CPU: cpu_ns}
    price = lambda op: draw.randint(0, move_ns if op.name == "move" else longest.get(op.lane, 40))  # noqa: E731
    limits = {"max_model_len": 400, "max_num_seqs": 5, "max_num_batched_tokens": 40, "op_timeout_ns": 10**6, **limits}
    config = EngineConfig(gpu, cpu, PAGE, **limits)
    device = SimDevice(price, execute=True)
    return Engine(stages(LAYERS, gpu, cpu, PAGE, config.max_num_seqs), device, policy, config)


def jobs_of(seed, count=5, longest=90):
    draw = random.Random(seed)
    return [([draw.randrange(50) for _ in range(draw.randint(1, longest))], draw.randint(4, 30)) for _ in range(count)]


def serve(engine, jobs, abort=lambda step: None, **options):
    """Serve all; the answers, and most rows and cold tokens of a step."""
    requests = [engine.add(p, n, **options) for p, n in jobs]
    run, most = engine.executor.run, [0, 0]

    def watched(batch, idle, *more):
        if batch is not None:
            most[:] = max(most[0], len(batch.split)), max(most[1], batch.cold_kv_tokens)
        return run(batch, idle, *more)

    engine.executor.run = watched
    step = 0
    while engine.unfinished:
        if (victim := abort(step)) is not None:
            engine.abort(f"r{victim}")
        if engine.unfinished:
            engine.step()
        check_pages(engine)
        step += 1
        assert step < 5000, "no progress"
    assert violations(engine.drain()) == []
    check_empty(engine)
    return [r.token_ids[r.num_prompt :] for r in requests], most


def right(jobs, window=None):
    return [reference(p, n, LAYERS, window) for p, n in jobs]


@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(
        [
            lambda: Split(),
            lambda: Split(max_cold_tokens=64),
            lambda: Split(max_cold_tokens=64, micro_batches=2),
            Mixed,
            *(lambda s=s: Split(cold_share=s, even_if_it_fits=True) for s in (0.25, 0.5, 0.75, 1.0)),
        ]
    ),
    tight=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_tokens_hold_for_every_share_and_order(seed, policy, tight):
    jobs = jobs_of(seed)
    engine = build(policy(), seed, **({"gpu": 8, "cpu": 4} if tight else {"gpu": 9, "cpu": 30}))
    assert serve(engine, jobs)[0] == right(jobs)


class Windowed(MovingToyStages):
    window = 40


@given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(
        [Split, Mixed, lambda: Split(cold_share=0.5, even_if_it_fits=True), GpuOnly, lambda: AsyncOverlap(0.5)]
    ),
)
@settings(max_examples=30, deadline=None)
def test_pages_that_a_window_has_left_behind_are_given_back(seed, policy):
    """On both tiers, while others move, and with preemptions: a row that decodes holds what its window needs."""
    jobs = jobs_of(seed)
    engine = build(policy(), seed, gpu=9, cpu=12, stages=Windowed)
    run = engine.executor.run

    def watched(batch, idle, *more):
        rows = [s.request for s in batch.segments if not s.prefill] if batch is not None else []
        for r in [*rows, *(row.request for row in idle)]:
            still = len(r.pages.arriving) > 0  # a page on its way stays until it has come
            assert still or len(r.pages) <= 2 + Windowed.window // PAGE
        return run(batch, idle, *more)

    engine.executor.run = watched
    assert serve(engine, jobs)[0] == right(jobs, Windowed.window)


def test_what_a_window_leaves_behind_is_room_for_others():
    """Two requests of 11 pages at the end on 11: nobody is preempted."""
    jobs = [([i] * 30, 140) for i in range(2)]
    for policy in (GpuOnly(), Split()):
        engine = build(policy, gpu=11, cpu=2, stages=Windowed)
        assert serve(engine, jobs)[0] == right(jobs, Windowed.window)
        assert [r.preemptions for r in engine.take_records().requests] == [0, 0]


def test_a_page_given_back_too_early_is_noticed():
    """The mutation: the window counts as a page shorter than it is."""
    jobs = [([i] * 30, 60) for i in range(2)]
    engine = build(Split(), gpu=11, stages=Windowed)
    engine.kv.window = Windowed.window - PAGE
    assert serve(engine, jobs)[0] != right(jobs, Windowed.window)


def test_a_session_keeps_what_its_next_turn_may_attend_to():
    engine = build(GpuOnly(), gpu=20, stages=Windowed)
    first = engine.add([3] * 60, 30, session="s")
    engine.run()
    assert len(first.pages) == 6
    turn = engine.add([3] * 60 + [7], 5, session="s")
    engine.run()
    assert engine.kv.contexts.reused_tokens == 60 and turn.token_ids[61:] == reference([3] * 60 + [7], 5, LAYERS, 40)


def test_pages_go_down_as_rows_grow_and_nobody_is_preempted():
    jobs = [([i] * 20, 60) for i in range(4)]  # 20 pages at the end, 6 on the GPU tier
    engine = build(Split(), gpu=6, cpu=16)
    answers, (rows, cold) = serve(engine, jobs)
    assert answers == right(jobs) and rows == 4 and cold >= 10 * PAGE
    assert sum(r.preemptions for r in engine.take_records().requests) == 0


def test_requests_beyond_the_cold_bound_go_down_as_a_whole_in_micro_batches():
    jobs = [([i] * 20, 60) for i in range(5)]
    engine = build(Split(max_cold_tokens=3 * PAGE, micro_batches=2), gpu=6, cpu=20)
    together, run = set(), engine.executor.run

    def watched(batch, idle, *more):
        together.add((bool(batch and batch.split), bool(engine.executor.micro_batches)))
        return run(batch, idle, *more)

    engine.executor.run = watched
    assert serve(engine, jobs)[0] == right(jobs) and (True, True) in together
    with pytest.raises(InputError, match="micro_batches must be at least 0, got -1"):
        Split(micro_batches=-1)


def test_a_request_longer_than_the_gpu_tier_is_served():
    jobs = [([7] * 150, 60)]
    engine = build(Split(), gpu=3, cpu=12, max_num_seqs=2)
    answers, (_, cold) = serve(engine, jobs)
    assert answers == right(jobs) and cold >= 9 * PAGE
    with pytest.raises(CapacityError, match="needs 16 blocks"):
        engine.add([7] * 240, 16)


def test_with_room_for_all_the_ops_are_those_of_gpu_only():
    jobs, spans = jobs_of(3), []
    for policy in (GpuOnly(), Split()):
        engine = build(policy, gpu=60)
        for prompt, count in jobs:
            engine.add(prompt, count)
        engine.run()
        spans.append(engine.drain())
    assert spans[0] == spans[1]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_aborts_give_every_page_back(seed):
    draw = random.Random(seed)
    jobs = jobs_of(seed)
    engine = build(Split(), seed, gpu=6, cpu=20)
    got, _ = serve(engine, jobs, lambda step: draw.randrange(5) if draw.random() < 0.04 else None)
    assert all(answer == want[: len(answer)] for answer, want in zip(got, right(jobs), strict=True))


def test_a_page_counts_for_its_new_tier_only_once_its_copy_has_ended(monkeypatch):
    """The mutation: it is read there from the moment on at which the copy begins."""
    jobs = [([i] * 20, 60) for i in range(4)]
    monkeypatch.setattr(Moves, "add", lambda moves, future, done: done())
    with pytest.raises(DeviceError, match="failed"):
        serve(build(Split(), gpu=6, cpu=16), jobs)


@pytest.mark.parametrize("answer", [None, 3, (1,), ("a", "b"), (0.5, 2)])
def test_cold_pages_that_are_no_two_numbers_are_refused(answer):
    policy = Mixed()
    policy.cold_pages = lambda view: answer
    with pytest.raises(InputError, match=r"cold_pages\(\) must return two numbers of pages, got "):
        serve(build(policy), jobs_of(1))
