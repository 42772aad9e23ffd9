"""Real K,V on the way between the tiers of the host device: forced, by a policy, and by sessions that pause."""

from __future__ import annotations

import threading
import time

import hang_clock
import numpy as np
import pytest

from hybridattn import LLM, SamplingParams
from hybridattn.core.errors import DeviceError, InputError, StallError
from hybridattn.core.op import D2H, H2D
from hybridattn.core.trace import violations
from hybridattn.engine.replay import Replay
from hybridattn.models.host_tier import HostTier
from hybridattn.workload.arrivals import AllAtOnce
from hybridattn.workload.lengths import Fixed, Uniform
from hybridattn.workload.sessions import agent_sessions

GREEDY = SamplingParams(max_tokens=16)
NAMES = ["one_token_hello", "capital", "german_umlauts", "python_class", "recipe_and_report"]
ROOMY = {"gpu_kv_blocks": 60, "cpu_kv_blocks": 60, "page_size": 16}


@pytest.fixture(scope="module")
def tiny():
    from hybridattn.models.load import load

    return load("dummy:tiny")


def moves_of(spans):
    return [s for s in spans if s.name == "move k,v"]


def finish_moves(llm):
    """Copies of contexts that began with the last step."""
    while llm.engine.executor.moves:
        llm.engine.executor.moves.wait()


# -- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "fraction"), [("async_overlap", None), ("sync_offload", 0.5)])
def test_token_ids_hold_when_every_request_is_moved_there_and_back(real_model, prompts, policy, fraction):
    chosen = [prompts[n] for n in NAMES]
    assert all(p["min_gap"] > 1e-2 for p in chosen)
    with LLM(real_model, policy=policy, cpu_fraction=fraction, **ROOMY) as llm:
        call = llm.start([p["text"] for p in chosen], GREEDY)
        requests = call._requests
        visited = [{r.tier} for r in requests]
        begun = 0
        for step, _ in enumerate(call.pieces()):
            for r, tiers in zip(requests, visited, strict=True):
                if step % 2 == 0 and r.finish_reason is None:
                    begun += llm.engine.move(r.request_id, "cpu" if r.tier == "gpu" else "gpu")
                tiers.add(r.tier)
        spans = llm.trace().spans
        assert violations(spans) == []
        assert llm.free_blocks() == {"gpu": 60, "cpu": 60}
        got = [list(o.token_ids) for o in call.outputs()]
    assert got == [p["token_ids"] for p in chosen]
    moves = moves_of(spans)
    assert begun == len(moves) >= 3 * len(chosen) and {s.lane for s in moves} == {D2H, H2D}
    assert sum(tiers == {"gpu", "cpu"} for tiers in visited) >= len(chosen) - 1
    assert all(s.num_bytes == s.rows * 2 * 3 * 64 * 4 * 30 for s in moves)  # K, V; heads, head_dim, bytes, layers


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8", "fp8"])
def test_random_weights_give_the_same_tokens_with_and_without_moves(tiny, kv_dtype):
    jobs = [[3, 1, 4, 1, 5], [9] * 40, [2, 6], [5, 3, 5, 8] * 6]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    options = {"policy": "async_overlap", "page_size": 16, "kv_dtype": kv_dtype}
    with LLM(tiny, **options) as llm:
        want = [o.token_ids for o in llm.generate(jobs, params)]
    with LLM(tiny, **options) as llm:
        call = llm.start(jobs, params)
        begun = 0
        for step, _ in enumerate(call.pieces()):
            begun += llm.engine.move(f"r{step % 4}", ("cpu", "gpu")[step // 4 % 2])
        assert [o.token_ids for o in call.outputs()] == want and begun > 4


def test_an_asymmetric_policy_swaps_real_requests_instead_of_computing_them_again(real_model, prompts):
    names = ["sql", "months", "days", "water", "alphabet", "python_loop"]  # each crosses a page while decoding
    chosen = [prompts[n] for n in names]
    with LLM(real_model, policy="asymmetric", gpu_kv_blocks=7, cpu_kv_blocks=20, page_size=16) as llm:
        outputs = llm.generate([p["text"] for p in chosen], GREEDY)
        spans = llm.trace().spans
        assert llm.free_blocks() == {"gpu": 7, "cpu": 20}
    assert [list(o.token_ids) for o in outputs] == [p["token_ids"] for p in chosen]
    assert D2H in {s.lane for s in moves_of(spans)} and violations(spans) == []
    assert sum(o.metrics["preemptions"] for o in outputs) == 0


# -- sessions --------------------------------------------------------------------------------------------------------


def test_a_session_goes_on_from_what_it_said_and_its_k_v_leave_the_gpu_tier_between(real_model):
    turns = ["The capital of France is", " And the capital of Italy is", " The capital of Spain is"]
    with LLM(real_model, policy="gpu_only", **ROOMY) as llm:
        texts, ids = [], []
        for turn in turns:  # the same without a session: the whole context again
            ids += llm.model.tokenizer.encode(turn)
            (output,) = llm.generate([ids], SamplingParams(max_tokens=6, ignore_eos=True))
            ids += output.token_ids
            texts.append(output.text)
        llm.trace(), llm.take_records()
        with llm.session() as chat:
            for turn in turns:
                chat.generate(turn, SamplingParams(max_tokens=6, ignore_eos=True))
                finish_moves(llm)
                assert llm.free_blocks()["gpu"] == 60  # the pause: others may use all of it
            assert [o.text for o in chat.turns] == texts and chat.token_ids == ids
            assert llm.free_blocks()["cpu"] < 60
        assert llm.free_blocks() == {"gpu": 60, "cpu": 60}
        moves = moves_of(llm.trace().spans)
        assert [s.lane for s in moves] == [D2H, H2D, D2H, H2D, D2H]
        reused = llm.engine.kv.contexts.reused_tokens
        computed = sum(p.prefill_tokens for p in llm.take_records().steps)
    assert reused == moves[1].rows + moves[3].rows
    assert computed == len(ids) - 3 * 6 + 2  # new tokens, and after each pause the one that had no K,V yet


def test_sessions_share_the_tiers_with_others(tiny):
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    with LLM(tiny, gpu_kv_blocks=6, cpu_kv_blocks=12, page_size=16) as llm:
        alone = []
        for i in range(3):
            context = [i + 1] * 20
            for _ in range(3):
                context += llm.generate([context], params)[0].token_ids
                context += [7, 8]
            alone.append(context[:-2])
        chats = [llm.session() for _ in range(3)]
        for turn in range(3):
            streams = [c.stream([7, 8] if turn else [i + 1] * 20, params) for i, c in enumerate(chats)]
            while any([next(s, None) for s in streams]):
                pass
            llm.generate([[9] * 40], params)  # somebody else in the pause
        assert [c.token_ids for c in chats] == alone
        finish_moves(llm)
        for c in chats:
            c.close()
        assert llm.free_blocks() == {"gpu": 6, "cpu": 12}


def test_a_stream_that_is_closed_early_leaves_the_context_as_it_was(tiny):
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    with LLM(tiny) as llm, llm.session("mine") as chat:
        chat.generate([1, 2, 3], params)
        before = list(chat.token_ids)
        stream = chat.stream([4], SamplingParams(max_tokens=30, ignore_eos=True))
        next(stream)
        with pytest.raises(InputError, match="session mine: the turn before has not ended yet"):
            chat.stream([5])
        stream.close()
        assert chat.token_ids == before
        again = chat.generate([4], params)
        assert again.token_ids == llm.generate([[*before, 4]], params)[0].token_ids
        late = chat.stream([6], params)
        next(late)
        chat.close()
        assert len(list(late)) == 4 and not llm.engine.kv.contexts  # the turn ends in peace and leaves nothing
        with pytest.raises(InputError, match="session mine is closed"):
            chat.generate([7])
        with pytest.raises(InputError, match="a session's name must be a text that is not empty, got ''"):
            llm.session("")


@pytest.mark.parametrize("keep", [True, False])
def test_agent_sessions_of_a_workload_run_on_the_host(tiny, keep):
    workload = agent_sessions(
        4, 3, AllAtOnce(), Uniform(30, 0.3), Uniform(8, 0.5), Fixed(6), mean_pause_ns=5_000_000, seed=3
    )
    vocabulary = tiny.config.shape.vocab_size
    draw = np.random.default_rng(2)
    new = [draw.integers(0, vocabulary, i.prompt_tokens).tolist() for i in workload.items]
    options = {"gpu_kv_blocks": 24, "cpu_kv_blocks": 24, "page_size": 16, "max_num_batched_tokens": 64}
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
    with LLM(tiny, policy="gpu_only", **options) as llm:
        steps, done = [], {}
        replay = Replay(
            llm.engine, workload, prompts=lambda i, _: new[i], params=lambda i, _: params, keep_contexts=keep,
            on_step=steps.append,
        )  # fmt: skip
        begin = llm.engine.add
        llm.engine.add = lambda *a, **k: done.setdefault(k["request_id"], begin(*a, **k))
        served = replay.run()
        finish_moves(llm)
        spans = llm.trace().spans
        contexts = llm.engine.kv.contexts
        assert llm.free_blocks() == {"gpu": 24, "cpu": 24} and not contexts  # the last turns keep nothing
    assert (served.ended, served.refused) == (12, 0) and violations(spans) == []
    by_id = {int(r.request_id): r for r in served.requests}
    for i, item in enumerate(workload.items):
        assert by_id[i].prompt_tokens == item.history_tokens + item.prompt_tokens
        if item.after is not None:
            assert by_id[i].arrival_ns == by_id[item.after].end_ns + item.delay_ns
            assert done[str(i)].token_ids[: item.history_tokens] == done[str(item.after)].token_ids
    lanes = {s.lane for s in moves_of(spans)}
    assert (lanes == {D2H, H2D} and contexts.reused_tokens > 0) if keep else (not lanes)
    with LLM(tiny, policy="gpu_only", **options) as llm:  # every turn alone, from its whole context
        for i, request in done.items():
            prompt = request.token_ids[: request.num_prompt]
            assert list(llm.generate([prompt], params)[0].token_ids) == request.token_ids[request.num_prompt :], i
    computed = sum(p.prefill_tokens for p in steps)
    assert computed == sum(r.num_prompt for r in done.values()) - contexts.reused_tokens


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["raise", "hang"])
@pytest.mark.parametrize("where", ["moved", "paused"])
def test_a_copy_that_fails_or_hangs_ends_in_bounded_time(tiny, monkeypatch, kind, where):
    release = threading.Event()
    close_s = 0.3 if kind == "hang" else 30.0

    def boom():
        raise ArithmeticError("no such page")

    monkeypatch.setattr(HostTier, "move", lambda *args: boom if kind == "raise" else lambda: release.wait(30) and None)
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    options = {"op_timeout_s": 30.0, "device_options": {"close_timeout_s": close_s}}
    with LLM(tiny, policy="async_overlap", gpu_kv_blocks=40, cpu_kv_blocks=40, **options) as llm:
        hang_clock.patient_pool(llm)
        assert llm.engine.executor.moves._timeout_ns == 30 * 10**9
        if kind == "hang":  # steps go on beside it, and their ops keep the 30 s on a busy machine
            llm.engine.executor.moves._timeout_ns = 3 * 10**8
        started = time.perf_counter()
        with pytest.raises(DeviceError, match=r"'move k,v' on lane gpu.d2h of request r\d") as caught:
            if where == "moved":
                stream = llm.stream([[1, 2, 3], [4, 5]], params)
                next(stream)
                assert llm.engine.move("r0", "cpu")
                for _ in stream:
                    pass
            else:
                with llm.session() as chat:
                    chat.generate([1, 2, 3], SamplingParams(max_tokens=4))
                    chat.generate([4, 5], params)
        assert time.perf_counter() - started < 20  # bounded; generous, because the machine may be busy
        assert isinstance(caught.value, StallError) == (kind == "hang")
        assert llm.engine.broken is not None and llm.free_blocks() == {"gpu": 40, "cpu": 40}
    release.set()
    monkeypatch.undo()
    with LLM(tiny) as llm:
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=4))[0].token_ids) == 4
