"""Policies that decide by a cost model, with real tokens on the host: planning never stops or changes a generation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from made_profile import made_profile

from hybridattn import LLM, SamplingParams
from hybridattn.cli import main
from hybridattn.core.chrome import chrome_events
from hybridattn.core.errors import DeviceError, InputError
from hybridattn.core.params import NoEffectWarning
from hybridattn.cost.here import costs_here, default_path
from hybridattn.cost.machine import driver_of
from hybridattn.cost.profile import save_profile
from hybridattn.devices.fingerprint import fingerprint
from hybridattn.models.load import load
from hybridattn.planning import choice
from hybridattn.planning import planner as planner_module
from hybridattn.planning.planner import Planner
from hybridattn.planning.predict import by_simulation, open_priced
from hybridattn.policies import chooser
from hybridattn.policies.adaptive import Adaptive
from hybridattn.policies.fixed import AsyncOverlap
from hybridattn.policies.load import Limits, Load
from hybridattn.policies.planning import LayoutQuestion

TINY = load("dummy:tiny")
NAME = TINY.config.shape.name
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
JOBS = [[i + 1, 7, 3 * i + 2] * 5 for i in range(6)]
SMALL = {"gpu_kv_blocks": 5, "cpu_kv_blocks": 40, "page_size": 16}  # one request and a half at a time on the GPU tier
ROOMY = {"gpu_kv_blocks": 40, "cpu_kv_blocks": 40, "page_size": 16}
FIRST = LayoutQuestion(Load(4, 8, 64), 1.1, Limits(), 1.0)
pytestmark = pytest.mark.filterwarnings("ignore::hybridattn.cost.table.ExtrapolationWarning")


@pytest.fixture(autouse=True)
def no_table(monkeypatch):
    """Answers do not outlive a test, and the first question need not wait."""
    monkeypatch.setattr(choice, "table_path", lambda setup: None)
    monkeypatch.setattr(chooser, "FIRST_NS", 0)


@pytest.fixture(scope="module")
def profile():
    return made_profile(fingerprint(), NAME, cpu_factor=0.5)


@pytest.fixture(scope="module")
def plain():
    with LLM(TINY, policy="gpu_only", **ROOMY) as llm:
        return [o.token_ids for o in llm.generate(JOBS, PARAMS)]


def ended(pid, within_s=10.0):
    """The process is gone (our own child: also collected)."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.01)
    return False


def until(condition, step, limit_s=60.0):
    """Step until the condition holds, bounded."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        step()


def planned(llm):
    """Keep the engine busy until the planner's first answer is in use, then add jobs; returns the call."""
    kept = []  # a call that nobody holds is aborted

    def step():
        if llm.engine.unfinished < 12:
            kept.append(llm.start(JOBS * 4, PARAMS))
        llm.engine.step()

    until(lambda: llm.policy.expected is not None, step)
    return llm.start(JOBS * 4, PARAMS)


# -- generation ------------------------------------------------------------------------------------------------------


def test_adaptive_gives_the_tokens_of_gpu_only_and_uses_the_cpu_where_it_pays(profile, plain):
    threads = set(threading.enumerate())
    with LLM(TINY, policy="adaptive", profile=profile, **SMALL) as llm:
        call = planned(llm)
        assert llm.policy.layout.kind != "gpu_only" and llm.policy.expected.tokens_per_s > 0
        pid = llm.planner.pid
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)  # behind those who serve
        for _ in call.pieces():
            pass
        assert [o.token_ids for o in call.outputs()] == plain * 4
        assert llm.policy.layout.kind != "gpu_only"
        assert "cpu" in {o.tier for o in call.outputs()}
        assert llm.free_blocks() == {"gpu": 5, "cpu": 40}
    assert ended(pid) and set(threading.enumerate()) <= threads


def test_auto_leaves_a_cpu_that_does_not_pay_alone(plain):
    dear = made_profile(fingerprint(), NAME, cpu_factor=10_000.0)
    with LLM(TINY, policy="auto", profile=dear, **SMALL) as llm:
        call = planned(llm)
        for _ in call.pieces():
            pass
        assert [o.token_ids for o in call.outputs()] == plain * 4
        assert llm.policy.layout.kind == "gpu_only" and {o.tier for o in call.outputs()} == {"gpu"}


def test_auto_submits_the_ops_of_gpu_only_and_starts_no_process_where_all_fits(profile, plain):
    ops = {}
    for policy in ("gpu_only", "auto"):
        with LLM(TINY, policy=policy, profile=profile if policy == "auto" else None, **ROOMY) as llm:
            seen, submit = [], llm.device.submit
            llm.device.submit = lambda op, after=(), seen=seen, submit=submit: (
                seen.append((op.name, op.lane, op.layer, op.work.rows, op.work.kv_tokens, op.requests, len(after))),
                submit(op, after),
            )[1]
            assert [o.token_ids for o in llm.generate(JOBS, PARAMS)] == plain
            assert sum(p.polls_made for p in llm.take_records().steps) == 0
            ops[policy] = seen
            if policy == "auto":
                assert llm.planner.pid is None and llm.policy.plans == 0
    assert ops["auto"] == ops["gpu_only"]


def test_asymmetric_decides_by_a_profile_where_one_is_given(profile, plain):
    for given in (None, profile):
        with LLM(TINY, policy="asymmetric", profile=given, **SMALL) as llm:
            assert [o.token_ids for o in llm.generate(JOBS, PARAMS)] == plain
            assert (llm.policy.costs is not None) == (given is not None) and llm.planner is None


def test_a_policy_of_the_users_own_that_needs_costs_gets_them(profile, plain):
    with LLM(TINY, policy="made_profile:Priced", profile=profile, **ROOMY) as llm:
        assert [o.token_ids for o in llm.generate(JOBS, PARAMS)] == plain
        assert llm.policy.costs.pricing.fingerprint == fingerprint() and llm.planner is None


def test_the_answer_is_that_of_the_policy_itself(profile):
    """Through the process and back, with all that decides it: what the CPU turned out to take, limits, discounts."""
    shape = TINY.config.shape
    costs = costs_here(profile, shape, "fp32", "fp32", profile.fingerprint)
    predict = by_simulation(partial(open_priced, **driver_of(profile)))
    first = FIRST
    found = first.answer(costs, predict)
    assert found == Adaptive(costs, predict).choose(Load(4, 8, 64), costs.corrected(1.1))
    second = replace(first, limits=Limits(gpu=1.01), discount=((found[0], 0.5),))
    planner = Planner(profile, shape, "fp32")
    try:
        for question in (first, second):
            planner.ask(question)
            answers = []
            until(lambda a=answers: a, lambda a=answers: (time.sleep(0.01), a.extend(filter(None, [planner.take()]))))
            assert answers == [question.answer(costs, predict)]
    finally:
        planner.close()
    assert found[0].kind != "gpu_only" and answers[0][0] != found[0]


def test_answers_are_there_for_the_next_run(profile, tmp_path, monkeypatch):
    path = tmp_path / "layouts" / "a.json"
    monkeypatch.setattr(choice, "table_path", lambda setup: path)
    with LLM(TINY, policy="adaptive", profile=profile, **SMALL) as llm:
        call = llm.start(JOBS, PARAMS)
        until(path.exists, lambda: llm.engine.step() if llm.engine.unfinished else time.sleep(0.01))
        del call
    with LLM(TINY, policy="adaptive", profile=profile, **SMALL) as llm:
        llm.generate(JOBS, PARAMS)
        assert llm.planner.known and llm.policy.choices
        changes, events = list(llm.policy.choices), chrome_events(llm.trace())
        assert llm.take_records().layouts == changes and llm.take_records().layouts == []
        marks = [e for e in events if e["ph"] == "i"]
        assert [m["name"] for m in marks] == [f"layout: {c.layout}" for c in changes]
        assert marks[0]["args"]["chosen by"] == changes[0].by and llm.trace().layouts == []


def test_the_command_line_takes_a_policy_that_plans_and_its_profile(real_model, prompts, tmp_path, capsys):
    save_profile(made_profile(fingerprint(), "smollm2-135m"), tmp_path / "here.json")
    argv = ["generate", "--policy", "auto", "--profile", str(tmp_path / "here.json"), "--max-tokens", "16", "--json"]
    assert main([*argv, prompts["capital"]["text"]]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["policy"], row["token_ids"]) == ("auto", prompts["capital"]["token_ids"])
    assert row["steps_by_layout"] == {}  # all fits
    tight = ["--gpu-kv-blocks", "1", "--cpu-kv-blocks", "8", "--page-size", "32", "--policy", "adaptive"]
    assert main([*argv[:-1], *tight, "One", "Two"]) == 0
    assert "hybridattn: <adaptive: sync_offload in " in capsys.readouterr().err
    assert main(["generate", "--policy", "auto", "--profile", str(tmp_path / "none.json"), "x"]) == 2
    assert "policy 'auto' decides by a cost model, and profile file" in capsys.readouterr().err


# -- the process and its end -----------------------------------------------------------------------------------------


def test_a_broken_engine_ends_the_process(profile):
    with LLM(TINY, policy="adaptive", profile=profile, **SMALL) as llm:
        call = planned(llm)
        pid = llm.planner.pid

        def explode(*args):
            raise ArithmeticError("no such number")

        llm.stages._linear = explode
        with pytest.raises(DeviceError, match="no such number"):
            for _ in range(100):
                llm.engine.step()
        assert ended(pid) and llm.planner.pid is None
        assert {o.finish_reason for o in call.outputs()} == {"error"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_dies_does_not_stop_the_generation(profile, plain, when):
    with LLM(TINY, policy="adaptive", profile=profile, **SMALL) as llm:
        if when == "after":
            call = planned(llm)
            os.kill(llm.planner.pid, signal.SIGKILL)
            llm.policy._plan = None  # it wants to plan again, at once and for a load that nobody has asked about
            llm.planner.known.clear()
            llm.policy._chooser._rest_until_ns = 0
        else:
            call = llm.start(JOBS * 4, PARAMS)
            until(lambda: llm.planner.pid is not None, llm.engine.step)
            os.kill(llm.planner.pid, signal.SIGKILL)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            until(lambda: llm.planner.failure is not None, llm.engine.step)
            for _ in call.pieces():
                pass
        assert [o.token_ids for o in call.outputs()] == plain * 4
        assert llm.policy.layout is not None  # by closed forms from now on
        said = [str(w.message) for w in caught if w.category is RuntimeWarning]
        assert said == ["planning has stopped, and closed forms choose the layouts: its process ended with code -9"]


def test_an_answer_that_does_not_come_ends_the_process(profile, plain, monkeypatch):
    monkeypatch.setattr(planner_module, "read_answer", lambda line: None)  # or a busy machine looks when it is there
    with LLM(TINY, policy="adaptive", profile=profile, **SMALL) as llm:
        call = llm.start(JOBS * 4, PARAMS)
        until(lambda: llm.planner.pid is not None, llm.engine.step)
        pid = llm.planner.pid
        llm.planner._timeout_s = 0.0
        with pytest.warns(RuntimeWarning, match="planning has stopped.*no answer within 0 s"):
            for _ in call.pieces():
                pass
        assert [o.token_ids for o in call.outputs()] == plain * 4 and llm.policy.layout is not None
        assert ended(pid)


def test_a_process_that_cannot_start_is_a_failure_and_no_more(profile, plain, monkeypatch):
    monkeypatch.setattr(planner_module.sys, "executable", "/nowhere/python")
    with LLM(TINY, policy="adaptive", profile=profile, **SMALL) as llm:
        call = llm.start(JOBS * 4, PARAMS)
        with pytest.warns(RuntimeWarning, match="planning has stopped.*could not start: .*/nowhere/python"):
            for _ in call.pieces():
                pass
        assert [o.token_ids for o in call.outputs()] == plain * 4


def test_a_question_that_cannot_be_answered_says_why(profile):
    planner = Planner(profile, TINY.config.shape, "fp32")
    try:
        planner.ask(replace(FIRST, cpu_factor=-1.0))
        with pytest.warns(RuntimeWarning, match="planning has stopped.*InputError: factor must be positive, got -1.0"):
            until(lambda: planner.failure is not None, lambda: (planner.take(), time.sleep(0.01)))
        assert planner.take() is None and planner.pid is None  # and it is said once
    finally:
        planner.close()
        planner.close()


def test_the_process_ends_with_the_one_that_asked(profile, tmp_path):
    """Killed without a chance to clean up; and a main program without a guard is not run again by the process."""
    path = tmp_path / "here.json"
    save_profile(profile, path)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, time, signal, torch\n"
        "from hybridattn.policies import chooser\n"
        "chooser.FIRST_NS = 0\n"
        "from hybridattn import LLM, SamplingParams\n"
        "print('begun', flush=True)\n"
        f"llm = LLM('dummy:tiny', policy='adaptive', profile=sys.argv[1], **{SMALL!r})\n"
        "call = llm.start([[1, 2, 3] * 5] * 6, SamplingParams(max_tokens=40, ignore_eos=True))\n"
        "while llm.planner.pid is None:\n    llm.engine.step()\n"
        "print(llm.planner.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    env["HYBRIDATTN_CACHE"] = str(tmp_path)
    argv = [sys.executable, str(program), str(path)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    begun, pid = done.stdout.split()
    assert begun == "begun" and ended(int(pid), 30.0)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_home(tmp_path, monkeypatch):
    """An empty home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def refusal(policy="auto", **options):
    threads = set(threading.enumerate())
    with pytest.raises(InputError) as caught:
        LLM(TINY, policy=policy, **SMALL, **options)
    assert set(threading.enumerate()) <= threads
    message = str(caught.value)
    assert message.startswith(f"policy '{policy}' decides by a cost model, and ") and "\n" not in message
    return message


def test_without_a_profile_it_says_how_to_make_one(at_home):
    for policy in ("auto", "adaptive"):
        assert "there is no profile of this machine at" in (message := refusal(policy))
        assert "run `hybridattn calibrate`" in message


def test_the_profile_of_this_machine_is_found_by_itself(at_home, profile, plain):
    save_profile(profile, default_path())
    with LLM(TINY, policy="auto", **ROOMY) as llm:
        assert [o.token_ids for o in llm.generate(JOBS, PARAMS)] == plain


def test_a_profile_of_something_else_is_refused(profile, tmp_path):
    here = fingerprint()
    again = "run `hybridattn calibrate --model MODEL --dtype fp32`"
    cases = [
        (replace(profile, fingerprint="elsewhere"), f"made-up was measured on elsewhere, this is {here}: {again} here"),
        (replace(profile, model="other"), f"made-up was measured with other fp32, not with {NAME} fp32: {again}"),
        (replace(profile, dtype="bf16"), f"made-up was measured with {NAME} bf16, not with {NAME} fp32: {again}"),
        (replace(profile, quantities={}), f"it was made by an earlier version, so {again} once more"),
        ("a100-80g", "profile a100-80g describes a gpu, a measured machine is needed"),
        ("nonsense", "profile 'nonsense' is unknown; shipped are"),
        (tmp_path / "none.json", f"profile file {tmp_path / 'none.json'} does not exist"),
        (3, "profile must be a path, a name or a Profile, got 3"),
    ]
    for given, expected in cases:
        assert expected in refusal(profile=given)
    assert f"{NAME} fp32, not with {NAME} fp32 and K,V of int8" in refusal(profile=profile, kv_dtype="int8")


def test_options_of_a_policy_that_plans_are_checked_and_leave_no_thread(profile):
    threads = set(threading.enumerate())
    for options, expected in (
        ({"policy_options": {"speed": 1}}, "policy 'adaptive' has no option 'speed'"),
        ({"policy_options": {"gpu_limit": 0.5}}, "limit gpu must be at least 1"),
        ({"cpu_fraction": 0.5}, "policy 'adaptive' has no option 'cpu_fraction'"),
    ):
        with pytest.raises(InputError, match=expected):
            LLM(TINY, policy="adaptive", profile=profile, **SMALL, **options)
    assert set(threading.enumerate()) <= threads


def test_policies_without_a_cost_model_need_no_profile(at_home, profile, plain):
    with LLM(TINY, policy="async_overlap", **ROOMY) as llm:
        assert [o.token_ids for o in llm.generate(JOBS, PARAMS)] == plain


def test_options_that_cannot_act_are_said(profile):
    threads = set(threading.enumerate())
    with pytest.warns(NoEffectWarning, match="policy 'async_overlap' reads no profile: it has no effect"):
        LLM(TINY, policy="async_overlap", profile=profile, **ROOMY).close()
    with pytest.warns(NoEffectWarning, match="policy 'split' uses the CPU tier, but cpu_kv_blocks 0 leaves no room"):
        LLM("dummy:tiny", policy="split", gpu_kv_blocks=4, cpu_kv_blocks=0).close()
    with pytest.warns(NoEffectWarning, match="policy 'async_overlap' uses the CPU tier, but cpu_kv_blocks 0 leaves no"):
        LLM(TINY, policy="async_overlap", gpu_kv_blocks=8, cpu_kv_blocks=0).close()
    with pytest.raises(InputError, match="max_micro_batches and cpu_fraction cannot act on policy .async_overlap."):
        LLM(TINY, policy=AsyncOverlap(), cpu_fraction=0.5, policy_options={"max_micro_batches": 1}, **ROOMY)
    with pytest.raises(InputError, match="record must be True, False or a number of spans of at least 0, got -1"):
        LLM(TINY, record=-1)
    with LLM(TINY, record=False, **ROOMY) as llm, pytest.raises(InputError, match="keeps no spans for a trace"):
        llm.trace()
    assert set(threading.enumerate()) <= threads
