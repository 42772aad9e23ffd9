"""Ctrl-C at a random moment of any public call: the exception or exit code 130, never a signal's death, nothing left.

child     |imports, "GO"|... the call, over and over ...
parent                  |random pause|SIGINT|-> how did it end? which processes and files are left?
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hybridattn import SamplingParams, cli
from hybridattn.core import interrupts
from hybridattn.core.errors import DeviceError, InputError
from hybridattn.devices import live

ROOT = Path(__file__).parents[2]
SETUP = """
import faulthandler, os, signal, sys, warnings
faulthandler.dump_traceback_later(50)  # where it hangs, if it does
signal.signal(signal.SIGINT, signal.default_int_handler)
import cpu_kernels as ck
from hybridattn import LLM, SamplingParams, cli
from hybridattn.models.load import load
def opened(model="dummy:tiny", **options):
    return LLM(model, **{"gpu_kv_blocks": 24, "cpu_kv_blocks": 24, "page_size": 32, "cpu_fraction": 0.5, **options})
ENDLESS = SamplingParams(max_tokens=600, ignore_eos=True)
def GO():
    print("GO", flush=True)
"""
CALLS = {
    "open": """
GO()
while True:
    opened().close()
""",
    "generate": """
llm = opened()
GO()
while True:
    llm.generate([[1, 2], [3], [4]], ENDLESS)
""",
    "generate in a with": """
with opened() as llm:
    GO()
    llm.generate([[1, 2], [3], [4]] * 20, ENDLESS)
""",
    "stream": """
llm = opened()
GO()
while True:
    for piece in llm.stream([[1], [2, 3]], ENDLESS):
        pass
""",
    "start": """
llm = opened()
GO()
while True:
    llm.start([[1]] * 9, ENDLESS)
""",
    "session": """
llm = opened()
GO()
while True:
    with llm.session() as chat:
        chat.generate([1], SamplingParams(max_tokens=4))
        chat.generate([1], SamplingParams(max_tokens=4))
""",
    "close": """
GO()
while True:
    llm = opened()
    calls = llm.start([[1]] * 9, ENDLESS)
    next(calls)
    llm.close()
""",
    "pages": """
GO()
while True:
    ck.KVPages(4000, 8, 128, page_size=64, dtype="bf16")
""",
    "pool": """
GO()
while True:
    ck.WorkerPool().close()
""",
    "cli": """
GO()
sys.exit(cli.main(["generate", "--max-tokens", "400", "--ignore-eos", "hello"]))
""",
    "cli --json": """
GO()
sys.exit(cli.main(["generate", "--json", "--max-tokens", "400", "--ignore-eos", "hello", "you"]))
""",
    "planned": """
sys.path.insert(0, "tests/support")
from made_profile import made_profile
from hybridattn.devices.fingerprint import fingerprint
model = load("dummy:tiny")
profile = made_profile(fingerprint(), model.config.shape.name, cpu_factor=0.2)
llm = LLM(model, policy="adaptive", profile=profile, gpu_kv_blocks=5, cpu_kv_blocks=40, page_size=32)
GO()
while True:
    llm.generate([[1, 2, 3] * 5] * 6, SamplingParams(max_tokens=40, ignore_eos=True))
""",
}


def interrupt(call, seed, tmp_path):
    """Run a call, interrupt it after a random time, check how it ended."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SETUP + CALLS[call]], cwd=ROOT, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "GO\n", process.stderr.read()
    time.sleep(random.Random(seed).random() * 1.2)
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"{call} ({seed}) did not end: {process.communicate()[1]}")
    # Python itself ends an uncaught KeyboardInterrupt with the signal that it came from, after all has been cleaned up.
    fine = (130,) if call.startswith("cli") else (130, 1, -signal.SIGINT)
    assert process.returncode in fine, (call, seed, process.returncode, err)
    if process.returncode != 130:
        assert err.rstrip().endswith("KeyboardInterrupt"), (call, seed, err)
    assert "Exception ignored" not in err and "terminate called" not in err, (call, seed, err)
    assert list(tmp_path.iterdir()) == [], (call, seed)
    assert members_of(process.pid) == [], (call, seed)


def members_of(session, limit_s=10.0):
    """Processes of a session that are still there; what was told to end has a moment to do so."""
    deadline = time.monotonic() + limit_s
    while True:
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(stat.parent.name)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_of_any_public_call_is_an_exception(call, tmp_path, real_model):
    interrupt(call, call, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_interrupts_at_random_moments(part, tmp_path, real_model):
    for number in range(20):
        calls = list(CALLS)
        interrupt(calls[(20 * part + number) % len(calls)], f"{part} {number}", tmp_path)


def test_an_interrupt_before_the_command_has_begun_is_130(monkeypatch):
    monkeypatch.setattr(cli, "_parser", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert cli.main([]) == 130


def test_an_interrupt_that_a_library_turns_into_an_error_of_its_own_is_130(monkeypatch, capsys):
    def parser():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        raise InputError("m.gguf cannot be converted")

    monkeypatch.setattr(cli, "_parser", parser)
    assert cli.main([]) == 130 and capsys.readouterr().err == ""


# -- an LLM goes on --------------------------------------------------------------------------------------------------


def test_after_an_interrupt_the_llm_goes_on_and_the_finished_answers_are_there(open_tiny, monkeypatch):
    with open_tiny(gpu_kv_blocks=16, cpu_kv_blocks=16, cpu_fraction=0.0) as llm:
        want = llm.generate([[1, 2]])[0].token_ids
        _interrupt_in_step(llm, monkeypatch, lambda: len(llm.engine._ended_requests) > 1)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2], [3]], [SamplingParams(), SamplingParams(max_tokens=300)])
        ready, cut = llm.interrupted
        assert (ready.finish_reason, ready.token_ids) == ("length", want)
        assert cut.finish_reason == "abort" and len(cut.token_ids) < 300
        assert llm.engine.broken is None
        assert llm.generate([[1, 2]])[0].token_ids == want and llm.interrupted == []
        assert llm.free_blocks() == {"gpu": 16, "cpu": 16}


def _interrupt_in_step(llm, monkeypatch, when, times=1):
    """SIGINT amid the first step at which ``when`` holds, as often as said; the step is not over when it comes."""
    step, left = llm.engine._step, [times]

    def interrupted():
        if when():
            while left[0]:
                left[0] -= 1
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.001)
        return step()

    monkeypatch.setattr(llm.engine, "_step", interrupted)


def test_a_second_interrupt_cuts_the_step_short(open_tiny, monkeypatch):
    with open_tiny() as llm:
        _interrupt_in_step(llm, monkeypatch, lambda: True, times=2)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2], [3]])
        assert {o.finish_reason for o in llm.interrupted} == {"error"}
        with pytest.raises(DeviceError, match="stopped earlier: a step was cut short by KeyboardInterrupt"):
            llm.generate([[1]])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_a_hung_lane_holds_back_comes_through(open_tiny, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(interrupts, "GRACE_S", 0.05)
    with open_tiny(device_options={"close_timeout_s": 0.5}) as llm:
        monkeypatch.setattr(llm.stages, "_linear", lambda *args: release.wait(60))
        _interrupt_in_step(llm, monkeypatch, lambda: True)
        began = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2], [3]])
        assert time.perf_counter() - began < 30  # far below the time-out of an op
        release.set()


# -- calls that nobody holds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "drop", "with"])
def test_a_stream_that_never_began_leaves_nothing_running(open_tiny, how):
    with open_tiny() as llm:
        s = llm.stream([[1], [2], [3]])
        assert llm.engine.unfinished == 3
        if how == "close":
            s.close()
        elif how == "with":
            with s:
                pass
        del s
        assert llm.engine.unfinished == 0 and llm.free_blocks() == {"gpu": 8, "cpu": 8}
        assert {r.finish_reason for r in llm.take_records().requests} == {"abort"}


def test_a_call_let_go_of_amid_a_step_ends_with_the_next_one(open_tiny, monkeypatch):
    with open_tiny() as llm:
        kept, calls = llm.stream([[1], [2]]), [llm.start([[3]] * 3)]
        begin = llm.stages.begin
        monkeypatch.setattr(llm.stages, "begin", lambda batch: (begin(batch), calls.clear()))
        next(kept)
        assert calls == [] and len(list(kept)) == 31
        assert sorted(r.finish_reason for r in llm.take_records().requests) == ["abort"] * 3 + ["length"] * 2


def test_a_request_that_is_aborted_from_elsewhere_ends_its_stream(open_tiny):
    with open_tiny() as llm:
        s = llm.stream([[1], [2]])
        next(s)
        llm.engine.abort("r0", "r1")
        assert [p.finish_reason for p in s if p.finish_reason] == []
        assert [o.finish_reason for o in s.outputs()] == ["abort"] * 2


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_session_is_free_after_a_stream_that_never_began(open_tiny, how):
    with open_tiny() as llm, llm.session() as chat:
        s = chat.stream([1, 2])
        if how == "close":
            s.close()
        del s
        assert chat.token_ids == [] and len(chat.generate([1, 2]).token_ids) == 16


def test_a_session_closed_amid_a_turn_leaves_no_context(open_tiny):
    with open_tiny() as llm:
        chat = llm.session()
        s = chat.stream([1, 2])
        next(s)
        chat.close()
        assert len(list(s)) == 15 and chat.token_ids == []
        assert llm.free_blocks() == {"gpu": 8, "cpu": 8}


# -- what an LLM does to its process ---------------------------------------------------------------------------------


def test_torch_has_its_thread_count_back(open_tiny):
    torch.set_num_threads(3)
    try:
        with open_tiny(), open_tiny():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


def test_spans_are_kept_for_the_latest_steps_only(open_tiny):
    params = SamplingParams(max_tokens=200)
    with open_tiny(record=100, gpu_kv_blocks=16) as llm:
        live_futures = []
        for _ in range(6):
            llm.generate([[1, 2], [3]], params)
            live_futures.append(len(llm.device._futures))
        assert max(live_futures) <= 100 + live._KEPT + 1
        with pytest.warns(UserWarning, match="the trace begins late: [0-9]+ older spans were not kept; record=True"):
            trace = llm.trace()
        assert trace.dropped > 1000 and 0 < len(trace.spans) <= 100 + live._KEPT
        assert llm.trace().dropped == 0
    with open_tiny(record=True, gpu_kv_blocks=16) as llm:
        llm.generate([[1, 2], [3]], params)
        assert llm.trace().dropped == 0
