"""The script for a GPU machine, gone through on the host device with tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
NAMES = ("machine", "prices", "gpu_tests", "ratio", "gpu_bandwidth", "cpu_bandwidth", "kernel_tests", "trace")


def check(*args, **env):
    settings = {**os.environ, "PYTHON": sys.executable, **env}
    return subprocess.run(["sh", str(SCRIPT), *args], env=settings, capture_output=True, text=True, timeout=500)


def rows_of(out, experiment):
    return [json.loads(line) for line in (out / "results" / experiment / "latest/rows.jsonl").read_text().splitlines()]


def verdicts(out):
    """What the summary says of each part, by its name."""
    lines = (out / "summary.txt").read_text().splitlines()
    return {line.split()[3].rstrip(":"): line.partition(": ")[2] for line in lines}


@pytest.mark.slow  # a minute; the default suite runs each part's own tests
def test_a_dry_run_goes_all_the_way(tmp_path):
    out = tmp_path / "out"
    done = check(str(out), "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert verdicts(out) == dict.fromkeys(NAMES, "passed")
    assert {p.name for p in out.iterdir()} == {*(f"{n}.txt" for n in NAMES), "summary.txt", "results", "trace.json"}
    assert "isa_level" in (out / "machine.txt").read_text()
    assert "needs a CUDA device" in (out / "gpu_tests.txt").read_text()  # collected, and skipped with the reason
    assert {(r["policy"], r["ratio"]) for r in rows_of(out, "ratio_cuda")} == {
        (policy, ratio) for policy in ("gpu_only", "sync_offload", "async_overlap") for ratio in (0.5, 2)
    }
    assert all(r["share_of_read_bandwidth"] > 0 for r in rows_of(out, "kernels"))
    bandwidth = [json.loads(x) for x in (out / "gpu_bandwidth.txt").read_text().splitlines() if x.startswith("{")]
    assert [row["group"] for row in bandwidth] == [1, 4, 8]
    assert '"name": "event"' in (out / "prices.txt").read_text()
    trace = json.loads((out / "trace.json").read_text())
    assert trace["otherData"]["device"] == "host"
    assert {1, 2} <= {e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"}  # gpu.compute, cpu.attention


def test_the_parts_call_what_they_say(tmp_path):
    """With a stand-in for Python that writes down how it is called."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(f'#!/bin/sh\necho "$TRITON_INTERPRET $*" >>{calls}\n')
    python.chmod(0o755)
    done = check(str(tmp_path / "out"), PYTHON=str(python))
    assert done.returncode == 0, done.stdout
    called = calls.read_text().splitlines()
    assert len(called) == len(NAMES) and all(line.startswith("0 -m ") for line in called)
    gpu, others = (next(x for x in called if f"-m {marks} " in x) for marks in ("gpu", "not gpu and not slow"))
    assert called.index(gpu) < called.index(others)
    assert called[1].endswith("card.json") and "hybridattn.calibration.card" in called[1]
    assert "test_compile_gate" in others and "test_codegen" in others and all(" -x" not in line for line in called)
    assert any("+experiment=ratio_cuda device=cuda" in line for line in called)
    assert any("generate --device cuda" in line and "--trace" in line for line in called)


def test_parts_can_be_skipped(tmp_path):
    done = check(str(tmp_path / "out"), "--skip", "pbcdefg", "--dry-run", PYTHON="true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": skipped") == 7 and "== part a machine: at most 30 s" in done.stdout


def test_without_time_no_part_passes_and_the_script_fails(tmp_path):
    done = check(str(tmp_path / "out"), "--dry-run", GPU_CHECK_SECONDS="5")
    assert done.returncode == 1
    assert verdicts(tmp_path / "out") == dict.fromkeys(NAMES, "not finished: no time was left")


def test_a_part_that_is_cut_off_is_not_finished(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    done = check(str(tmp_path / "out"), "--dry-run", "--skip", "apcdefg", PYTHON=str(python), GPU_CHECK_SECONDS="11")
    assert done.returncode == 1
    assert verdicts(tmp_path / "out")["gpu_tests"].startswith("not finished within 1")


def test_a_part_that_fails_stops_no_other(tmp_path):
    done = check(str(tmp_path / "out"), "--dry-run", PYTHON="false")
    assert done.returncode == 1
    assert verdicts(tmp_path / "out") == dict.fromkeys(NAMES, "failed (exit status 1)")


def test_wrong_calls_say_how_it_is_called(tmp_path):
    for args in ([], ["out", "--fast"], [str(tmp_path / "out"), "--only", "z"]):
        done = check(*args)
        assert done.returncode == 2 and "gpu_check" in done.stderr
