"""Sessions on the deterministic asynchronous device: their K,V leave the GPU tier in a pause, and come back."""

from __future__ import annotations

import random

import pytest
from held_pages import check_empty, check_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_moves import MovingToyStages
from toy_stages import ToyStages, reference

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import DeviceError, InputError
from hybridattn.core.op import D2H, H2D
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
    "gpu_only": GpuOnly,
    "gpu_only_swapping": lambda: GpuOnly(swap=True),
    "async_overlap": AsyncOverlap,
    "all_on_cpu": lambda: AsyncOverlap(1.0, max_micro_batches=2),
    "half_on_cpu": lambda: SyncOffload(0.5),
    "asymmetric": Asymmetric,
    "asymmetric_priced": lambda: Asymmetric(COSTS),
}


def build(policy, seed=1, *, gpu=12, cpu=20, move_ns=400, stages=MovingToyStages, **limits):
    draw = random.Random(seed)
    bounds = {"move": (move_ns // 2, move_ns), "cpu_attention": (0, 500)}
    price = lambda op: draw.randint(*bounds.get(op.name, (0, 40)))  # noqa: E731
    config = EngineConfig(
        gpu, cpu, PAGE,
        **{"max_model_len": 180, "max_num_seqs": 5, "max_num_batched_tokens": 32, "op_timeout_ns": 10**6, **limits},
    )  # fmt: skip
    return Engine(stages(LAYERS, gpu, cpu, PAGE, config.max_num_seqs), SimDevice(price, execute=True), policy, config)


class Chat:
    """A session of the test: adds its next turn when the one before has ended, after some steps of pause."""

    def __init__(self, engine, name, turns):
        self.engine, self.name, self.turns = engine, name, list(turns)
        self.context, self.request, self.pause = [], None, 0

    def go_on(self):
        """True while there is something to come."""
        if self.request is not None and self.request.finish_reason is not None:
            self.context, self.request = list(self.request.token_ids), None
        if self.request is None and not self.turns:
            return False
        if self.request is None:
            self.pause -= 1
            if self.pause < 0:
                new, count, self.pause = self.turns.pop(0)
                self.request = self.engine.add(self.context + new, count, session=self.name)
        return True


def turns_of(draw):
    return [
        ([draw.randrange(50) for _ in range(draw.randint(1, 20))], draw.randint(1, 9), draw.randint(0, 12))
        for _ in range(draw.randint(1, 4))
    ]


def wanted(turns):
    """The context that the turns leave, by the reference."""
    context = []
    for new, count, _ in turns:
        context += new
        context += reference(context, count, LAYERS)
    return context


def chat(engine, scripts):
    """Serve all sessions; returns the contexts that they end with."""
    chats = [Chat(engine, f"s{i}", turns) for i, turns in enumerate(scripts)]
    for _ in range(6000):
        if not any([c.go_on() for c in chats]):
            break
        engine.step() if engine.unfinished else None
        check_pages(engine)
    else:
        pytest.fail("no progress")
    spans = engine.drain()
    assert violations(spans) == []
    while engine.executor.moves:
        engine.executor.moves.arrive()
    for c in chats:
        engine.end_session(c.name)
    check_empty(engine)
    return [c.context for c in chats], spans


@pytest.mark.parametrize("policy", POLICIES)
@given(
    seed=st.integers(0, 10**6),
    rest=st.sampled_from(["cpu", "gpu"]),
    sizes=st.sampled_from([(12, 20), (12, 12), (30, 40), (12, 0)]),
    move_ns=st.sampled_from([0, 100, 4000]),
)
@settings(max_examples=15, deadline=None)
def test_every_turn_sees_its_whole_history(policy, seed, rest, sizes, move_ns):
    draw = random.Random(seed)
    scripts = [turns_of(draw) for _ in range(5)]
    if policy == "all_on_cpu":
        sizes = (0, max(12, sizes[1]))
    elif policy == "half_on_cpu":
        sizes = (12, max(12, sizes[1]))
    engine = build(POLICIES[policy](), seed, gpu=sizes[0], cpu=sizes[1], move_ns=move_ns, pause_tier=rest)
    got, _ = chat(engine, scripts)
    assert got == [wanted(turns) for turns in scripts]


def one_session(**options):
    engine = build(GpuOnly(), **options)
    script = [([1, 2, 3] * 7, 5, 0), ([4] * 3, 4, 3)]
    got, spans = chat(engine, [script])
    assert got == [wanted(script)]
    return engine, [s for s in spans if s.name == "move"]


def test_in_a_pause_k_v_go_down_and_come_up_and_only_new_tokens_are_computed():
    engine, moves = one_session()
    assert [(s.lane, s.rows) for s in moves] == [(D2H, 25), (H2D, 25), (D2H, 32)]
    assert engine.kv.contexts.reused_tokens == 25  # 21 + 5 tokens, of which the newest had no K,V yet
    assert sum(p.prefill_tokens for p in engine.take_records().steps) == 21 + 1 + 3


def test_they_may_rest_on_the_gpu_tier():
    engine, moves = one_session(pause_tier="gpu")
    assert moves == [] and engine.kv.contexts.reused_tokens == 25


def test_without_room_below_they_stay_on_the_gpu_tier():
    engine, moves = one_session(cpu=1)
    assert moves == [] and engine.kv.contexts.reused_tokens == 25


def test_stages_that_cannot_move_keep_them_where_they_are():
    engine, moves = one_session(stages=ToyStages)
    assert moves == [] and engine.kv.contexts.reused_tokens == 25


def test_the_gpu_blocks_are_free_for_others_during_the_pause():
    engine = build(GpuOnly(), gpu=4, cpu=4, move_ns=10)
    engine.add([1] * 40, 5, session="s")
    engine.run()
    engine.add([2] * 50, 10)  # needs all four
    engine.run()
    assert engine.kv.contexts.evicted == 0
    back = engine.add([1] * 50, 5, session="s")
    engine.run()
    assert engine.kv.contexts.reused_tokens == 40  # as far as the prompts agree
    assert back.token_ids[50:] == reference([1] * 50, 5, LAYERS)


def test_a_running_request_takes_the_blocks_of_a_paused_one():
    engine = build(GpuOnly(), gpu=5, cpu=0)
    engine.add([1] * 40, 5, session="s")
    engine.run()
    assert engine.kv.pools["gpu"].num_free == 2
    request = engine.add([2] * 30, 45)  # admitted into what is free, and grows
    engine.run()
    assert engine.kv.contexts.evicted == 1 and request.preemptions == 0
    again = engine.add([1] * 45 + [3], 5, session="s")
    engine.run()
    assert engine.kv.contexts.reused_tokens == 0
    assert again.token_ids[46:] == reference([1] * 45 + [3], 5, LAYERS)


@pytest.mark.parametrize("moves_block", [False, True])
def test_a_request_that_was_swapped_out_takes_the_pages_of_a_paused_one(moves_block):
    """Pages of contexts are room for those that come back: nobody runs on the CPU tier of this policy."""
    engine = build(GpuOnly(swap=True, moves_block=moves_block), gpu=6, cpu=6, pause_tier="gpu")
    engine.add([1] * 40, 30, session="s")
    out = engine.add([2] * 20, 40)
    while out.tier == "gpu":
        engine.step()
    engine.run()  # the first leaves five of the six pages to its session
    (held,) = engine.kv.contexts
    assert len(held.pages) < 5 and engine.kv.contexts.evicted == 0 and out.preemptions == 0  # its newest pages went
    assert out.token_ids[20:] == reference([2] * 20, 40, LAYERS)


def test_a_context_that_is_longer_than_its_turn_and_than_the_cpu_tier_is_dropped():
    engine = build(SyncOffload(0.5), gpu=12, cpu=4, pause_tier="gpu")
    engine.add([1] * 90, 3, session="s")
    engine.run()
    turn = engine.add([1] * 20, 3, session="s")  # the second request belongs to the CPU tier
    engine.run()
    assert turn.tier == "cpu" and turn.token_ids[20:] == reference([1] * 20, 3, LAYERS)


def test_E22_only_tokens_that_are_the_same_from_the_start_are_found_again():
    engine = build(GpuOnly(), gpu=12, cpu=0)
    first = engine.add([1] * 20, 3, session="s")
    engine.run()
    other = engine.add([2] + first.token_ids[1:] + [5], 3, session="s")  # equal except in the first token
    engine.run()
    assert engine.kv.contexts.reused_tokens == 0
    assert other.token_ids[-3:] == reference([2] + first.token_ids[1:] + [5], 3, LAYERS)
    shorter = engine.add(other.token_ids[:7], 3, session="s")  # an earlier point of the same context
    engine.run()
    assert engine.kv.contexts.reused_tokens == 6  # one has to be computed
    assert shorter.token_ids[7:] == reference(other.token_ids[:7], 3, LAYERS)
    stranger = engine.add(shorter.token_ids + [5], 3)  # the same tokens, but of no session
    engine.run()
    assert engine.kv.contexts.reused_tokens == 6
    assert stranger.token_ids[-3:] == reference(shorter.token_ids + [5], 3, LAYERS)


def test_a_last_turn_and_an_aborted_one_leave_nothing_behind():
    engine = build(GpuOnly())
    engine.add([1] * 20, 3, session="s", keep=False)
    engine.run()
    check_empty(engine)
    request = engine.add([1] * 20, 30, session="s")
    engine.step()
    engine.step()
    engine.abort(request.request_id)
    engine.run()
    check_empty(engine)


@pytest.mark.parametrize("turns", [1, 2])
def test_ending_a_session_on_its_way_frees_both_pools(turns):
    engine = build(GpuOnly(), move_ns=10**5)
    for _ in range(turns):
        engine.add([1] * 20, 3, session="s")
    engine.run()
    assert engine.executor.moves
    engine.end_session("s")
    engine.end_session("nobody")
    check_empty(engine)


@pytest.mark.parametrize("seed", range(4))
def test_an_abort_while_k_v_come_up_frees_both_pools(seed):
    engine = build(GpuOnly(), seed, move_ns=4000)
    engine.add([1] * 20, 3, session="s")
    other = engine.add([2] * 4, 150)
    while not engine.kv.contexts or engine.executor.moves:
        engine.step()
    back = engine.add([1] * 30, 3, session="s")
    engine.step()
    assert back.state is State.MOVING
    engine.abort(back.request_id)
    engine.run()
    assert other.num_output == 150 and back.finish_reason == "abort"
    while engine.executor.moves:
        engine.executor.moves.wait()
    check_empty(engine)


def test_a_broken_engine_forgets_all_contexts():
    engine = build(GpuOnly(), move_ns=10**5)
    for name in ("a", "b", "c"):
        engine.add([1] * 20, 3, session=name)
    engine.run()  # all are on their way down
    engine.add([5] * 3, 3)
    engine.end_session("b")

    def fail(batch):
        raise ArithmeticError("an injected fault")

    engine.executor.stages.begin = fail
    with pytest.raises(DeviceError, match="an injected fault"):
        engine.step()
    check_empty(engine)


def test_where_they_rest_is_checked():
    with pytest.raises(InputError, match="pause_tier must be gpu or cpu, got 'disk'"):
        EngineConfig(4, 4, pause_tier="disk")
