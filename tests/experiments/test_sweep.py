"""The sweep machinery, on a point of three lines in a file of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from experiments.compose import CONFIGS, configs
from experiments.run import main
from experiments.sweep import ComposedOnce
from hybridattn.core.errors import InputError

ROOT = Path(__file__).parents[2]
POINTS = """
import time
from dataclasses import dataclass
from experiments.settings import experiment

@dataclass
class Settings:
    divisor: int = 1
    sleep_s: float = 0.0

@experiment(Settings)
def divide(app, settings):
    time.sleep(settings.sleep_s)
    origin = {"kind": "simulated", "device": "sim", "profile": "none"}
    return {**origin, "value": 12 / settings.divisor, "bad": float("inf")}
"""
BASE = ["name=divide", "point=my_points:divide", "+settings.sleep_s=0"]
KEYS = {"crossover", "source", "device", "profile", "commit", "points", "failed"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the app on the points above; returns the exit code."""
    (tmp_path / "my_points.py").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda *overrides: main([*BASE, f"results_root={tmp_path}/results", *overrides])


def latest(tmp_path):
    return tmp_path / "results" / "divide" / "latest"


def rows(tmp_path):
    return [json.loads(line) for line in (latest(tmp_path) / "rows.jsonl").read_text().splitlines()]


def test_a_sweep_leaves_rows_table_summary_and_configurations(tmp_path, run, capsys):
    assert run("+settings.divisor=1,2,3", "-m") == 0
    out = capsys.readouterr().out
    assert "divide: 3 points, launcher basic (1 at a time), projected 4 s" in out and "3/3" in out
    found = rows(tmp_path)
    assert [(r["point"], r["status"], r["value"], r["launcher"]) for r in found] == [
        (0, "ok", 12.0, "basic"), (1, "ok", 6.0, "basic"), (2, "ok", 4.0, "basic")]  # fmt: skip
    assert all(r["bad"] is None and r["not_finite"] == "bad" for r in found)
    assert list(pd.read_parquet(latest(tmp_path) / "rows.parquet")["divisor"]) == [1, 2, 3]
    summary = json.loads((latest(tmp_path) / "summary.json").read_text())
    assert set(summary) == KEYS and (summary["points"], summary["failed"]) == (3, 0)
    assert set(summary["crossover"]) == {"value", "low", "high", "unit"} and summary["source"] == "simulated"
    assert "divisor: 2" in (latest(tmp_path) / "points" / "1.yaml").read_text()


def test_H03_a_failed_point_is_a_row_and_the_sweep_goes_on(tmp_path, run, capsys):
    assert run("+settings.divisor=1,0,2") == 1
    found = rows(tmp_path)
    assert [r["status"] for r in found] == ["ok", "failed", "ok"]
    assert found[1]["error"].startswith("ZeroDivisionError") and "in divide" in found[1]["traceback"]
    assert json.loads((latest(tmp_path) / "summary.json").read_text())["failed"] == 1
    assert "failed: +settings.divisor=0: ZeroDivisionError" in capsys.readouterr().out


def test_H03_fail_fast_stops_and_resume_goes_on(tmp_path, run, capsys):
    assert run("+settings.divisor=1,0,2", "fail_fast=true") == 1
    assert [r["status"] for r in rows(tmp_path)] == ["ok", "failed"]
    assert "1 points have not run; go on with resume=true" in capsys.readouterr().out
    first = latest(tmp_path).resolve()
    assert run("+settings.divisor=1,0,2", "resume=true") == 1
    assert latest(tmp_path).resolve() == first
    assert [r["point"] for r in rows(tmp_path)] == [0, 1, 1, 2]  # what failed ran again, what was good did not


def test_resume_finishes_a_sweep_that_was_killed_in_the_middle_of_a_row(tmp_path, run):
    assert run("+settings.divisor=1,2,3") == 0
    file = latest(tmp_path) / "rows.jsonl"
    whole = file.read_text().splitlines()
    file.write_text(whole[0] + "\n" + whole[1][:40])
    assert run("+settings.divisor=1,2,3", "resume=true") == 0
    good = [line for line in file.read_text().splitlines() if line.endswith("}")]
    assert sorted(json.loads(line)["point"] for line in good) == [0, 1, 2]
    assert json.loads((latest(tmp_path) / "summary.json").read_text())["points"] == 3


def test_resume_refuses_another_sweep_and_what_is_not_there(tmp_path, run, capsys):
    assert run("+settings.divisor=1,2", "resume=true") == 2
    assert "no result folder" in capsys.readouterr().err
    assert run("+settings.divisor=1,2") == 0
    assert run("+settings.divisor=1,2,3", "resume=true") == 2
    assert "holds another sweep" in capsys.readouterr().err


def test_H01_the_launcher_really_used_is_in_the_rows_and_no_point_may_choose_another(tmp_path, run, capsys):
    assert run("+settings.divisor=1", "launcher=basic,joblib") == 2
    assert "launcher takes one value" in capsys.readouterr().err
    assert run("+settings.divisor=1", "+experiment=ratio,capacity") == 2
    assert "experiment takes one value" in capsys.readouterr().err


def test_H01_a_swept_config_that_chooses_a_launcher_is_refused(tmp_path):
    shutil.copytree(CONFIGS, tmp_path / "configs")
    extra = tmp_path / "configs" / "extra"
    extra.mkdir()
    (extra / "here.yaml").write_text("# @package _global_\nfail_fast: true\n")
    (extra / "there.yaml").write_text("# @package _global_\ndefaults:\n  - override /hydra/launcher: joblib\n")
    with configs(tmp_path / "configs") as composer:
        with pytest.raises(InputError, match="chooses the launcher joblib inside a sweep that basic launches"):
            composer.sweep(["+extra=here,there"])
        assert composer.sweep(["+extra=there"]).launcher == "joblib"  # not swept: it is what launches


@pytest.mark.parametrize(
    "overrides",
    [["+experiment=ratio", "policy=gpu_only,async_overlap", "settings.ratio=8,16", "repeats=2"],
     ["+experiment=sessions", "hardware=a10", "hydra.verbose=true", "hydra.launcher={}"]],
)  # fmt: skip
def test_a_point_that_was_composed_to_check_it_is_what_hydra_composes_for_the_launcher(overrides):
    with configs() as composer:
        composed, hydra = composer.sweep(overrides), composer.hydra.config_loader
        assert 1 < len(composed.checked) <= len(composed.points)
        loader = ComposedOnce(hydra, composed)
        for point in composed.points:
            job = [*(o for o in composed.fixed if not o.startswith("hydra")), *point]
            want = hydra.load_sweep_config(composed.master, job)
            checked = composed.checked.get(point)
            found = loader.load_sweep_config(composed.master, job)
            assert (found is checked) == (checked is not None)
            assert OmegaConf.to_container(found) == OmegaConf.to_container(want)
            assert list(found.hydra.overrides.task) == job
        assert not composed.checked  # each is handed out once: who runs it may change it


def test_joblib_runs_points_in_other_processes_and_keeps_every_row(tmp_path):
    (tmp_path / "my_points.py").write_text(POINTS)
    done = command(tmp_path, "launcher=joblib", "hydra.launcher.n_jobs=2", "+settings.divisor=1,2,0,4").communicate()
    found = sorted(rows(tmp_path), key=lambda r: r["point"])
    assert [(r["launcher"], r["status"]) for r in found] == [("joblib", s) for s in ("ok", "ok", "failed", "ok")], done
    assert "launcher joblib (2 at a time)" in done[0]


RAY_POINT = """
import os
from dataclasses import dataclass
import ray
from experiments.settings import experiment

@dataclass
class Settings:
    x: int = 1
    sleep_s: float = 0.0

@experiment(Settings)
def divide(app, settings):
    context = ray.get_runtime_context()
    origin = {"kind": "simulated", "device": "sim", "profile": "none", "value": 12 / settings.x}
    return {**origin, "pid": os.getpid(), "task": context.get_task_id(), "worker": context.get_worker_id()}
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("hydra_plugins.hydra_ray_launcher") is None, reason="hydra-ray-launcher is not installed")
def test_ray_runs_points_on_a_local_cluster_and_stops_it(tmp_path):
    (tmp_path / "my_points.py").write_text(RAY_POINT)
    process = command(tmp_path, "launcher=ray", "+hydra.launcher.ray.init.num_cpus=2", "+settings.x=1,2,0,4")
    out, err = process.communicate(timeout=300)
    found = sorted(rows(tmp_path), key=lambda r: r["point"])
    assert [(r["launcher"], r["status"]) for r in found] == [("ray", s) for s in ("ok", "ok", "failed", "ok")], err
    good = [r for r in found if r["status"] == "ok"]
    assert len({r["task"] for r in good}) == 3 and all(r["pid"] != process.pid and r["worker"] for r in good)
    assert process.returncode == 1 and "launcher ray (2 at a time)" in out and "ZeroDivisionError" in out
    for pid in {r["pid"] for r in good}:  # the workers ended with the cluster
        assert not Path(f"/proc/{pid}").exists() or b"ray" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def command(tmp_path, *overrides):
    argv = [sys.executable, "-m", "experiments.run", *BASE, f"results_root={tmp_path}/results", *overrides]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_interrupted_sweep_keeps_its_rows_and_can_be_resumed(tmp_path, run):
    (tmp_path / "my_points.py").write_text(POINTS)
    sweep = ["+settings.divisor=1,2,3"]
    process = command(tmp_path, *sweep, "settings.sleep_s=0.7")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if latest(tmp_path).exists() and rows(tmp_path):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "go on with resume=true" in out, err
    assert 1 <= len(rows(tmp_path)) < 3
    assert run(*sweep, "settings.sleep_s=0.7", "resume=true") == 0
    assert sorted(r["point"] for r in rows(tmp_path)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("polcy=adaptive",), "Could not override 'polcy'"),
        (("policy=nonsense",), "Could not find 'policy/nonsense'; available are"),
        (("device.submit_us=many",), "Value 'many' of type 'str' could not be converted to Float"),
        (("device.nam=host",), "Key 'nam' not in 'Device'"),
        (("+settings.divsor=1",), "divsor"),
        (("+settings.divisor=1,two",), "Value 'two' of type 'str' could not be converted to Integer (at divisor)"),
        (("point=my_points:nothing",), "point 'my_points:nothing' cannot be imported"),
        (("tracker.name=mlflow",), "tracker 'mlflow'"),
        (("hydra/launcher=nonsense",), "(is its plugin installed? pip install hydra-nonsense-launcher)"),
        (("repeats=0",), "repeats must be at least 1"),
        (("hardware=t4=3",), "mismatched input"),
        (("name=",), "no experiment was chosen"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_before_anything_runs(tmp_path, run, capsys, overrides, message):
    assert run(*overrides) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("experiments.run: ") and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "results").exists()
