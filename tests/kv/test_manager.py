"""The KV manager alone, with requests that begin, grow, pause, move and end in any order."""

from __future__ import annotations

import random

import pytest
from held_pages import check_held
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import CapacityError
from hybridattn.core.page_table import CPU_TIER, GPU_TIER, TIERS, other
from hybridattn.core.request import Request, State
from hybridattn.kv.manager import KVManager

PAGE = 16


class Youngest:
    """A scheduler of nothing but a list: the youngest request of a tier gives its pages back at once."""

    def __init__(self, kv, running):
        self.kv, self.running, self.asked = kv, running, 0

    def leaving(self, tier):
        return any(r.state is State.LEAVING and r.tier == tier for r in self.running)

    def give_way(self, request):
        self.asked += 1
        youngest = max((r for r in self.running if r.tier == request.tier and r.pages), key=lambda r: r.index)
        if youngest.in_flight:
            return False
        self.running.remove(youngest)
        self.kv.give_back(youngest)
        return youngest is not request


def manager(gpu, cpu):
    kv = KVManager(EngineConfig(gpu, cpu, PAGE, max_model_len=4096))
    running = []
    return kv, running, Youngest(kv, running)


def request(index, tokens, session=""):
    made = Request(f"r{index}", index, [1] * tokens, 1000, None, 0)
    made.session, made.keep = session, bool(session)
    return made


def begin(kv, running, r, tier):
    r.state = State.PREFILL
    kv.admit(r, tier)
    if r.state is State.PREFILL:
        r.state, r.num_computed = State.DECODE, r.num_tokens - 1
    running.append(r)
    return r


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 12))
@settings(max_examples=150, deadline=None)
def test_every_page_is_held_once_or_free_whatever_is_asked(seed, gpu, cpu):
    draw = random.Random(seed)
    kv, running, victims = manager(gpu, cpu)
    for index in range(60):
        at_rest = [r for r in running if not r.in_flight]
        action = draw.choice(("begin", "grow", "grow", "move", "arrive", "end", "keep", "park", "forget", "split"))
        r = draw.choice(at_rest) if at_rest else None
        tier = draw.choice(TIERS)
        if action == "begin":
            new = request(index, draw.randint(1, 60), draw.choice(("", "a", "b")))
            held = kv.contexts.find(new)
            if kv.need(new) <= kv.free(tier) - (held is not None and held.tier == tier and len(held.pages)) and not (
                held is not None and held.in_flight
            ):
                begin(kv, running, new, tier)
        elif action == "grow" and r is not None:
            r.token_ids += [1] * draw.randint(1, 20)
            r.num_computed = r.num_tokens - 1
            if kv.reserve(r, victims):
                assert len(r.pages) == kv.need(r)
        elif action == "move" and r is not None and r.tier != tier and not r.pages.on(tier):
            if kv.need(r) <= kv.free(tier):
                kv.move(r, tier)
        elif action == "split" and r is not None and len(r.pages.hot) > 1 and kv.pools[CPU_TIER].num_free:
            r.pages.move_down(1, kv.pools[CPU_TIER].allocate(1))  # the oldest page alone: what a split request does
            kv.pools[GPU_TIER].free(r.pages.arrive())
        elif action == "arrive" and kv.under_way:
            move = draw.choice(kv.under_way)
            kv.arrived(move)
            if move.then is not State.PAUSED:
                move.request.in_flight, move.request.state = False, State.DECODE
        elif action in ("end", "keep") and r is not None:
            running.remove(r)
            if action == "keep" and r.session and r.num_tokens > 1 and not r.pages.num_cold:
                kv.contexts.keep(r)
            else:
                kv.give_back(r)
        elif action == "park":
            for held in kv.contexts.at_rest(GPU_TIER):
                if not held.pages.num_cold and len(held.pages) <= kv.pools[CPU_TIER].num_free:
                    kv.move_context(held, CPU_TIER)
        elif action == "forget":
            kv.contexts.drop(draw.choice(("a", "b")))
        check_held(kv, running)
        assert all(kv.free(tier) <= pool.num_blocks for tier, pool in kv.pools.items())
    kv.give_up()
    for r in running:
        kv.give_back(r)
    assert all(pool.num_free == pool.num_blocks for pool in kv.pools.values())


def test_a_full_tier_asks_those_on_their_way_then_contexts_then_the_youngest():
    kv, running, victims = manager(4, 4)
    old, young = (begin(kv, running, request(i, PAGE), GPU_TIER) for i in range(2))
    paused = request(2, PAGE + 1, session="s")
    begin(kv, running, paused, GPU_TIER)
    running.remove(paused)
    kv.contexts.keep(paused)
    kv.pools[GPU_TIER].allocate(1)  # none is free: two of the requests, one of the context, one of somebody else
    old.token_ids.append(1)
    young.state = State.LEAVING
    assert kv.reserve(old, victims) is False and kv.contexts.evicted == 0  # a page is on its way back
    young.state = State.DECODE
    assert kv.reserve(old, victims) is True and kv.contexts.evicted == 1 and victims.asked == 0
    old.token_ids += [1] * PAGE
    assert kv.reserve(old, victims) is True and victims.asked == 1 and running == [old]


def test_nothing_is_taken_from_others_while_a_move_that_begins_now_frees_the_tier():
    kv, running, victims = manager(2, 2)
    old, young = (begin(kv, running, request(i, PAGE), GPU_TIER) for i in range(2))
    old.token_ids.append(1)
    kv.move(young, CPU_TIER)
    assert kv.reserve(old, victims) is False and victims.asked == 0
    (move,) = kv.take_begun()
    assert kv.take_begun() == () and (move.source, move.tokens) == (GPU_TIER, PAGE - 1)
    assert kv.pools[GPU_TIER].num_free == 0 and young.pages.on(GPU_TIER) == list(move.pages)
    kv.arrived(move)
    assert kv.reserve(old, victims) is True and young.pages.num_cold == 1 and not kv.under_way


def test_a_context_on_its_way_down_is_waited_for_before_anybody_gives_way():
    kv, running, victims = manager(2, 2)
    old = begin(kv, running, request(0, PAGE), GPU_TIER)
    paused = begin(kv, running, request(1, PAGE, session="s"), GPU_TIER)
    running.remove(paused)
    kv.contexts.keep(paused)
    kv.move_context(paused, CPU_TIER)
    (move,) = kv.take_begun()
    old.token_ids.append(1)
    assert kv.reserve(old, victims) is False and victims.asked == 0 and kv.contexts.evicted == 0
    kv.arrived(move)
    assert kv.reserve(old, victims) is True and kv.contexts.find(request(9, 1, session="s")) is paused


@pytest.mark.parametrize("tier", TIERS)
def test_a_turn_takes_up_its_context_from_either_tier(tier):
    kv, running, _ = manager(6, 6)
    first = begin(kv, running, request(0, 40, session="s"), GPU_TIER)
    running.remove(first)
    kv.contexts.keep(first)
    pages = list(first.pages.hot)
    turn = begin(kv, running, request(1, 70, session="s"), tier)
    assert kv.contexts.reused_tokens == 39
    assert not first.pages and not kv.contexts
    if tier == GPU_TIER:
        assert turn.pages.hot[:3] == pages and len(turn.pages) == 5
        return
    (move,) = kv.take_begun()
    assert turn.state is State.MOVING and list(move.pages) == pages and move.then is State.PREFILL
    assert len(turn.pages.arriving) == 5  # room for the new tokens as well
    kv.arrived(move)
    assert turn.pages.num_cold == 5 and kv.pools[other(tier)].num_free == 6


def test_pages_many_steps_ahead_fit_the_tier():
    kv, running, _ = manager(8, 0)
    rows = [begin(kv, running, request(i, PAGE - i), GPU_TIER) for i in range(3)]
    kv.reserve_ahead(rows, 1)  # the step to come: every newest token has its page
    assert [len(r.pages) for r in rows] == [1, 1, 1]
    assert kv.steps_ahead(rows, 10) == 10
    steps = kv.steps_ahead(rows, 100)
    assert steps == 12  # 100, 50 and 25 need more than the five pages that are free
    kv.reserve_ahead(rows, steps)
    assert [len(r.pages) for r in rows] == [2, 2, 2] and kv.pools[GPU_TIER].num_free == 2
    assert kv.steps_ahead(rows, 0) == 0


def test_a_tier_that_is_too_small_is_said_with_both_numbers():
    kv, running, _ = manager(2, 0)
    with pytest.raises(CapacityError, match="gpu pool: 3 blocks wanted, 2 of 2 are free"):
        begin(kv, running, request(0, 40), GPU_TIER)
    assert kv.pools[GPU_TIER].num_free == 2
