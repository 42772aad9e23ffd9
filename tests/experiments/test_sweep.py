"""The sweep machinery, on a point of three lines in a file of its own."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import OmegaConf

from experiments.composed import plain_values
from experiments.run import main
from experiments.wording import quoted
from hybridattn.analysis.results import ResultFolder

ROOT = Path(__file__).parents[2]
POINTS = """
import time
import warnings
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
    said = warnings.formatwarning("odd", UserWarning, "file.py", 7)
    return {**origin, "value": 12 / settings.divisor, "bad": float("inf"), "said": said}
"""
BASE = ["-m", "name=divide", "point=my_points:divide", "+settings.sleep_s=0"]
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
    assert run("+settings.divisor=1,2,3") == 0
    out = capsys.readouterr().out
    assert "divide: 3 points, launcher basic (1 at a time), projected 4 s" in out and "3/3" in out
    found = rows(tmp_path)
    assert [(r["point"], r["status"], r["value"], r["launcher"]) for r in found] == [
        (0, "ok", 12.0, "basic"), (1, "ok", 6.0, "basic"), (2, "ok", 4.0, "basic")]  # fmt: skip
    assert all(r["bad"] is None and r["not_finite"] == "bad" for r in found)
    assert {r["said"] for r in found} == {"experiments.run: odd\n"}  # how a warning looks: without file and line
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
    assert run("+settings.divisor=1", "hydra/launcher=basic,joblib") == 2
    assert "Sweeping over Hydra's configuration is not supported" in capsys.readouterr().err
    assert run("+settings.divisor=1", "+experiment=ratio,capacity") == 2
    assert "experiment takes one value" in capsys.readouterr().err


def test_H01_a_swept_config_that_chooses_a_launcher_is_refused(tmp_path, run, capsys):
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "here.yaml").write_text("# @package _global_\nfail_fast: true\n")
    (extra / "there.yaml").write_text("# @package _global_\ndefaults:\n  - override /hydra/launcher: joblib\n")
    where = f"hydra.searchpath=[file://{tmp_path}]"
    assert run(where, "+extra=here,there") == 2
    assert "chooses the launcher joblib inside a sweep that basic launches" in capsys.readouterr().err
    assert run(where, "+extra=there", "hydra.launcher.n_jobs=1") == 0  # not swept: it is what launches
    assert [r["launcher"] for r in rows(tmp_path)] == ["joblib"]


def test_joblib_runs_points_in_other_processes_and_keeps_every_row(tmp_path):
    (tmp_path / "my_points.py").write_text(POINTS)
    done = command(
        tmp_path, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "+settings.divisor=1,2,0,4"
    ).communicate()
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


@pytest.mark.skipif(find_spec("submitit") is None, reason="hydra-submitit-launcher is not installed")
def test_submitit_runs_points_as_jobs_of_this_machine(tmp_path):
    (tmp_path / "my_points.py").write_text(POINTS)
    process = command(tmp_path, "hydra/launcher=submitit_local", "+settings.divisor=1,0,4")
    done = process.communicate(timeout=300)
    found = sorted(rows(tmp_path), key=lambda r: r["point"])
    assert [(r["launcher"], r["status"]) for r in found] == [("submitit_local", s) for s in ("ok", "failed", "ok")], (
        done
    )
    assert process.returncode == 1 and "launcher submitit_local (" in done[0]
    assert list((latest(tmp_path) / ".submitit").glob("*/*_log.out"))


def test_slurm_is_composed_as_its_launcher_documents_it(capsys):
    pytest.importorskip("submitit")
    words = ["--cfg", "hydra", "-p", "hydra.launcher", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=cpu"]
    assert main([*words, "+experiment=ratio"]) == 0
    out = capsys.readouterr().out
    assert "SlurmLauncher" in out and "partition: cpu" in out and "array_parallelism: 256" in out


SLURM = {  # as much of it as its users' commands show: an array of jobs, one after the other, on this machine
    "sbatch": """#!/bin/bash
        last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "${@: -1}")
        export SLURM_ARRAY_JOB_ID=70 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NUM_NODES=1
        for task in $(seq 0 "$last"); do
            SLURM_JOB_ID=$((70 + task)) SLURM_ARRAY_TASK_ID=$task bash "${@: -1}"
        done >"$0.log" 2>&1 &
        echo "Submitted batch job 70" """,
    "srun": """#!/bin/bash
        while [[ $1 != *python* ]]; do shift; done
        exec "$@" """,
    "sacct": "#!/bin/bash\nprintf 'JobID|State\\n70_[0-9]|RUNNING\\n'",
}


def test_slurm_gets_an_array_of_jobs_whose_rows_are_collected(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    (tmp_path / "my_points.py").write_text(POINTS)
    (tmp_path / "bin").mkdir()
    for name, script in SLURM.items():
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=cpu", "+settings.divisor=1,0,4"]
    process = command(tmp_path, *words)
    out, err = process.communicate(timeout=120)
    said = f"{out}\n{err}\n{(tmp_path / 'bin/sbatch.log').read_text()}"
    found = sorted(rows(tmp_path), key=lambda r: r["point"])
    assert [(r["launcher"], r["status"]) for r in found] == [("submitit_slurm", s) for s in ("ok", "failed", "ok")], (
        said
    )
    assert process.returncode == 1 and "launcher submitit_slurm (" in out and "2 points ran, 1 failed" in out, said
    script = next((latest(tmp_path) / ".submitit").rglob("*.sh")).read_text()
    assert "#SBATCH --partition=cpu" in script and "#SBATCH --array=0-2%" in script


@pytest.mark.slow
@pytest.mark.skipif(find_spec("hydra_plugins.hydra_ray_launcher") is None, reason="hydra-ray-launcher is not installed")
def test_ray_runs_points_on_a_local_cluster_and_stops_it(tmp_path):
    (tmp_path / "my_points.py").write_text(RAY_POINT)
    process = command(tmp_path, "hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2", "+settings.x=1,2,0,4")
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
    assert process.returncode == 130 and "go on with resume=true" in out, f"{out}\n{err}"
    assert 1 <= len(rows(tmp_path)) < 3
    assert run(*sweep, "settings.sleep_s=0.7", "resume=true") == 0
    assert sorted(r["point"] for r in rows(tmp_path)) == [0, 1, 2]


def test_an_interrupt_that_a_library_turns_into_an_error_of_its_own_is_130(tmp_path, run, capsys, monkeypatch):
    def composed(self, *args, _real=ConfigLoaderImpl.load_sweep_config):
        if latest(tmp_path).exists() and rows(tmp_path):  # as OmegaConf's roll-back does amid an assignment
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            finally:
                raise AttributeError("'NoneType' object has no attribute '_invalidate_flags_cache'")
        return _real(self, *args)

    with monkeypatch.context() as m:
        m.setattr(ConfigLoaderImpl, "load_sweep_config", composed)
        assert run("+settings.divisor=1,2,3") == 130
    assert "interrupted: 2 points have not run; go on with resume=true" in capsys.readouterr().out
    assert run("+settings.divisor=1,2,3", "resume=true") == 0


def test_an_interrupt_amid_a_point_leaves_no_failed_row_whatever_it_becomes(tmp_path, run, monkeypatch):
    def sleep(seconds):
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("what some library makes of it")

    with monkeypatch.context() as m:
        m.syspath_prepend(str(tmp_path))
        m.setattr(importlib.import_module("my_points"), "time", SimpleNamespace(sleep=sleep))
        assert run("+settings.divisor=1,2") == 130
    assert rows(tmp_path) == []


def test_numbers_that_json_and_tables_have_no_place_for_are_swept(tmp_path, run):
    """Infinity is no JSON, and a table's integers have 64 bits."""
    wide = 10**25
    assert run(f"+settings.divisor=1,{wide}") == 0
    assert list(pd.read_parquet(latest(tmp_path) / "rows.parquet")["divisor"]) == ["1", str(wide)]
    assert plain_values(OmegaConf.create({"settings": {"x": math.inf, "y": math.nan}})) == {
        "settings.x": "inf", "settings.y": "nan",
    }  # fmt: skip


def test_what_cannot_be_drawn_is_said_and_is_no_success(tmp_path, run, capsys, monkeypatch):
    monkeypatch.setattr("experiments.finish.write_parquet", lambda rows, path: 1 / 0)
    assert run("+settings.divisor=1") == 1
    assert "could not be made: ZeroDivisionError: division by zero" in capsys.readouterr().out
    assert len(rows(tmp_path)) == 1


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
        (("tracker.timeout_s=nan",), "tracker.timeout_s must be a positive number of seconds, got nan"),
        (("hydra/launcher=nonsense",), "(is its plugin installed? pip install hydra-nonsense-launcher)"),
        (("hardware.gpus=2", "device=host"), "hardware.gpus=2 is for the device sim: on host it is hardware=here"),
        (("device=host",), "T4 is for the device sim: on host it is hardware=here, this machine as it is"),
        (("analysis.theory=bogus",), "theory 'bogus' is unknown; known are one_layer_overlap"),
        (("policy.max_rows=2",), "what the policy takes is written policy.options.max_rows"),
        (("policy=sync_offload", "policy.options.most=2"), "sync_offload has no option 'most'; it has cpu_fraction, m"),
        (("policy.options.cpu_fraction=0.1,1", "policy=gpu_only"), "policy gpu_only has no option 'cpu_fraction'"),
        (("+settings.place=x", "hardware=a10"), "hardware=a10 would change nothing: divide names machine and model in"),
        (("repeats=0",), "repeats must be at least 1"),
        (("+settings.divisor=range(0)",), "+settings.divisor=range(0) sweeps over no value at all"),
        (("name=..",), "name of an experiment must be a plain folder name, got '..'"),
        (("hardware=t4=3",), "mismatched input"),
        (("name=",), "no experiment was chosen"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2_before_anything_runs(tmp_path, run, capsys, overrides, message):
    assert run(*overrides) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("experiments.run: ") and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "results").exists()


# -- what Hydra itself offers ----------------------------------------------------------------------------------------


def test_hydras_own_sweeper_gathers_rows_as_well(tmp_path, run, capsys):
    assert run("hydra/sweeper=basic", "+settings.divisor=1,0,2") == 1
    assert [(r["point"], r["status"], r["divisor"]) for r in rows(tmp_path)] == [
        (0, "ok", 1),
        (1, "failed", 0),
        (2, "ok", 2),
    ]
    assert (latest(tmp_path) / "multirun.yaml").is_file() and "2 points ran, 1 failed" in capsys.readouterr().out
    assert run("hydra/sweeper=basic", "+settings.divisor=1,2", "resume=true") == 2
    assert "resume is for a sweep of hydra/sweeper=points" in capsys.readouterr().err


def test_one_point_runs_without_a_sweep(tmp_path, run, capsys):
    assert main([*BASE[1:], f"results_root={tmp_path}/results", "+settings.divisor=3"]) == 0
    assert [(r["point"], r["value"]) for r in rows(tmp_path)] == [(0, 4.0)]
    assert "1 points ran, 0 failed" in capsys.readouterr().out


def test_a_swept_value_without_multirun_says_what_to_write(tmp_path, run, capsys):
    assert main([*BASE[1:], f"results_root={tmp_path}/results", "+settings.divisor=1,2"]) == 2
    assert "+settings.divisor=1,2 is more than one value: add -m (--multirun) to sweep it" in capsys.readouterr().err


@pytest.fixture
def own_logging():
    """--info adds a handler to the root logger, for the rest of the process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cfg", "job", "+experiment=ratio"], "name: ratio\n"),
        (["--cfg", "hydra", "+experiment=ratio"], "settings.ratio: 0.25,0.5,1,2,4,8,12"),
        (["--help"], "debug: quick"),
        (["--info", "plugins"], "PointSweeper"),
        (["--info", "defaults", "+experiment=ratio"], "experiment/ratio"),
    ],
)
def test_hydras_options_print_and_run_nothing(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    assert says in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_tab_completion_knows_the_experiments_from_any_folder(tmp_path):
    file = ROOT / "experiments" / "run.py"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env["COMP_LINE"] = "python experiments/run.py +experiment=rati"
    argv = [sys.executable, str(file), "-sc", "query=bash"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["+experiment=ratio", "+experiment=ratio_cuda", "+experiment=ratio_host"], done.stderr


def test_the_app_runs_from_any_folder_and_writes_there(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    argv = [sys.executable, str(ROOT / "experiments" / "run.py"), "+experiment=overlap", "hardware=a10"]
    done = subprocess.run([*argv, "settings.fraction=0,1"], cwd=tmp_path, env=env, capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "results/overlap/latest/rows.jsonl").read_text().splitlines()) == 2


def test_a_folder_of_ones_own_is_taken_and_numbered_when_it_is_there(tmp_path, run):
    where = f"hydra.sweep.dir='{tmp_path}/a, (b)=c'"
    assert run(where, "+settings.divisor=1,2") == 0 and run(where, "+settings.divisor=1,2") == 0
    for name in ("a, (b)=c", "a, (b)=c-1"):
        assert len((tmp_path / name / "rows.jsonl").read_text().splitlines()) == 2


# -- labels, names and values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["launcher=joblib"], "launcher is now hydra/launcher, so write hydra/launcher=joblib"),
        (["sweep.hardware=a10,t4"], "the axes of a sweep are now hydra.sweeper.params; write hardware=a10,t4"),
        (["settings.passes=3"], "passes is now called steps"),
        (["policy.options.patience_us=3"], "patience_us is now called max_wait_us"),
        (["+experiment=overlap", "+experiment=rate"], "one experiment at a time, got +experiment=overlap and"),
        (["results_root=/a,b"], """a path that holds a comma is written 'results_root="/a,b"'"""),
        (
            ["+settings.profile=/a/b,c.json"],
            """a path that holds a comma is written '+settings.profile="/a/b,c.json"'""",
        ),
        (["results_root=a,b"], """one text with a comma is written 'results_root="a,b"'"""),
        (["results_root=/a=b"], """as one text it is written 'results_root="/a=b"'"""),
        (["results_root=/a(b"], """as one text it is written 'results_root="/a(b"'"""),
    ],
)
def test_old_names_and_values_that_need_quotes_say_what_to_write(tmp_path, run, capsys, words, says):
    assert run(*words) == 2
    err = capsys.readouterr().err
    assert says in err and len(err.strip().splitlines()) == 1 and not (tmp_path / "results").exists()


def test_a_file_with_the_old_axes_says_where_they_are_now(tmp_path, run, capsys):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "old.yaml").write_text("# @package _global_\nname: old\nsweep: {policy: gpu_only}\n")
    assert run(f"hydra.searchpath=[file://{tmp_path}]", "+experiment=old") == 2
    assert "sweep is now called hydra.sweeper.params" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a,b", "a=b", "a(b", "a b", "it's", 'say "x"', "{a}", "$x", "back\\"])
def test_any_path_can_be_written_as_the_message_says(tmp_path, run, name):
    [word] = shlex.split(quoted("results_root", f"{tmp_path}/{name}"))
    assert run(word, "+settings.divisor=1,2") == 0
    assert len((tmp_path / name / "divide/latest/rows.jsonl").read_text().splitlines()) == 2


def test_labels_are_those_of_what_ran(tmp_path, run):
    assert run("hardware=a10,t4", "hardware.gpus=1,2", "device.submit_us=2") == 0
    ran = [(r["hardware"], r["submit_us"], r["seed"]) for r in rows(tmp_path)]
    assert ran == [("A10", 2.0, 0), ("2x A10", 2.0, 0), ("T4", 2.0, 0), ("2x T4", 2.0, 0)]
    assert run("hardware.gpu=l4,a10", "model.shape=llama2-13b") == 0
    assert [r["hardware"] for r in rows(tmp_path)] == ["T4 (gpu=l4)", "T4 (gpu=a10)"]
    assert {r["model"] for r in rows(tmp_path)} == {"Llama-2-7B (shape=llama2-13b)"}


def test_resume_compares_composed_values_not_words(tmp_path, run, capsys):
    (tmp_path / "policy").mkdir()
    file, words = tmp_path / "policy" / "mine.yaml", ["policy=gpu_only,mine", f"hydra.searchpath=[file://{tmp_path}]"]
    text = "label: mine\n_target_: cpu_only\noptions: {micro_batches: 2}\n"
    file.write_text(text)
    assert run(*words, "hardware=t4") == 0
    assert run(*words, "resume=true") == 0  # other words, the same values: t4 is what the root says
    file.write_text(text.replace("2", "3"))
    assert run(*words, "resume=true") == 2
    assert "policy.options.micro_batches was 2 and is 3 (at policy=mine)" in capsys.readouterr().err


def test_repeats_of_a_simulated_point_are_no_repeats_where_nothing_is_drawn(tmp_path, run, capsys):
    ask = ["analysis.x=divisor", "analysis.y=value", "analysis.relative=false"]
    assert run("+settings.divisor=1,2", "repeats=3", *ask) == 0
    assert "4 repeats of simulated points are copies of the first" in capsys.readouterr().out
    assert [r["seed"] for r in rows(tmp_path)] == [0, 0, 1, 1, 2, 2]


def test_repeats_of_a_workload_draw_anew(tmp_path):
    where = ["+experiment=load", "policy=gpu_only", "workload.options.arrivals.rate_per_s=0.4", "settings.limit=8"]
    assert main([*where, "repeats=2", f"results_root={tmp_path}"]) == 0
    first, second = map(json.loads, (tmp_path / "load/latest/rows.jsonl").read_text().splitlines())
    assert (first["seed"], second["seed"]) == (0, 1) and first["duration_ns"] != second["duration_ns"]


def test_options_of_a_policy_are_swept_beside_those_that_lack_them(tmp_path, run, capsys):
    words = ["policy=gpu_only,async_overlap", "policy.options.max_wait_us=0,500"]
    assert run(*words) == 0
    found = [(r["policy"], r.get("max_wait_us"), r["point_id"]) for r in rows(tmp_path)]
    assert found == [
        ("gpu_only", None, "policy=gpu_only"),
        ("async_overlap", 0, "policy=async_overlap policy.options.max_wait_us=0"),
        ("async_overlap", 500, "policy=async_overlap policy.options.max_wait_us=500"),
    ]
    assert run(*words, "resume=true") == 0 and len(rows(tmp_path)) == 3
    assert run("policy=gpu_only,cpu_only", "policy.options.max_wait_us=0,500") == 2
    assert "no policy of this sweep has what policy.options.max_wait_us says: policy=gpu_only has" in (
        capsys.readouterr().err
    )
    assert run("policy=gpu_only,sync_offload", "policy.options.cpu_fraction=0.1,0.5") == 0  # of the class, in no file
    assert [r.get("cpu_fraction") for r in rows(tmp_path)] == [None, 0.1, 0.5]


# -- mistakes and full disks -----------------------------------------------------------------------------------------


def test_a_place_that_cannot_hold_results_is_one_sentence(tmp_path, run, capsys):
    (tmp_path / "file").write_text("")
    assert run("+settings.divisor=1", f"results_root={tmp_path}/file/results") == 2
    err = capsys.readouterr().err
    assert "experiments.run: results cannot be written to" in err and "Not a directory" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("what", ["add_row", "write_json"])
def test_a_disk_that_is_full_amid_a_sweep_is_a_sentence_and_the_rows_stay(tmp_path, run, capsys, monkeypatch, what):
    real, calls = getattr(ResultFolder, what), []

    def until_full(self, *args):
        calls.append(args)
        if len(calls) > (2 if what == "add_row" else 4):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args)

    monkeypatch.setattr(ResultFolder, what, until_full)
    assert run("+settings.divisor=1,2,3") == 1
    out, err = capsys.readouterr()
    assert "No space left on device" in out + err and "Traceback" not in out + err
    assert len(rows(tmp_path)) == (2 if what == "add_row" else 3)


WITHOUT = """
import importlib.machinery as m, runpy, sys
real = m.PathFinder.find_spec
m.PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] in {absent!r} else real(name, *rest)
sys.argv[1:] = {words!r}
runpy.run_module({module!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "words", "absent", "code", "says"),
    [
        (
            "experiments.run",
            ["+experiment=overlap"],
            ["hydra"],
            2,
            "hydra is not installed: pip install 'hybridattn[exp",
        ),
        ("hybridattn.cli", ["generate", "a"], ["torch"], 2, "torch is not installed: pip install 'hybridattn[main]'"),
        (
            "hybridattn.cli",
            ["doctor"],
            ["torch", "psutil"],
            0,
            "torch, psutil are not installed, so no text can be gen",
        ),
    ],
)
def test_a_missing_extra_is_named(module, words, absent, code, says):
    argv = [sys.executable, "-c", WITHOUT.format(module=module, words=words, absent=absent)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code and says in done.stdout + done.stderr and "Traceback" not in done.stderr
