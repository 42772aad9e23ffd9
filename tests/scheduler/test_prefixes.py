"""Requests that share the pages of a common prefix, on the deterministic asynchronous device."""

from __future__ import annotations

import random

import pytest
from held_pages import check_empty, check_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_moves import MovingToyStages
from toy_stages import reference

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import DeviceError, InputError
from hybridattn.core.op import D2H, H2D
from hybridattn.core.params import SamplingParams
from hybridattn.core.trace import violations
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.kv.manager import KVManager
from hybridattn.policies.asymmetric import Asymmetric
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly, SyncOffload
from hybridattn.policies.split import Split

LAYERS, PAGE = 3, 16
POLICIES = {
    "gpu_only": GpuOnly,
    "async_overlap": AsyncOverlap,
    "all_on_cpu": lambda: AsyncOverlap(1.0, max_micro_batches=2),
    "half_on_cpu": lambda: SyncOffload(0.5),
    "asymmetric": Asymmetric,
    "split": Split,
    "split_always": lambda: Split(cold_share=0.5, even_if_it_fits=True),
}
BASE = [7, 3, 1] * 20  # three whole pages of 16 and 12 tokens


def build(policy=None, seed=1, *, gpu=30, cpu=30, move_ns=400, **limits):
    draw = random.Random(seed)
    bounds = {"move": (move_ns // 2, move_ns), "cpu_attention": (0, 500)}
    price = lambda op: draw.randint(*bounds.get(op.name, (0, 40)))  # noqa: E731
    chosen = {"max_model_len": 180, "max_num_seqs": 5, "max_num_batched_tokens": 32, "op_timeout_ns": 10**6}
    config = EngineConfig(gpu, cpu, PAGE, **{**chosen, "share_prefixes": True, **limits})
    device = SimDevice(price, execute=True)
    return Engine(MovingToyStages(LAYERS, gpu, cpu, PAGE, config.max_num_seqs), device, policy or GpuOnly(), config)


def add(engine, prompt, count=4, salt="", **options):
    return engine.add(prompt, count, SamplingParams(max_tokens=count, ignore_eos=True, cache_salt=salt), **options)


def finish(engine):
    """Serve all, with every page accounted for; computed prompt tokens."""
    for _ in range(5000):
        if not engine.unfinished:
            break
        engine.step()
        check_pages(engine)
    else:
        pytest.fail("no progress")
    assert violations(engine.drain()) == []
    engine.executor.moves.wait_all()
    return sum(s.prefill_tokens for s in engine.take_records().steps)


def answer(request):
    return request.token_ids[request.num_prompt :]


def jobs_of(draw, count=8):
    """Prompts that agree on a prefix or part of one; some with another salt, some of a session."""
    jobs = []
    for _ in range(count):
        base = BASE[: draw.choice((0, 16, 33, 48, 60))]
        rest = [draw.randrange(50) for _ in range(draw.randint(1, 30))]
        jobs.append((base + rest, draw.randint(1, 20), draw.choice(("", "", "b")), draw.choice(("", "s", "t"))))
    return jobs


@pytest.mark.parametrize("policy", POLICIES)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.sampled_from([(9, 9), (12, 20), (40, 60), (12, 0)]),
    move_ns=st.sampled_from([0, 100, 4000]),
    rest=st.sampled_from(["cpu", "gpu"]),
)
@settings(max_examples=10, deadline=None)
def test_shared_pages_change_no_token(policy, seed, sizes, move_ns, rest):
    if policy == "all_on_cpu":
        sizes = (0, max(9, sizes[1]))
    elif policy == "half_on_cpu":
        sizes = (sizes[0], max(9, sizes[1]))
    draw = random.Random(seed)
    jobs = jobs_of(draw)
    engine = build(POLICIES[policy](), seed, gpu=sizes[0], cpu=sizes[1], move_ns=move_ns, pause_tier=rest)
    requests, aborted = [], set()
    for prompt, count, salt, session in jobs:
        requests.append(add(engine, prompt, count, salt, session=session))
        for _ in range(draw.randint(0, 12)):
            if engine.unfinished:
                engine.step()
                check_pages(engine)
        if draw.random() < 0.1:
            engine.abort(requests[-1].request_id)
            aborted.add(requests[-1].request_id)
    finish(engine)
    for request, (prompt, count, _, _) in zip(requests, jobs, strict=True):
        got, want = answer(request), reference(prompt, count, LAYERS)
        assert got == (want[: len(got)] if request.request_id in aborted else want)
    for session in ("s", "t"):
        engine.end_session(session)
    check_empty(engine)


def test_the_second_computes_only_what_is_its_own():
    engine = build()
    first = add(engine, BASE + [9])
    finish(engine)
    second = add(engine, BASE + [4, 4])
    assert finish(engine) == 62 - 48 and (first.reused_tokens, second.reused_tokens) == (0, 48)
    assert answer(second) == reference(BASE + [4, 4], 4, LAYERS)
    same = add(
        engine, BASE[:48]
    )  # a prompt of whole pages: its last page is computed, for the first token of the answer
    assert finish(engine) == 16 and answer(same) == reference(BASE[:48], 4, LAYERS)


def test_requests_that_arrive_together_wait_for_the_first_to_compute_what_they_share():
    engine = build(max_num_batched_tokens=200)
    requests = [add(engine, BASE + [i], 12) for i in range(5)]
    assert finish(engine) == 61 + 4 * 13
    assert [answer(r) for r in requests] == [reference(BASE + [i], 12, LAYERS) for i in range(5)]


def test_they_hold_the_same_pages_and_each_writes_to_its_own():
    engine = build()
    requests = [add(engine, BASE + [i], 40) for i in range(3)]
    while any(r.num_output < 2 for r in requests):
        engine.step()
    assert len({tuple(r.pages.hot[:3]) for r in requests}) == 1 and len({r.pages.hot[3] for r in requests}) == 3
    assert [engine.kv.pools["gpu"].holders(page) for page in requests[0].pages.hot] == [3, 3, 3, 1]
    finish(engine)


def test_requests_of_different_salts_share_nothing():
    engine = build()
    requests = [add(engine, BASE + [1], salt=salt) for salt in ("a", "b", "", "a")]
    finish(engine)
    assert [r.reused_tokens for r in requests] == [0, 0, 0, 48]
    assert all(answer(r) == reference(BASE + [1], 4, LAYERS) for r in requests)


def test_without_the_option_nothing_is_shared():
    engine = build(share_prefixes=False)
    add(engine, BASE)
    assert finish(engine) == 60
    add(engine, BASE)
    assert finish(engine) == 60 and engine.kv.prefixes is None
    with pytest.raises(InputError, match="share_prefixes must be True or False, got 'yes'"):
        build(share_prefixes="yes")
    with pytest.raises(InputError, match="cache_salt must be a text, got 7"):
        SamplingParams(cache_salt=7)


def test_pages_that_nobody_holds_go_down_and_come_up_again():
    engine = build(gpu=6, cpu=30)
    add(engine, BASE + [1])
    finish(engine)
    other = add(engine, [5] * 80)  # takes all pages of the GPU tier
    finish(engine)
    assert answer(other) == reference([5] * 80, 4, LAYERS)
    back = add(engine, BASE + [2])
    assert finish(engine) == 61 - 48 and answer(back) == reference(BASE + [2], 4, LAYERS)


def test_the_pages_that_rested_for_the_longest_go_first():
    engine = build(gpu=8, cpu=0)
    for token in (1, 2):
        add(engine, [token] * 33)
        finish(engine)
    add(engine, [1] * 33)
    finish(engine)  # the first is used again: the second rests for longer
    add(engine, [3] * 76)
    finish(engine)
    add(engine, [1] * 33)
    assert finish(engine) == 1
    add(engine, [2] * 33)
    assert finish(engine) > 1


def parts_inside_a_shared_page(engine):
    add(engine, BASE + [1] * 10, session="s")
    finish(engine)
    other = add(engine, BASE + [1] * 6, 30)  # goes on with the pages of the session
    while other.num_output < 3:
        engine.step()
    turn = add(engine, BASE[:40] + [8] * 10, session="s")  # forty tokens agree: two pages and a half
    finish(engine)
    assert answer(turn) == reference(BASE[:40] + [8] * 10, 4, LAYERS)
    assert answer(other) == reference(BASE + [1] * 6, 30, LAYERS)


@pytest.mark.parametrize("rest", ["cpu", "gpu"])
def test_a_turn_that_parts_inside_a_shared_page_gets_a_page_of_its_own(rest):
    parts_inside_a_shared_page(build(pause_tier=rest))


def test_pages_of_a_request_that_failed_are_not_shared():
    engine = build()
    request = add(engine, BASE + [1], 20)
    while request.num_output < 2:
        engine.step()
    engine.scheduler.finish.end(request, "error", engine.device.now_ns())
    again = add(engine, BASE + [1])
    assert finish(engine) and again.reused_tokens == 0


class Writes(KVManager):
    """The mutation: a turn goes on in the page that it shares."""

    __slots__ = ()

    def _share(self, request, tier):
        if request.pages:
            return
        super()._share(request, tier)


def test_writing_into_a_shared_page_is_noticed():
    engine = build(pause_tier="gpu")
    engine.kv.__class__ = Writes
    with pytest.raises((AssertionError, DeviceError)):
        parts_inside_a_shared_page(engine)


class Files(dict):
    """A file tier in memory."""

    def __init__(self, read, write):
        self.read, self.write = read, write

    def has(self, name):
        return name in self

    def save(self, name, page):
        self[name] = self.read(page)

    def load(self, name, page):
        self.write(page, self[name])
        return True


@pytest.mark.parametrize("open_store", [None, Files])
def test_a_victim_of_the_cpu_tier_finds_what_it_gave_up_in_files(open_store):
    """Two requests of 4 pages at the end on 5: the first takes a page of what the second has computed."""
    config = EngineConfig(0, 5, PAGE, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, share_prefixes=True)
    stages, device = MovingToyStages(LAYERS, 0, 5, PAGE, 2), SimDevice(lambda op: 10, execute=True)
    engine = Engine(stages, device, SyncOffload(1.0), config, open_store=open_store)
    requests = [add(engine, [i, 3] * 8, 40) for i in (1, 2)]
    finish(engine)
    assert [answer(r) for r in requests] == [reference([i, 3] * 8, 40, LAYERS) for i in (1, 2)]
    assert [r.preemptions for r in requests] == [0, 1]
    assert requests[1].recomputed_tokens == (0 if open_store else PAGE)


def test_the_copies_go_down_once():
    engine = build()
    for i in range(3):
        add(engine, BASE + [i], 3)  # ends inside its fourth page
        while engine.unfinished:
            engine.step()
        engine.executor.moves.wait_all()
    assert [(s.lane, s.rows) for s in engine.drain() if s.name == "move"] == [(D2H, 48)]
    assert len(engine.kv.pools["cpu"].named()) == 3


def test_a_broken_engine_gives_every_page_back():
    engine = build(move_ns=10**5)
    add(engine, BASE + [1])
    while engine.unfinished:
        engine.step()
    assert engine.kv.under_way  # the prefix goes down
    add(engine, BASE + [2])
    engine.executor.stages.begin = lambda batch: 1 / 0
    with pytest.raises(DeviceError):
        engine.step()
    check_empty(engine)


def test_lanes_of_the_copies():
    engine = build(gpu=6, cpu=30)
    for prompt in (BASE + [1], [5] * 80, BASE + [2]):
        add(engine, prompt)
        while engine.unfinished:
            engine.step()
        engine.executor.moves.wait_all()
    assert {s.lane for s in engine.drain() if s.name == "move"} == {D2H, H2D}
