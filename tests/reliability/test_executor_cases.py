"""E08, E13, E14, E16, E20, E22: what users of such engines reported about their cache and their limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_stages import reference

from hybridattn import SamplingParams
from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import CapacityError, InputError
from hybridattn.core.op import Op
from hybridattn.core.params import NoEffectWarning
from hybridattn.core.request import DeclaredTokens, State
from hybridattn.core.shapes import ModelShape
from hybridattn.core.stages import GPU_TIER
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.policies.asymmetric import Asymmetric
from hybridattn.policies.fixed import AsyncOverlap, SyncOffload

STATES = {  # when to abort; evaluated before each step
    "queued": lambda r: r.state is State.WAITING and r.preemptions == 0,
    "prefilling": lambda r: r.state is State.PREFILL,
    "decoding": lambda r: r.state is State.DECODE and not r.in_flight and r.num_output > 1,
    "in flight": lambda r: r.in_flight,
    "preempted in flight": lambda r: r.state is State.LEAVING and r.requeue,
    "preempted and queued": lambda r: r.state is State.WAITING and r.preemptions > 0,
    "about to finish": lambda r: r.num_output == r.max_tokens - 1,
    "first token": lambda r: r.num_output == 1,
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("policy", ["gpu_only", "all_on_cpu", "async_overlap"])
def test_E13_an_abort_in_any_state_harms_nobody_and_frees_everything(rig, policy, state):
    if policy == "gpu_only" and "flight" in state:
        pytest.skip("a GPU row is never in flight between two steps")
    engine = rig.build(rig.policies[policy](), gpu=5, cpu=5, max_num_seqs=3, max_num_batched_tokens=20)
    jobs = rig.jobs(4, 8, longest=40, most=30)
    requests = [engine.add(p, n) for p, n in jobs]
    hit: list[str] = []

    def between(step):
        for r in engine.scheduler.queues.running[-1:] if "preempted" in state and not step % 5 else ():
            if r.state is State.DECODE and not r.requeue:
                engine.scheduler.finish.preempt(r)
        for r in requests:
            if len(hit) < 3 and r.request_id not in hit and r.finish_reason is None and STATES[state](r):
                hit.append(r.request_id)
                engine.abort(r.request_id)
                engine.abort(r.request_id)  # twice is once
                engine.abort("nobody")

    rig.finish(engine, between)
    assert hit
    reasons = {r.request_id: r.finish_reason for r in engine.take_records().requests}
    assert len(reasons) == len(jobs) and {k for k, v in reasons.items() if v == "abort"} == set(hit)
    for r, (prompt, count) in zip(requests, jobs, strict=True):
        want = reference(prompt, count, rig.layers)
        got = r.token_ids[r.num_prompt :]
        assert got == (want[: len(got)] if r.request_id in hit else want)


def test_E13_a_request_that_has_not_arrived_yet_can_be_aborted(rig):
    engine = rig.build(SyncOffload())
    later = engine.add([1, 2], 3, arrival_ns=10**6)
    sooner = engine.add([1, 2], 3)
    engine.abort(later.request_id)
    rig.finish(engine)
    assert [r.finish_reason for r in (later, sooner)] == ["abort", "length"]
    assert len(engine.take_records().requests) == 2


@given(seed=st.integers(0, 10**6), every=st.integers(1, 7))
@settings(max_examples=20, deadline=None)
def test_E13_aborts_and_preemptions_at_random(rig, seed, every):
    engine = rig.build(AsyncOverlap(cpu_fraction=0.5), seed, gpu=6, cpu=6)
    requests = [engine.add(p, n) for p, n in rig.jobs(seed, 8, longest=40, most=20)]

    def between(step):
        r = requests[(step * 7 + seed) % len(requests)]
        if step % every == 0 and r.state is State.DECODE and not r.requeue and r.preemptions < 4:
            engine.scheduler.finish.preempt(r)
        if step % (every + 3) == 0:
            engine.abort(requests[(step + seed) % len(requests)].request_id)

    rig.finish(engine, between)
    assert sorted(r.request_id for r in engine.take_records().requests) == sorted(r.request_id for r in requests)


@pytest.mark.parametrize("policy", ["sync_offload", "async_overlap", "all_on_cpu"])
def test_E14_a_tiny_cpu_tier_serves_two_hundred_requests(rig, policy):
    engine = rig.build(rig.policies[policy](), gpu=0 if policy == "all_on_cpu" else 3, cpu=3)
    jobs = rig.jobs(14, 200, longest=36, most=12)
    requests = [engine.add(p, n) for p, n in jobs]
    rig.finish(engine)
    assert rig.outputs(requests) == [reference(p, n, rig.layers) for p, n in jobs]
    assert sum(r.tier == "cpu" for r in requests) > 10


def test_E14_what_the_cpu_tier_can_never_hold_is_refused_and_the_rest_is_served(rig):
    engine = rig.build(AsyncOverlap(cpu_fraction=1.0), gpu=0, cpu=3)
    served = []
    for prompt, count in rig.jobs(15, 60, longest=70):
        try:
            served.append((engine.add(prompt, count), reference(prompt, count, rig.layers)))
        except CapacityError as error:
            assert len(prompt) + count - 1 > 3 * rig.page, str(error)
    rig.finish(engine)
    assert 10 < len(served) < 60
    assert all(r.token_ids[r.num_prompt :] == want for r, want in served)


@pytest.mark.parametrize(
    ("prompt", "asked", "got"), [(63, None, 1), (62, None, 2), (1, None, 63), (60, 3, 3), (60, 10**9, 4)]
)
def test_E16_all_the_room_that_is_left_may_be_asked_for(rig, prompt, asked, got):
    engine = rig.build(SyncOffload(), max_model_len=64)
    request = engine.add([1] * prompt, asked)
    rig.finish(engine)
    assert request.num_output == got and request.finish_reason == "length"


@pytest.mark.parametrize("asked", [0, -1])
def test_a_request_for_no_token_is_refused_and_leaves_nothing_behind(rig, asked):
    engine = rig.build(SyncOffload(), max_model_len=64)
    with pytest.raises(InputError, match=f"request mine: max_tokens must be at least 1, got {asked}"):
        engine.add([1, 2, 3], asked, request_id="mine")
    assert engine.unfinished == 0
    assert engine.add([1, 2, 3], 1, request_id="mine").num_prompt == 3  # the name is free
    rig.finish(engine)


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_E16_a_prompt_at_or_above_the_limit_is_refused_with_both_numbers(rig, length):
    engine = rig.build(SyncOffload(), max_model_len=64)
    with pytest.raises(InputError, match=f"prompt of {length} tokens leaves no room .* max_model_len 64"):
        engine.add([1] * length, 1)
    assert engine.add([1] * 63, 1).max_tokens == 1
    rig.finish(engine)


@pytest.mark.parametrize("asked", [0, -1, 1.5, None, "8"])
def test_E16_a_wrong_number_of_tokens_is_refused_by_name(asked):
    with pytest.raises(InputError, match="max_tokens must be"):
        SamplingParams(max_tokens=asked)


def test_E16_an_empty_text_is_refused_and_nothing_of_its_call_runs(real_model):
    from hybridattn import LLM

    with LLM(real_model, gpu_kv_blocks=4, cpu_kv_blocks=4, page_size=32) as llm:
        for prompts in ("", ["", "x"], [[], [5]]):
            with pytest.raises(InputError, match="the prompt has no tokens"):
                llm.generate(prompts)
        assert llm.generate([]) == [] and llm.engine.unfinished == 0


# -- E08: swap -------------------------------------------------------------------------------------------------------

SHAPE = ModelShape("toy", 4, 64, 128, 4, 2, 16, 100, 512)


def swapping(cpu_blocks, gpu_blocks=6):
    """An engine whose policy swaps between the tiers (simulated: the stages that move K,V are priced ones)."""
    price = lambda op: 50_000 if op.name.startswith("move") else 1000  # noqa: E731  # a move takes several steps
    device = SimDevice(price, execute=True)
    config = EngineConfig(gpu_blocks, cpu_blocks, 16, max_model_len=160, max_num_seqs=8, max_num_batched_tokens=64)
    return Engine(PricedStages(SHAPE, "fp32"), device, Asymmetric(), config)


def run_swapping(engine, between=lambda: None):
    """Blocks of a move under way belong to its op, so that conservation holds again at the end."""
    for _ in range(3000):
        between()
        if not engine.unfinished:
            break
        engine.step()
    engine.drain()
    assert all(pool.num_free == pool.num_blocks for pool in engine.kv.pools.values())


@pytest.mark.parametrize("cpu_blocks", [0, 1, 6])
def test_E08_a_host_tier_too_small_to_swap_into_falls_back_to_recompute(cpu_blocks):
    engine = swapping(cpu_blocks)
    requests = [engine.add(DeclaredTokens(14 + i), 40) for i in range(5)]
    run_swapping(engine)
    assert all(r.num_output == 40 and r.finish_reason == "length" for r in requests)
    if cpu_blocks == 0:
        assert sum(r.preemptions for r in requests) > 0 and {r.tier for r in requests} == {GPU_TIER}


def test_E08_without_a_host_tier_real_text_is_preempted_by_recompute(open_tiny):
    jobs = [[3] * 60, [4] * 60, [5] * 60, [6] * 60]
    with pytest.warns(NoEffectWarning, match="policy 'asymmetric' uses the CPU tier, but cpu_kv_blocks 0"):
        llm = open_tiny(policy="asymmetric", cpu_fraction=None, gpu_kv_blocks=8, cpu_kv_blocks=0)
    with llm:
        outputs = llm.generate(jobs, SamplingParams(max_tokens=40))
        assert [len(o.token_ids) for o in outputs] == [40] * 4
        assert sum(o.metrics["preemptions"] for o in outputs) > 0
        assert llm.free_blocks() == {"gpu": 8, "cpu": 0}


def test_E13_an_abort_amid_a_move_returns_the_blocks_of_both_tiers():
    engine = swapping(6, gpu_blocks=5)  # the youngest of three has to go down
    requests = [engine.add(DeclaredTokens(14 + i), 40) for i in range(3)]
    hit = []

    def between():
        for r in requests:
            if r.state is State.MOVING and not hit:
                hit.append(r)
                engine.abort(r.request_id)

    run_swapping(engine, between)
    assert hit and hit[0].finish_reason == "abort"


# -- E20: memory -----------------------------------------------------------------------------------------------------

GROWTH = """
import gc, sys, psutil
from hybridattn import LLM, SamplingParams
from hybridattn.models.load import load
model, me = load("dummy:tiny"), psutil.Process()
def serve(blocks):
    llm = LLM(model, gpu_kv_blocks=blocks, cpu_kv_blocks=blocks, page_size=32, kv_dtype=sys.argv[1], max_num_seqs=32)
    llm.generate([[1, 2], [3]], SamplingParams(max_tokens=2))
    return llm
serve(8).close(); gc.collect()
before = me.memory_info().rss
llm = serve(int(sys.argv[2]))
after = me.memory_info().rss
booked = sum(llm.device.memory(t).total - llm.device.memory(t).free for t in ("gpu", "cpu"))
print(after - before, booked)
llm.close()
"""


def test_E20_booked_bytes_are_within_5_percent_of_what_the_process_grows_by(run_python):
    done = run_python(GROWTH, "bf16", "4000")
    assert done.returncode == 0, done.stderr
    grown, booked = map(int, done.stdout.split())
    assert abs(grown - booked) <= 0.05 * booked + 2**20


@pytest.mark.parametrize(
    "dtype",
    [
        "fp32",
        "bf16",
        "int8",
    ],
)
def test_E20_pages_are_booked_with_all_that_they_hold(open_tiny, dtype):
    alone = {"policy": "gpu_only", "cpu_fraction": None, "cpu_kv_blocks": 0}
    with open_tiny(kv_dtype=dtype, **alone) as without, open_tiny(kv_dtype=dtype, cpu_kv_blocks=81) as llm:
        used = [m.device.memory("cpu").total - m.device.memory("cpu").free for m in (without, llm)]
        pages = llm.stages.gpu_tier.cpu_pages
        assert used[1] - used[0] == pages.nbytes * 80 // 81  # a tier of 0 pages has one that is never used


@pytest.mark.parametrize("tier", ["gpu", "cpu"])
def test_E20_ten_times_the_memory_is_refused_with_both_numbers_before_a_byte_is_touched(open_tiny, tier):
    import psutil

    per_block = 3 * 2 * 2 * 16 * 4 * 32  # layers, K and V, heads, head_dim, bytes, page
    blocks = 10 * psutil.virtual_memory().total // per_block
    before = psutil.Process().memory_info().rss
    message = rf"{blocks} blocks .* needs {blocks * per_block} bytes of the {tier} tier, but \d+ are free"
    with pytest.raises(InputError, match=message):
        open_tiny(**{f"{tier}_kv_blocks": blocks})
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_E20_a_gpu_budget_above_the_machine_is_refused_with_both_numbers(open_tiny):
    with pytest.raises(InputError, match=r"gpu_memory_bytes 100000000000000 exceeds the \d+ bytes that are free"):
        open_tiny(device_options={"gpu_memory_bytes": 10**14})


def test_E20_slabs_and_staging_are_booked_too(open_tiny):
    with open_tiny(max_num_seqs=16, max_model_len=512) as small, open_tiny(max_num_seqs=32, max_model_len=1024) as big:
        used = [{t: m.device.memory(t).total - m.device.memory(t).free for t in ("gpu", "cpu")} for m in (small, big)]
    row = (96 + (6 + 2 * 2 + 6) * 16) * 4 + 2 * 8  # residual; q, k, v and out; token id and position
    staged = 2 * 2 * 16 * 4  # K and V of a token
    part = (6 * 16 + 6) * 4  # out and lse of a split row's cold part
    assert used[1]["gpu"] - used[0]["gpu"] == 16 * (row + part) + 512 * staged
    assert used[1]["cpu"] - used[0]["cpu"] == 16 * (2 * (6 + 2 * 2 + 6) * 16 * 4 + part + 6 * 16 * 4)


# -- E22: prefixes ---------------------------------------------------------------------------------------------------


def test_E22_nothing_of_another_request_is_ever_reused(rig):
    """No prefix is shared: equal prompts get blocks of their own, and a block that is used again is written first
    (the toy model fails on a slot that was never written, and every stale value changes its tokens)."""
    engine = rig.build(AsyncOverlap(cpu_fraction=0.5), gpu=6, cpu=6, max_num_seqs=4)
    prompts = [[7] * 20, [7] * 20, [7] * 20 + [8], [8] + [7] * 19, [7] * 16, [7] * 17] * 3
    requests = [engine.add(p, 6) for p in prompts]
    shared = []

    def between(step):
        for tier in engine.kv.pools:
            held = [b for r in engine.scheduler.queues.running for b in r.pages.held(tier)]
            shared.append(len(held) - len(set(held)))

    rig.finish(engine, between)
    assert rig.outputs(requests) == [reference(p, 6, rig.layers) for p in prompts]
    assert max(shared) == 0


def test_ops_describe_themselves_without_tokens():
    op = Op("attention", "cpu.attention", None, requests=("r1", "r2"), layer=3)
    assert op.describe() == "op 'attention' on lane cpu.attention at layer 3 of requests r1, r2"
