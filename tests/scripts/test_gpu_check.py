"""The script for a GPU machine, gone through on the host device with tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
FILES = {
    "machine.json": "a", "conformance.json": "b", "policies.json": "e", "kernels.json": "cd", "tokens.json": "f",
}  # fmt: skip
ABSENT = ("hydra", "omegaconf", "wandb", "pandas", "pyarrow", "matplotlib", "accelerate", "gguf")


def check(tmp_path, *args, **env):
    """Run the script as on a machine that lacks what the core must not need."""
    for name in ABSENT:
        (tmp_path / "absent" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "absent" / name / "__init__.py").write_text(f"raise ImportError('{name} must not be needed')\n")
    settings = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "absent"), **env}
    return subprocess.run(["sh", str(SCRIPT), *args], env=settings, capture_output=True, text=True, timeout=500)


def test_a_dry_run_goes_all_the_way(tmp_path):
    out = tmp_path / "out"
    done = check(tmp_path, str(out), "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed parts: none" in done.stdout
    assert sorted(p.name for p in out.iterdir()) == sorted([*FILES, "trace.json"])  # at most six
    for name, letters in FILES.items():
        found = json.loads((out / name).read_text())
        assert sorted(found) == [f"part_{letter}" for letter in letters]
        for part in found.values():
            assert part["complete"] and part["ok"], name
            assert part["provenance"]["dry_run"] and part["provenance"]["device"] == "host"
    machine = json.loads((out / "machine.json").read_text())["part_a"]
    assert "amx_bf16" in machine["cpu_flags"] and machine["doctor"]["isa_level"]
    rows = json.loads((out / "policies.json").read_text())["part_e"]["rows"]
    assert {(r["policy"], r["ratio"]) for r in rows} == {
        ("gpu_only", 0.0), ("sync_offload", 0.5), ("async_overlap", 0.5), ("sync_offload", 2), ("async_overlap", 2),
    }  # fmt: skip
    for row in rows:
        assert row["gpu_tokens_per_s"] > 0
        if row["policy"] == "sync_offload":
            assert row["cpu_tokens_per_s"] > 0 and row["layers_per_iteration_a"] == 3
        if row["ratio"]:
            assert row["stretch_d"] is not None and 0 <= row["overlap_fraction"] <= 1 and row["polls_made"] > 0
    trace = json.loads((out / "trace.json").read_text())
    assert trace["otherData"]["device"] == "host"
    assert {1, 2} <= {e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"}  # gpu.compute, cpu.attention
    tokens = json.loads((out / "tokens.json").read_text())["part_f"]["rows"]
    assert all(r["equal_to_gpu_only"] == r["requests"] for r in tokens) and len(tokens) == 5


def test_parts_can_be_skipped(tmp_path):
    done = check(tmp_path, str(tmp_path / "out"), "--skip", "bcdefg", "--dry-run", PYTHON="true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped") == 6 and "== part a: at most 30 s" in done.stdout


def test_without_time_every_part_says_so_and_the_script_fails(tmp_path):
    done = check(tmp_path, str(tmp_path / "out"), "--dry-run", GPU_CHECK_SECONDS="5")
    assert done.returncode == 1
    assert done.stdout.count("no time left") == 7 and "failed parts: abecdfg" in done.stdout


def test_wrong_calls_say_how_it_is_called(tmp_path):
    for args in ([], ["out", "--fast"]):
        done = check(tmp_path, *args)
        assert done.returncode == 2 and "gpu_check" in done.stderr


def test_a_part_that_fails_stops_no_other(tmp_path):
    done = check(tmp_path, str(tmp_path / "out"), "--dry-run", PYTHON="false")
    assert done.returncode == 1
    assert done.stdout.count(": failed\n") == 7 and "failed parts: abecdfg" in done.stdout
