"""Moves between the tiers on the deterministic asynchronous device: whenever they begin, whenever they end."""

from __future__ import annotations

import random

import pytest
from held_pages import check_empty, check_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_moves import MovingToyStages
from toy_stages import reference

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import DeviceError, InputError, StallError
from hybridattn.core.op import CPU, D2H, H2D
from hybridattn.core.request import State
from hybridattn.core.trace import violations
from hybridattn.cost.catalog import shape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.policies.asymmetric import Asymmetric
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly, SyncOffload

LAYERS, PAGE = 3, 16
COSTS = Costs(ModelCost(shape("llama3.1-8b"), "fp16"), machine("a10", "epyc-7r32-16c", "pcie4-x16"))
POLICIES = {
    "async_overlap": AsyncOverlap,
    "half_on_cpu": lambda: AsyncOverlap(0.5, max_micro_batches=2),
    "sync_offload": SyncOffload,
    "asymmetric": Asymmetric,
}


class ForgetfulStages(MovingToyStages):
    """The mutation: the newest token that has K,V stays behind."""

    def move(self, request, source, blocks, tokens):
        return super().move(request, source, blocks, tokens - 1)


class SpoiledDevice(SimDevice):
    """The ``at``-th move fails or never ends."""

    def __init__(self, price, at, fault):
        self._moves, self._at, self._fault = 0, at, fault
        super().__init__(lambda op: 10**15 if self._spoils(op) and fault == "hang" else price(op), execute=True)

    def _spoils(self, op):
        return op.name == "move" and self._moves == self._at

    def submit(self, op, after=()):
        self._moves += op.name == "move"
        if self._spoils(op) and self._fault == "raise":
            op.run = explode
        return super().submit(op, after)


def explode():
    raise ArithmeticError("an injected fault")


def build(policy, seed=1, *, gpu=8, cpu=10, move_ns=400, stages=MovingToyStages, device=None, **limits):
    """A move takes up to ``move_ns``, which is many steps; other ops up to 40."""
    draw = random.Random(seed)
    longest = {CPU: 800, D2H: 40, H2D: 40}
    price = lambda op: (  # noqa: E731
        draw.randint(move_ns // 2, move_ns) if op.name == "move" else draw.randint(0, longest.get(op.lane, 40))
    )
    sim = SimDevice(price, execute=True) if device is None else device(price)
    config = EngineConfig(
        gpu, cpu, PAGE,
        **{"max_model_len": 200, "max_num_seqs": 6, "max_num_batched_tokens": 40, "op_timeout_ns": 10**6, **limits},
    )  # fmt: skip
    return Engine(stages(LAYERS, gpu, cpu, PAGE, config.max_num_seqs), sim, policy, config)


def jobs_of(seed, count, longest=60):
    draw = random.Random(seed)
    return [([draw.randrange(50) for _ in range(draw.randint(1, longest))], draw.randint(4, 20)) for _ in range(count)]


def serve(engine, jobs, choose):
    """Serve all; before each step ``choose(step)`` names requests to move and to abort. Returns how many moved."""
    requests = [engine.add(p, n) for p, n in jobs]
    step = moved = 0
    while engine.unfinished:
        moves, aborts = choose(step)
        for i in moves:
            if i < len(requests):
                moved += engine.move(f"r{i}", "cpu" if requests[i].tier == "gpu" else "gpu")
        for i in aborts:
            engine.abort(f"r{i}")
        if engine.unfinished:
            engine.step()
        check_pages(engine)
        step += 1
        assert step < 5000, "no progress"
    assert violations(engine.drain()) == []
    engine.finish_moves()  # K,V of one that was aborted may be on their way down
    check_empty(engine)
    return [r.token_ids[r.num_prompt :] for r in requests], moved


def at_random(seed, abort=0.0):
    draw = random.Random(seed)
    return lambda step: (
        [i for i in range(5) if draw.random() < 0.3],
        [draw.randrange(5)] if draw.random() < abort else [],
    )


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 10**6), tight=st.booleans(), move_ns=st.sampled_from([0, 50, 3000]))
@settings(max_examples=15, deadline=None)
def test_tokens_hold_whenever_requests_move(policy, seed, tight, move_ns):
    jobs = jobs_of(seed, 5)
    blocks = {"gpu": 7, "cpu": 7} if tight else {"gpu": 20, "cpu": 30}
    engine = build(POLICIES[policy](), seed, move_ns=move_ns, **blocks)
    got, _ = serve(engine, jobs, at_random(seed))
    assert got == [reference(p, n, LAYERS) for p, n in jobs]


def test_many_requests_move_many_times():
    engine = build(AsyncOverlap(), 4, gpu=20, cpu=30, move_ns=50)
    jobs = jobs_of(4, 5)
    got, moved = serve(engine, jobs, at_random(4))
    assert moved >= 8 and got == [reference(p, n, LAYERS) for p, n in jobs]


def test_a_move_that_leaves_out_a_token_is_noticed():
    """The mutation that shows that the toy model would see a stale value."""
    engine = build(AsyncOverlap(), 4, gpu=20, cpu=30, move_ns=50, stages=ForgetfulStages)
    jobs = jobs_of(4, 5)
    with pytest.raises((TypeError, DeviceError, AssertionError)):  # a slot never written blows up, a stale one differs
        got, _ = serve(engine, jobs, at_random(4))
        assert got == [reference(p, n, LAYERS) for p, n in jobs]


def test_blocks_that_were_given_back_too_early_are_noticed():
    """The mutation: the source's blocks are free as soon as the move is submitted, and others write into them."""
    wrong = 0
    for seed in range(12):
        jobs = jobs_of(seed, 5)
        engine = build(AsyncOverlap(), seed, gpu=8, cpu=30, move_ns=3000)
        begin = engine._begin

        def early(moves, begin=begin, engine=engine):
            begin(moves)
            for move in moves:
                engine.kv.pools[move.source].free(list(move.pages))
                move.request.pages.on(move.source).clear()

        engine._begin = early
        try:
            got, _ = serve(engine, jobs, at_random(seed))
            wrong += got != [reference(p, n, LAYERS) for p, n in jobs]
        except (AssertionError, DeviceError):
            wrong += 1
    assert wrong > 0


def test_an_asymmetric_policy_swaps_by_itself_and_tokens_hold():
    jobs = [([1, 2, 3] * 5, 40), ([4] * 15, 40), ([5, 6] * 7, 40)]
    engine = build(Asymmetric(), 2, gpu=5, cpu=8, move_ns=100)
    requests = [engine.add(p, n) for p, n in jobs]
    while engine.unfinished:
        engine.step()
        check_pages(engine)
    assert sum(r.preemptions for r in requests) == 0
    assert [r.token_ids[r.num_prompt :] for r in requests] == [reference(p, n, LAYERS) for p, n in jobs]
    assert {s.lane for s in engine.drain() if s.name == "move"} == {D2H, H2D}
    check_empty(engine)


# -- preemption ------------------------------------------------------------------------------------------------------

GROWING = [([1, 2, 3] * 5, 40), ([4] * 15, 40), ([5, 6] * 7, 40)]  # their prompts fit the GPU tier, their ends do not


@pytest.mark.parametrize(
    ("policy", "cpu"),
    [(policy, cpu) for policy in ("gpu_only", *POLICIES) for cpu in (0, 3, 12) if policy != "half_on_cpu" or cpu > 8],
)
def test_nothing_is_computed_twice_that_the_cpu_tier_has_room_for(policy, cpu):
    made = GpuOnly() if policy == "gpu_only" else POLICIES[policy]()
    engine = build(made, 2, gpu=4, cpu=cpu, move_ns=100)
    got, _ = serve(engine, GROWING, lambda step: ((), ()))
    assert got == [reference(p, n, LAYERS) for p, n in GROWING]
    records = engine.take_records()
    again = sum(s.prefill_tokens for s in records.steps) - sum(len(p) for p, _ in GROWING)
    lost = sum(r.recomputed_tokens for r in records.requests)
    assert sum(r.preemptions for r in records.requests) > 0 or made.name != "gpu_only"
    if cpu == 12:
        assert lost == again == 0
    elif cpu == 0:
        assert lost > 0
    assert lost <= again  # beside them its newest token, whose K,V it never had


@pytest.mark.parametrize(("cpu", "lost"), [(5, PAGE), (7, 0)])
def test_a_victim_of_the_cpu_tier_loses_no_more_than_the_pages_that_others_need(cpu, lost):
    """Two requests of 4 pages at the end; the younger gives way, and loses a page of 16 tokens or none."""
    jobs = [([1, 2, 3] * 5, 40), ([4] * 15, 40)]
    engine = build(SyncOffload(1.0), gpu=0, cpu=cpu)
    got, _ = serve(engine, jobs, lambda step: ((), ()))
    assert got == [reference(p, n, LAYERS) for p, n in jobs]
    records = engine.take_records().requests
    assert [r.preemptions for r in records] == [0, 1] and sum(r.recomputed_tokens for r in records) == lost


@pytest.mark.parametrize(("left", "tier"), [(1, "cpu"), (20, "gpu")])
def test_a_preempted_request_decodes_where_its_k_v_lie_when_bringing_them_up_does_not_pay(left, tier):
    policy = AsyncOverlap()
    policy.costs = COSTS
    engine = build(policy, gpu=40, cpu=40, max_model_len=500)
    request = decoding(engine, [1] * 400, left + 1)
    engine.scheduler.finish.preempt(request)  # the GPU tier has room for it all the same
    engine.run()
    assert request.tier == tier and request.recomputed_tokens == 0
    assert request.token_ids[400:] == reference([1] * 400, left + 1, LAYERS)


@given(seed=st.integers(0, 10**6), cpu=st.integers(0, 12), move_ns=st.sampled_from([0, 50, 3000]))
@settings(max_examples=20, deadline=None)
def test_preempted_requests_come_back_aborted_or_not_and_tokens_hold(seed, cpu, move_ns):
    jobs = jobs_of(seed, 5)
    engine = build(GpuOnly(), seed, gpu=6, cpu=cpu, move_ns=move_ns)
    draw = random.Random(seed)
    got, _ = serve(engine, jobs, lambda step: ((), [draw.randrange(5)] if draw.random() < 0.02 else ()))
    ended = {r.request_id: r.finish_reason for r in engine.take_records().requests}
    for i, ((prompt, count), tokens) in enumerate(zip(jobs, got, strict=True)):
        want = reference(prompt, count, LAYERS)
        assert tokens == (want[: len(tokens)] if ended[f"r{i}"] == "abort" else want)


# -- refusals, aborts, faults ----------------------------------------------------------------------------------------


def decoding(engine, prompt=(1, 2, 3), count=30):
    """A request whose prompt is through."""
    request = engine.add(list(prompt), count)
    while request.num_output < 1:
        engine.step()
    return request


def test_what_cannot_move_is_left_where_it_is():
    engine = build(AsyncOverlap(), gpu=5, cpu=2)
    assert engine.move("nobody", "cpu") is False
    with pytest.raises(InputError, match="tier 'disk' is none of policy 'async_overlap': gpu, cpu"):
        engine.move("r0", "disk")
    with pytest.raises(InputError, match="tier 'cpu' is none of policy 'gpu_only': gpu"):
        build(GpuOnly()).move("r0", "cpu")
    waiting = engine.add([1] * 3, 5)
    assert engine.move(waiting.request_id, "cpu") is False  # its prompt is still to come
    engine.run()
    long = decoding(engine, [1] * 40)
    assert engine.move(long.request_id, "cpu") is False  # no room
    assert engine.move(long.request_id, "gpu") is False  # it is there
    engine.run()
    short = decoding(engine)
    assert engine.move(short.request_id, "cpu") is True
    assert engine.move(short.request_id, "gpu") is False  # it is on its way
    engine.run()
    check_empty(engine)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_aborts_amid_moves_free_both_pools_once_and_leave_the_others_alone(seed):
    jobs = jobs_of(seed, 5)
    engine = build(AsyncOverlap(), seed, gpu=9, cpu=9, move_ns=2000)
    got, _ = serve(engine, jobs, at_random(seed, abort=0.2))
    ended = {r.request_id: r.finish_reason for r in engine.take_records().requests}
    assert len(ended) == len(jobs)
    for i, ((prompt, count), tokens) in enumerate(zip(jobs, got, strict=True)):
        want = reference(prompt, count, LAYERS)
        assert tokens == (want[: len(tokens)] if ended[f"r{i}"] == "abort" else want)


@pytest.mark.parametrize("way", ["down", "up"])
def test_an_abort_during_a_move_holds_all_blocks_until_it_has_arrived(way):
    engine = build(AsyncOverlap(), gpu=12, cpu=4, move_ns=4000)
    first, other = decoding(engine, [1] * 20), decoding(engine, count=120)
    if way == "up":
        assert engine.move(first.request_id, "cpu")
        while first.state is not State.DECODE:
            engine.step()
        while first.in_flight:
            engine.step()
    assert engine.move(first.request_id, "cpu" if way == "down" else "gpu")
    engine.abort(first.request_id)
    assert first.state is State.LEAVING
    free = {t: p.num_free for t, p in engine.kv.pools.items()}
    source = "gpu" if way == "down" else "cpu"
    assert len(first.pages.held(source)) == 2 and len(first.pages.arriving) == 2
    engine.step()
    assert {t: p.num_free for t, p in engine.kv.pools.items()} == free
    while engine.unfinished:
        engine.step()
        check_pages(engine)
    assert first.finish_reason == "abort" and other.num_output == 120
    engine.drain()
    check_empty(engine)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_a_move_that_fails_or_hangs_breaks_the_engine_in_bounded_time(fault, alone):
    engine = build(AsyncOverlap(), device=lambda price: SpoiledDevice(price, 1, fault), gpu=14, op_timeout_ns=5000)
    request = decoding(engine, [1] * 20, 100)
    if not alone:
        decoding(engine, [2] * 3, 170)  # goes on beside it: steps must not hide the fault
    started_ns = engine.device.now_ns()
    assert engine.move(request.request_id, "cpu")
    with pytest.raises(DeviceError, match=r"op 'move' on lane gpu.d2h of request r0") as caught:
        for _ in range(10**6):
            engine.step()
    assert isinstance(caught.value, StallError) == (fault == "hang")
    assert engine.device.now_ns() - started_ns < 12_000  # virtual; the time-out is 5000
    assert engine.broken is not None
    check_empty(engine)  # those that the move came from as well
    with pytest.raises(DeviceError, match="this engine stopped earlier"):
        engine.move(request.request_id, "cpu")


def test_an_engine_that_breaks_for_another_reason_gives_the_blocks_of_its_moves_back():
    engine = build(AsyncOverlap(), gpu=8, cpu=8, move_ns=10**5)
    request, _ = decoding(engine, [1] * 20, 100), decoding(engine)
    assert engine.move(request.request_id, "cpu")
    engine.executor.stages.begin = lambda batch: explode()
    with pytest.raises(DeviceError, match="a step was cut short by ArithmeticError"):
        engine.step()
    check_empty(engine)


# -- up, for good ----------------------------------------------------------------------------------------------------


class Rising(SyncOffload):
    """Whoever can, moves up."""

    hooks = frozenset({"move_up"})

    def __init__(self, cpu_fraction=None):
        super().__init__(cpu_fraction)
        self.asked = []

    def move_up(self, gpu_rows, cpu_rows):
        self.asked.append((gpu_rows, cpu_rows))
        return True


@given(seed=st.integers(0, 10**6), gpu=st.integers(6, 14), move_ns=st.sampled_from([0, 50, 3000]))
@settings(max_examples=25, deadline=None)
def test_requests_move_up_when_the_gpu_tier_has_room_for_good_and_tokens_hold(seed, gpu, move_ns):
    jobs = jobs_of(seed, 5)
    engine = build(Rising(), seed, gpu=gpu, cpu=30, move_ns=move_ns)
    got, _ = serve(engine, jobs, lambda step: ((), ()))
    assert got == [reference(p, n, LAYERS) for p, n in jobs]


def test_when_the_gpu_rows_are_through_the_others_do_not_stay_on_the_cpu():
    """Two of four fit at first; the policy is asked with the rows that there are, one request at a time."""
    jobs = [([1] * 20, 8), ([2] * 20, 8), ([3] * 20, 20), ([4] * 20, 20)]
    policy = Rising()
    engine = build(policy, 3, gpu=4, cpu=8, move_ns=50)
    got, _ = serve(engine, jobs, lambda step: ((), ()))
    assert got == [reference(p, n, LAYERS) for p, n in jobs]
    assert {r.request_id: r.tier for r in engine.take_records().requests} == dict.fromkeys(
        ("r0", "r1", "r2", "r3"), "gpu"
    )
    assert all(cpu >= 1 for _, cpu in policy.asked) and len(policy.asked) >= 2


def test_nobody_moves_up_who_might_have_to_go_down_again():
    """Of nine pages one may come to hold six and the other eight: that one stays where it is until the first ends."""
    engine = build(Rising(), 3, gpu=9, cpu=8, move_ns=50)
    long = engine.add([1] * 20, 70)
    engine.step()
    engine.scheduler.swaps.upwards = False  # placed on the CPU tier by hand, to begin with
    other = engine.add([2] * 20, 100)
    while other.state is not State.DECODE:
        engine.step()
    assert engine.move(other.request_id, "cpu") or other.tier == "cpu"
    engine.scheduler.swaps.upwards = True
    while long.finish_reason is None:
        assert other.tier == "cpu"
        engine.step()
    engine.run()
    assert other.tier == "gpu" and long.preemptions == other.preemptions == 0
