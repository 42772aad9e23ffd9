"""Faults on the host device: each ends in bounded time, names lane, op and request, and harms nobody else."""

from __future__ import annotations

import os
import threading
import time

import hang_clock
import pytest

from hybridattn import LLM, SamplingParams
from hybridattn.core.errors import CapacityError, DeviceError, InputError, StallError

OPTIONS = {"gpu_kv_blocks": 8, "cpu_kv_blocks": 8, "page_size": 32, "cpu_fraction": 0.5}
PROMPTS = ["The capital of France is", "1, 2, 3,"]


@pytest.fixture(scope="module")
def tiny():
    from hybridattn.models.load import load

    return load("dummy:tiny")


def open_tiny(tiny, **options):
    return LLM(tiny, **{**OPTIONS, **options})


def inject(llm, fault, call, then=lambda: None):
    """Let the ``call``-th native attention job fail in the worker (a hook of the pool)."""
    count, submit = iter(range(1, 10**6)), llm.device.pool.submit

    def faulty(*args, **kwargs):
        if next(count) != call:
            return submit(*args, **kwargs)
        job = submit(*args, **kwargs, fault=fault)
        then()
        return job

    llm.device.pool.submit = faulty


TOKENS = [[5, 6, 7], [8, 9]]


@pytest.mark.parametrize("policy", ["sync_offload", "async_overlap"])
@pytest.mark.parametrize("call", [1, 3])
def test_E18_a_worker_that_raises_surfaces_and_names_the_request(tiny, policy, call):
    with open_tiny(tiny, policy=policy) as llm:
        inject(llm, "raise", call)
        with pytest.raises(DeviceError, match=r"'attention' on lane cpu.attention at layer \d of request r1 failed"):
            llm.generate(TOKENS, SamplingParams(max_tokens=8))
        assert llm.engine.broken is not None
        assert llm.free_blocks() == {"gpu": 8, "cpu": 8}
        ended = {r.request_id: r.finish_reason for r in llm.take_records().requests}
        assert ended["r1"] == "error"
        # on a busy machine the GPU's row may run through before the third job, where it does not wait for the other
        assert ended["r0"] == "error" or (policy, ended["r0"]) == ("async_overlap", "length")
        with pytest.raises(DeviceError, match="this engine stopped earlier"):
            llm.generate(TOKENS)
    with open_tiny(tiny, policy=policy) as llm:  # the next engine of the process works
        assert [len(o.token_ids) for o in llm.generate(TOKENS, SamplingParams(max_tokens=8))] == [8, 8]


@pytest.mark.parametrize("policy", ["sync_offload", "async_overlap"])
def test_E18_a_worker_that_hangs_ends_within_the_time_out(tiny, monkeypatch, policy):
    clock = hang_clock.install(monkeypatch)
    with open_tiny(tiny, policy=policy, op_timeout_s=hang_clock.LIMIT_S) as llm:
        inject(llm, "hang", 3, clock.begin)
        started = time.perf_counter()
        with pytest.raises(StallError, match=r"cpu.attention at layer \d of request r1 .* within 30 s"):
            llm.generate(TOKENS, SamplingParams(max_tokens=8))
        assert time.perf_counter() - started < 20  # bounded; generous, because the machine may be busy
        assert llm.free_blocks() == {"gpu": 8, "cpu": 8}
    with open_tiny(tiny, policy=policy) as llm:
        assert [len(o.token_ids) for o in llm.generate(TOKENS, SamplingParams(max_tokens=8))] == [8, 8]


@pytest.mark.parametrize("lane_op", ["_linear", "_last"])
def test_a_gpu_op_that_raises_surfaces(tiny, lane_op):
    with open_tiny(tiny) as llm:

        def explode(*args):
            raise ArithmeticError("no such number")

        setattr(llm.stages, lane_op, explode)
        with pytest.raises(DeviceError, match="on lane gpu.compute .*of requests? r0.*no such number"):
            llm.generate(TOKENS)
        assert llm.free_blocks() == {"gpu": 8, "cpu": 8}


def test_two_engines_in_one_process_do_not_disturb_each_other(tiny):
    params = SamplingParams(max_tokens=12)
    with open_tiny(tiny) as alone:
        want = [o.token_ids for o in alone.generate(TOKENS, params)]
    with open_tiny(tiny) as a, open_tiny(tiny, policy="sync_offload") as b:
        got: dict[str, list] = {}
        threads = [
            threading.Thread(target=lambda n=name, m=llm: got.update({n: m.generate(TOKENS, params)}))
            for name, llm in (("a", a), ("b", b))
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert {n: [o.token_ids for o in outputs] for n, outputs in got.items()} == {"a": want, "b": want}
        assert a.free_blocks() == b.free_blocks() == {"gpu": 8, "cpu": 8}


def test_an_engine_that_needs_another_torch_thread_count_is_refused(tiny):
    from hybridattn.devices.cores import CorePlan

    cpu = min(os.sched_getaffinity(0))
    two = {"cores": CorePlan(gpu=(cpu, cpu + 1), pool=(cpu,))}
    with open_tiny(tiny):
        with pytest.raises(InputError, match="gpu_threads 2: another host device of this process uses 1"):
            open_tiny(tiny, device_options=two)
    open_tiny(tiny, device_options=two).close()


def test_the_driver_is_never_on_a_cpu_of_the_pool(tiny, monkeypatch):
    """There it would go on when the attention that runs ends: it would wait for the CPU after all."""
    before, seen = os.sched_getaffinity(0), []
    with open_tiny(tiny, policy="async_overlap") as llm:
        ask = llm.policy.ask
        monkeypatch.setattr(llm.policy, "ask", lambda *a: (seen.append(os.sched_getaffinity(0)), ask(*a))[1])
        llm.generate(TOKENS, SamplingParams(max_tokens=4))
        assert seen and all(cpus == set(llm.device.cores.gpu) for cpus in seen)
    assert os.sched_getaffinity(0) == before


def test_the_driver_computes_nothing_and_joins_no_thread(tiny, monkeypatch):
    """Lane work runs on lane threads, attention of CPU rows in the native pool; the driver decides and polls."""
    driver, ran_on, joins = threading.current_thread(), set(), []
    with open_tiny(tiny, policy="async_overlap") as llm:
        for name in ("_linear", "_last"):
            real = getattr(llm.stages, name)
            monkeypatch.setattr(
                llm.stages, name, lambda *a, real=real: (ran_on.add(threading.current_thread()), real(*a))[1]
            )
        submit, jobs = llm.device.pool.submit, []
        monkeypatch.setattr(llm.device.pool, "submit", lambda *a, **k: jobs.append(submit(*a, **k)) or jobs[-1])
        monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: joins.append(self))
        llm.generate(TOKENS, SamplingParams(max_tokens=8))
        monkeypatch.undo()
    assert ran_on and driver not in ran_on
    assert len(jobs) == 7 * tiny.config.shape.num_layers  # one CPU request: every token but the prefill's, every layer
    assert joins == []


def test_two_streams_share_an_engine_and_keep_their_tokens(tiny):
    params = SamplingParams(max_tokens=6)
    with open_tiny(tiny) as llm:
        want = [o.token_ids for o in llm.generate(TOKENS, params)]
        first, second = (llm.stream([ids], params) for ids in TOKENS)
        got: list[list[int]] = [[], []]
        for _ in range(6):
            got[0].append(next(first).token_id)
            got[1].append(next(second).token_id)
        assert [tuple(g) for g in got] == want


def test_closing_a_stream_early_aborts_and_frees(tiny):
    with open_tiny(tiny) as llm:
        stream = llm.stream(TOKENS, SamplingParams(max_tokens=50))
        next(stream)
        stream.close()
        for _ in range(200):  # rows in flight leave when their futures end
            if llm.engine.unfinished == 0:
                break
            llm.engine.step()
        assert llm.engine.unfinished == 0 and llm.free_blocks() == {"gpu": 8, "cpu": 8}
        assert {r.finish_reason for r in llm.take_records().requests} == {"abort"}
        assert [len(o.token_ids) for o in llm.generate(TOKENS, SamplingParams(max_tokens=3))] == [3, 3]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, InputError, "request r0: the prompt has no tokens"),
        ([1] * 64, {"max_model_len": 64}, InputError, "prompt of 64 tokens leaves no room .* max_model_len 64"),
        ([1] * 65, {"max_model_len": 64}, InputError, "prompt of 65 tokens leaves no room"),
        ([10**6], {}, InputError, r"token id 1000000 lies outside the vocabulary 0..\d+"),
        ([1] * 300, {"max_model_len": 1024}, CapacityError, "needs 10 blocks of 32 tokens .*but the gpu tier has 8"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused_and_the_engine_lives_on(tiny, prompt, options, error, message):
    with open_tiny(tiny, **options) as llm:
        with pytest.raises(error, match=message):
            llm.generate([prompt], SamplingParams(max_tokens=4))
        assert llm.engine.unfinished == 0
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=4))[0].token_ids) == 4


def test_all_or_nothing_when_one_prompt_of_a_call_is_refused(tiny):
    with open_tiny(tiny) as llm:
        with pytest.raises(InputError, match="no tokens"):
            llm.generate([[1, 2], []])
        assert llm.engine.unfinished == 0 and llm.free_blocks() == {"gpu": 8, "cpu": 8}


@pytest.mark.parametrize(("prompt", "asked", "got"), [(62, 5, 2), (63, 5, 1), (60, 3, 3), (60, 10**6, 4)])
def test_E16_max_tokens_is_cut_to_the_room_that_is_left(tiny, prompt, asked, got):
    with open_tiny(tiny, max_model_len=64) as llm:
        (output,) = llm.generate([[1] * prompt], SamplingParams(max_tokens=asked))
        assert len(output.token_ids) == got and output.finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "nonsense"}, "model 'nonsense' is unknown"),
        ({"policy": "nonsense"}, "policy 'nonsense' is unknown"),
        ({"device": "nonsense"}, "device 'nonsense' is unknown"),
        ({"device": "cuda"}, "device 'cuda' cannot be used: "),
        ({"device_options": {"speed": 3}}, "device 'host' has no option 'speed'; it has gpu_memory_bytes"),
        ({"backend": "nonsense"}, "backend 'nonsense' is unknown; known: native, torch, ipex"),
        ({"backend": "ipex"}, "backend 'ipex' needs intel_extension_for_pytorch"),
        ({"cpu_fraction": "half"}, "cpu_fraction must lie in 0..1, got 'half'"),
        ({"dtype": "fp8"}, "dtype must be fp32 or bf16 on device 'host', got 'fp8'"),
        ({"dtype": "fp16"}, "dtype must be fp32 or bf16 on device 'host', got 'fp16'"),
        ({"max_model_len": 10**9}, "max_model_len 1000000000 exceeds the"),
        (
            {"gpu_kv_blocks": 10**9, "page_size": 32},
            "KV pool of 1000000000 blocks of 32 tokens needs .* bytes of the gpu tier, but .* are free",
        ),
    ],
)
def test_an_LLM_that_cannot_be_made_says_why_and_leaves_no_thread(options, message):
    before = set(threading.enumerate())
    with pytest.raises(InputError, match=message):
        LLM(**{"model": "dummy:tiny", **options})
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("seed", [7, 2**64 - 1])
def test_S04_a_seeded_request_does_not_depend_on_its_neighbours(tiny, seed):
    hot = SamplingParams(max_tokens=8, temperature=1.0, seed=seed)
    other = SamplingParams(max_tokens=5, temperature=1.0)
    with open_tiny(tiny) as llm:
        (alone,) = llm.generate([[1, 2, 3]], hot)
        crowd = llm.generate([[4], [1, 2, 3], [5, 6], [1, 2, 3]], [other, hot, other, hot])
        assert alone.token_ids == crowd[1].token_ids == crowd[3].token_ids
