"""What happens around the process: Ctrl-C once and twice, a fork, a disk that is full."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import hang_clock
import pytest

from hybridattn import cli
from hybridattn.analysis.results import ResultFolder
from hybridattn.core.chrome import write_chrome
from hybridattn.core.errors import DeviceError, StallError
from hybridattn.core.op import CPU
from hybridattn.core.trace import Trace

ROOT = Path(__file__).parents[2]
SETUP = """
import signal, sys, time
from hybridattn import LLM, SamplingParams
from hybridattn.models.load import load
signal.signal(signal.SIGINT, signal.default_int_handler)
model = load("dummy:tiny")
def opened(**options):
    limits = {"gpu_kv_blocks": 24, "cpu_kv_blocks": 24, "page_size": 32}
    return LLM(model, cpu_fraction=0.5, policy="async_overlap", **limits, **options)
"""
ENDLESS = "SamplingParams(max_tokens=600, ignore_eos=True)"


def start(code):
    argv = [sys.executable, "-W", "error", "-c", SETUP + code]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process, timeout=60):
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def test_ctrl_c_ends_a_generation_keeps_what_came_and_leaves_a_process_that_works():
    code = f"""
with opened() as llm:
    want = llm.generate([[9, 9]])[0].token_ids
    llm.take_records()
    try:
        for i, piece in enumerate(llm.stream([[1, 2], [3]], {ENDLESS})):
            if i == 20:
                print("GO", flush=True)
    except KeyboardInterrupt:
        while llm.engine.broken is None and llm.engine.unfinished:  # between two steps: rows in flight still leave
            llm.engine.step()
        records = llm.take_records().requests
        print(sorted(r.finish_reason for r in records), min(r.output_tokens for r in records) > 0, llm.free_blocks())
with opened() as llm:
    print(llm.generate([[9, 9]])[0].token_ids == want)
"""
    process = start(code)
    assert process.stdout.readline() == "GO\n"
    process.send_signal(signal.SIGINT)
    status, out, err = ended(process)
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] in (
        "['error', 'error'] True {'gpu': 24, 'cpu': 24}",  # within a step
        "['abort', 'abort'] True {'gpu': 24, 'cpu': 24}",  # between two
    )
    assert lines[1] == "True"


def test_a_second_ctrl_c_does_not_wait_for_a_lane_that_hangs():
    code = f"""
llm = opened(device_options={{"close_timeout_s": 50.0}})
llm.stages._linear = lambda *args: (print("GO", flush=True), time.sleep(100))
try:
    with llm:
        llm.generate([[1, 2], [3]], {ENDLESS})
except KeyboardInterrupt:
    print("ended", flush=True)
    raise
"""
    process = start(code)
    assert process.stdout.readline() == "GO\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # closing waits for the lane, up to 50 s
    assert process.poll() is None
    began = time.perf_counter()
    process.send_signal(signal.SIGINT)
    status, out, err = ended(process)
    assert status in (-signal.SIGINT, 130, 1) and out == "ended\n" and "KeyboardInterrupt" in err
    assert time.perf_counter() - began < 40  # far below what closing would have waited


@pytest.mark.slow
def test_ctrl_c_on_the_command_line_is_no_traceback(real_model):
    argv = [
        sys.executable,
        "-m",
        "hybridattn.cli",
        "generate",
        "Once upon a time",
        "--ignore-eos",
        "--max-tokens",
        "900",
    ]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(5)  # it speaks
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == b""


def test_after_a_fork_the_child_is_told_and_may_open_its_own(run_python):
    code = f"""{SETUP}
import os
parent = opened()
want = parent.generate([[1, 2], [3]])[0].token_ids
pid = os.fork()
if pid == 0:
    try:
        parent.generate([[1, 2]])
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    parent.close()
    with opened() as own:
        print(own.generate([[1, 2], [3]])[0].token_ids == want, flush=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
print(parent.generate([[1, 2], [3]])[0].token_ids == want)
parent.close()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    told, own, status, parent = done.stdout.splitlines()
    assert told.startswith("DeviceError op 'linear' on lane gpu.compute") and told.endswith(
        "was submitted after a fork: open a device in the new process"
    )
    assert (own, status, parent) == ("True", "0", "True")


# -- a full disk -----------------------------------------------------------------------------------------------------


def test_a_row_that_cannot_be_written_is_an_error_and_the_rows_before_it_stay(tmp_path):
    folder = ResultFolder.new(tmp_path / "x" / "1")
    folder.add_row({"i": 0})
    kept = folder.rows_file.rename(tmp_path / "kept.jsonl")
    folder.rows_file.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        folder.add_row({"i": 1})
    assert kept.read_text() == '{"i": 0}\n'


def test_a_row_cut_off_by_a_full_disk_is_an_error(tmp_path):
    folder, limits = ResultFolder.new(tmp_path / "x" / "1"), resource.getrlimit(resource.RLIMIT_FSIZE)
    folder.add_row({"i": 0})
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with pytest.raises(OSError):
            folder.add_row({"text": "y" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_trace_on_a_full_disk_is_one_sentence(capsys, real_model):
    code = cli.main(["generate", "hello", "--max-tokens", "2", "--trace", "/dev/full"])
    out, err = capsys.readouterr()
    assert code == 1 and err.startswith("hybridattn: reading or writing failed: ") and err.count("\n") == 1
    assert out.strip()  # the answer was printed before


def test_a_trace_that_cannot_be_written_raises(tmp_path):
    with pytest.raises(OSError):
        write_chrome(Trace("sim", "simulated", "p", "c", []), Path("/dev/full"))


# -- time-outs on the host -------------------------------------------------------------------------------------------


def test_a_hung_job_does_not_hold_up_closing_or_the_next_engine(open_tiny, monkeypatch):
    clock = hang_clock.install(monkeypatch)
    with open_tiny(op_timeout_s=hang_clock.LIMIT_S, cpu_fraction=1.0) as llm:
        submit = llm.device.pool.submit
        llm.device.pool.submit = lambda *args, **kwargs: (submit(*args, **kwargs, fault="hang"), clock.begin())[0]
        with pytest.raises(StallError, match=f"on lane {CPU} at layer 0 of request r0"):
            llm.generate([[1, 2]])
    began = time.perf_counter()
    llm.close()
    assert time.perf_counter() - began < 1  # closed already
    with pytest.raises(DeviceError, match="this engine stopped earlier"):
        llm.generate([[1, 2]])
    with open_tiny() as llm:
        assert len(llm.generate([[1, 2]])[0].token_ids) == 16
