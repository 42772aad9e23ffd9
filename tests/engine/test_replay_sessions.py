"""Sessions of a workload, replayed with and without their contexts kept; simulated, with prices."""

from __future__ import annotations

import pytest
from toy_moves import MovingToyStages
from toy_stages import reference

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import InputError
from hybridattn.core.op import D2H, H2D
from hybridattn.cost.catalog import shape
from hybridattn.cost.machine import machine
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.engine.replay import Replay
from hybridattn.policies.fixed import GpuOnly
from hybridattn.workload.arrivals import AllAtOnce
from hybridattn.workload.item import WorkItem, Workload
from hybridattn.workload.lengths import Fixed, Uniform
from hybridattn.workload.sessions import agent_sessions

MODEL = shape("llama3.1-8b")


def priced(gpu, cpu, **limits):
    config = EngineConfig(
        gpu, cpu, 16, max_model_len=4096, max_num_seqs=16, max_num_batched_tokens=512, op_timeout_ns=10**12, **limits
    )
    device = SimDevice(machine("a10", "epyc-7r32-16c", "pcie4-x16"))
    return Engine(PricedStages(MODEL, "fp16"), device, GpuOnly(), config)


def served(engine, keep):
    workload = agent_sessions(6, 4, AllAtOnce(), Fixed(600), Uniform(80, 0.5), Fixed(20), 2 * 10**9, seed=7)
    steps = []
    found = Replay(engine, workload, keep_contexts=keep, on_step=steps.append).run()
    assert found.ended == len(workload) and found.refused == 0
    resumed = [r for r in found.requests if workload.items[int(r.request_id)].after is not None]
    ttft_ns = sum(r.token_ns[0] - r.arrival_ns for r in resumed) / len(resumed)
    return ttft_ns, sum(p.prefill_tokens for p in steps), engine.drain()


def test_kept_contexts_spare_their_computation_and_travel_on_the_copy_lanes():
    slow, all_tokens, spans = served(priced(400, 400), keep=False)
    assert not any(s.name == "move k,v" for s in spans)
    engine = priced(400, 400)
    fast, tokens, spans = served(engine, keep=True)
    contexts = engine.kv.contexts
    assert tokens == all_tokens - contexts.reused_tokens and contexts.reused_tokens > 0.7 * all_tokens
    assert fast < slow / 2
    moves = [s for s in spans if s.name == "move k,v"]
    assert sum(s.lane == D2H for s in moves) == sum(s.lane == H2D for s in moves) == 6 * 3  # each pause, there and back
    assert all(s.num_bytes == s.rows * MODEL.kv_bytes_per_token("fp16") for s in moves)
    assert all(pool.num_free == 400 for pool in engine.kv.pools.values())


def test_a_gpu_tier_that_contexts_would_fill_is_free_in_the_pauses():
    """Six contexts of some 900 tokens do not fit 200 blocks, but one at a time does."""
    left = {}
    for rest in ("cpu", "gpu"):
        engine = priced(200, 600, pause_tier=rest)
        served(engine, keep=True)
        left[rest] = engine.kv.contexts.evicted
    assert left["cpu"] == 0 and left["gpu"] > 0


def test_a_turn_that_comes_before_the_next_arrival_is_served_in_time():
    """The engine knows of a late arrival already when a turn ends whose follower comes earlier."""
    items = (
        WorkItem(0, 20, 5, "s"),
        WorkItem(0, 20, 5, "s", history_tokens=25, after=0, delay_ns=10**9),
        WorkItem(60 * 10**9, 20, 5),
    )
    found = Replay(priced(100, 100), Workload("two", items)).run()
    waits_ns = [r.scheduled_ns - r.arrival_ns for r in found.requests]
    assert len(waits_ns) == 3 and max(waits_ns) < 10**9


def toy():
    config = EngineConfig(20, 20, 16, max_model_len=100, max_num_seqs=4, max_num_batched_tokens=32)
    return Engine(MovingToyStages(3, 20, 20, 16, 4), SimDevice(lambda op: 10, execute=True), GpuOnly(), config)


def test_real_tokens_go_on_from_what_was_made():
    items = (
        WorkItem(0, 20, 5, "s"),
        WorkItem(0, 7, 4),
        WorkItem(0, 4, 3, "s", history_tokens=25, after=0, delay_ns=10**6),
        WorkItem(0, 2, 2, "s", history_tokens=32, after=2, delay_ns=10**6),
        WorkItem(0, 6, 2, after=1),  # follows, but has no history
    )
    new = [[i + 1] * item.prompt_tokens for i, item in enumerate(items)]
    engine = toy()
    engine.device.sleep_until_ns(12345)  # arrivals count from the start of the replay
    requests = {}
    add = engine.add
    engine.add = lambda *a, **k: requests.setdefault(int(k["request_id"]), add(*a, **k))
    found = Replay(engine, Workload("two", items), prompts=lambda i, _: new[i], keep_contexts=True).run()
    assert found.ended == 5 and min(r.arrival_ns for r in found.requests) == 12345
    context = []
    for i in (0, 2, 3):
        context += new[i]
        context += reference(context, items[i].output_tokens, 3)
        assert requests[i].token_ids == context
    assert requests[4].token_ids == new[4] + reference(new[4], 2, 3)
    assert engine.kv.contexts.reused_tokens == 24 + 31 and not engine.kv.contexts


def test_what_can_never_fit_is_refused_turn_by_turn():
    items = (WorkItem(0, 90, 5, "s"), WorkItem(0, 400, 5, "t"), WorkItem(0, 4, 3, "t", history_tokens=405, after=1))
    engine = Engine(
        MovingToyStages(3, 8, 8, 16, 4), SimDevice(lambda op: 10, execute=True), GpuOnly(),
        EngineConfig(8, 8, 16, max_model_len=500, max_num_seqs=4, max_num_batched_tokens=32),
    )  # fmt: skip
    workload = Workload("long", items)
    found = Replay(engine, workload, prompts=lambda i, w: [1] * w.prompt_tokens, keep_contexts=True).run()
    assert (found.ended, found.refused) == (1, 2)


def test_tokens_that_are_not_what_the_workload_declares_are_refused():
    workload = Workload("one", (WorkItem(0, 5, 5),))
    with pytest.raises(InputError, match=r"workload one: item 0 declares 0 \+ 5 tokens .* but there are 0 \+ 3"):
        Replay(toy(), workload, prompts=lambda i, w: [1, 2, 3]).run()
