"""E06: what was preempted says the same as what was left alone, wherever it was interrupted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_stages import reference

from hybridattn.core.config import EngineConfig
from hybridattn.core.op import CPU
from hybridattn.core.params import SamplingParams
from hybridattn.core.request import State
from hybridattn.core.stages import CPU_TIER
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.models.pieces import PieceTable
from hybridattn.models.stream import TextStream
from hybridattn.models.torch_stages import TorchStages
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly, SyncOffload

PAGE = 16
CONFIG = EngineConfig(16, 16, PAGE, max_model_len=96, max_num_seqs=5, max_num_batched_tokens=24)
GREEDY = SamplingParams(max_tokens=40)
JOBS = [  # prompt, output tokens, choices: each crosses a page while decoding
    ([3, 1, 4, 1, 5], 13, GREEDY),
    ([9] * 30, 6, SamplingParams(max_tokens=40, temperature=1.2, seed=5, top_k=40, top_p=0.95)),
    ([2, 6], 17, SamplingParams(max_tokens=40, temperature=2.0, seed=6, min_p=0.02, min_tokens=3)),
    ([7, 8] * 7, 6, SamplingParams(max_tokens=40, repetition_penalty=1.3, presence_penalty=0.5)),
    ([11, 2, 5] * 3, 10, SamplingParams(max_tokens=40, temperature=0.7, seed=7, frequency_penalty=0.7)),
]
POLICIES = {
    "gpu": GpuOnly,
    "cpu": lambda: AsyncOverlap(cpu_fraction=1.0),
    "both": lambda: SyncOffload(cpu_fraction=0.5),
}


class Bytes:
    """A vocabulary whose token ids are bytes of text, so that a model without a tokenizer has stop strings."""

    strips_first_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([97 + token_id % 26])

    def is_special(self, token_id: int) -> bool:
        return False

    def spelling(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode()


PIECES: PieceTable = Bytes()


def engine_of(model, policy, seed=0):
    durations = random.Random(seed)
    price = lambda op: durations.randint(1, 300 if op.lane == CPU else 30)  # noqa: E731
    device = SimDevice(price, execute=True)
    return Engine(TorchStages(model, device, CONFIG, "fp32"), device, policy, CONFIG)


def add_all(engine, stop=()):
    requests = []
    for prompt, length, params in JOBS:
        request = engine.add(prompt, length, params)
        request.text, request.events = TextStream(PIECES, stop), []
        requests.append(request)
    return requests


def answers(requests):
    """Token ids, reason and text of each."""
    return [(r.token_ids[r.num_prompt :], r.finish_reason, "".join(event.text for event in r.events)) for r in requests]


AT = {  # when the victim is interrupted: what its tokens must look like
    "at the prompt's end": lambda r: r.num_output == 1,
    "amid decoding": lambda r: r.num_output > 2 and r.num_tokens % PAGE not in (0, 1),
    "with a full page": lambda r: r.num_output >= 1 and r.num_tokens % PAGE == 0,
    "on a new page": lambda r: r.num_output >= 1 and r.num_tokens % PAGE == 1,
    "amid its prompt": lambda r: r.state is State.PREFILL and r.num_computed > 0,
}


def interrupt(engine, requests, when, times):
    """Step to the end; preempt whoever is at that moment, ``times`` times in all; how often none was left to do."""
    for _ in range(4000):
        for r in requests:
            running = r.state in (State.DECODE, State.PREFILL)
            if running and times and when(r) and not r.requeue:
                engine.scheduler.finish.preempt(r)
                times -= 1
        if not engine.unfinished:
            return times
        engine.step()
    raise AssertionError("no progress")


@pytest.fixture(scope="module")
def quiet(tiny):
    """Answers without any preemption."""
    engine = engine_of(tiny, GpuOnly())
    requests = add_all(engine)
    engine.run()
    assert all(r.preemptions == 0 for r in requests)
    return answers(requests)


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("when", AT)
@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_E06_preemption_changes_no_token_reason_or_text(tiny, quiet, where, when, times):
    engine = engine_of(tiny, POLICIES[where](), seed=times)
    requests = add_all(engine)
    missed = interrupt(engine, requests, AT[when], times)
    assert answers(requests) == quiet
    assert sum(r.preemptions for r in requests) == times - missed
    assert missed == 0 or (when == "amid its prompt" and missed < times)  # what is kept is not read again
    assert all(pool.num_free == pool.num_blocks for pool in engine.kv.pools.values())


@pytest.mark.parametrize("where", POLICIES)
def test_E06_a_stop_string_that_spans_preemptions_still_stops(tiny, quiet, where):
    text = quiet[2][2]
    stop = text[6:9]
    plain = engine_of(tiny, GpuOnly())
    want = add_all(plain, (stop,))
    plain.run()
    assert want[2].finish_reason == "stop" and answers(want)[2][2] == text[: text.index(stop)]
    engine = engine_of(tiny, POLICIES[where]())
    requests = add_all(engine, (stop,))
    seen: dict[str, int] = {}

    def new_token(r):
        new = r.num_output > seen.get(r.request_id, 0)
        seen[r.request_id] = r.num_output
        return new

    interrupt(engine, requests, new_token, 40)
    assert answers(requests) == answers(want) and requests[2].preemptions > 5


def test_E06_a_penalty_counts_tokens_from_before_the_preemption_once(tiny):
    """With the strongest penalties no token comes twice in a row; counting twice or not at all would change the ids."""
    params = SamplingParams(max_tokens=30, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=5.0)
    found = []
    for preempt in (False, True):
        engine = engine_of(tiny, AsyncOverlap(cpu_fraction=1.0))
        request = engine.add([1, 2, 3], 30, params)
        left = 6 if preempt else 0
        while engine.unfinished:
            if left and request.state is State.DECODE and request.num_output % 4 == 3 and not request.requeue:
                engine.scheduler.finish.preempt(request)
                left -= 1
            engine.step()
        found.append(request.token_ids)
        assert request.preemptions == (6 if preempt else 0)
    assert found[0] == found[1]


@given(
    seed=st.integers(0, 10**6),
    blocks=st.integers(6, 9),
    policy=st.sampled_from(["gpu_only", "sync_offload", "async_overlap", "all_on_cpu"]),
)
@settings(max_examples=25, deadline=None)
def test_E06_a_pool_too_small_for_all_preempts_and_says_the_same(rig, seed, blocks, policy):
    jobs = rig.jobs(seed, 5, longest=20, most=60)
    engine = rig.build(rig.policies[policy](), seed, gpu=blocks, cpu=blocks)
    requests = [engine.add(prompt, count) for prompt, count in jobs]
    rig.finish(engine)
    assert rig.outputs(requests) == [reference(p, n, rig.layers) for p, n in jobs]


def test_E06_a_token_sampled_but_not_yet_decoded_is_kept(rig):
    """The youngest request is preempted right after each of its tokens; none is lost or made twice."""
    engine = rig.build(AsyncOverlap(cpu_fraction=1.0), gpu=0, cpu=12)
    jobs = rig.jobs(3, 3, most=12)
    requests = [engine.add(p, n) for p, n in jobs]
    seen: dict[str, int] = {}

    def between(step):
        for r in requests:
            if r.state is State.DECODE and r.tier == CPU_TIER and r.num_output > seen.get(r.request_id, 0):
                seen[r.request_id] = r.num_output
                engine.scheduler.finish.preempt(r)

    rig.finish(engine, between)
    assert rig.outputs(requests) == [reference(p, n, rig.layers) for p, n in jobs]
    assert sum(r.preemptions for r in requests) >= 3
