"""An experiment that names others: two sweeps by one command, in folders of their own, never in one table."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from experiments.report import main as report
from experiments.run import main
from experiments.wording import CONFIGS

POINT = """
from dataclasses import dataclass
from pathlib import Path
from experiments.settings import experiment

@dataclass
class Settings:
    x: int = 1
    kind: str = "simulated"
    stop_file: str = ""

@experiment(Settings)
def point(app, settings):
    if settings.stop_file and Path(settings.stop_file).exists():
        raise KeyboardInterrupt
    if settings.x == 0:
        raise ValueError("x is 0")
    return {"kind": settings.kind, "device": app.device.name, "profile": "none", "y": settings.x}
"""
PAIR = """
# @package _global_
name: pair
title: "simulated apples"
point: pair_points:point
also: [pair_here]
settings: {x: 1, kind: simulated, stop_file: ""}
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      settings.x: 2,4
      policy: gpu_only,async_overlap
analysis: {x: x, y: y, baseline: gpu_only, candidate: async_overlap}
"""
HERE = """
# @package _global_
defaults:
  - pair
  - override /device: host
  - override /hardware: here
  - _self_
name: pair_here
title: "measured apples"
also: []
repeats: 2
settings: {kind: measured}
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      settings.x: 3
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs ``+experiment=pair`` of a folder of configurations outside."""
    for name, text in (("pair", PAIR), ("pair_here", HERE)):
        (tmp_path / "experiment").mkdir(exist_ok=True)
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text.lstrip())
    (tmp_path / "pair_points.py").write_text(POINT)
    monkeypatch.syspath_prepend(str(tmp_path))
    where = [f"hydra.searchpath=[file://{tmp_path}]", f"results_root={tmp_path}/results"]
    return lambda *more, name="pair": main([f"+experiment={name}", *where, *more])


def folder(tmp_path, name):
    return tmp_path / "results" / name / "latest"


def rows(tmp_path, name):
    return [json.loads(line) for line in (folder(tmp_path, name) / "rows.jsonl").read_text().splitlines()]


def test_one_command_runs_both_and_their_rows_never_meet_and_one_page_holds_both(tmp_path, run, capsys):
    assert run() == 0
    out = capsys.readouterr().out
    assert "after pair comes pair_here on host: 4 points, projected 5 s" in out
    assert "pair found (simulated):" in out and "pair_here found (measured):" in out
    for name, kind, count, device in (("pair", "simulated", 4, "sim"), ("pair_here", "measured", 4, "host")):
        found = rows(tmp_path, name)
        assert {(r["kind"], r["device"], r["experiment"]) for r in found} == {(kind, device, name)}
        assert len(found) == count and f"{name} ({kind}): {folder(tmp_path, name).resolve()}" in out
        assert json.loads((folder(tmp_path, name) / "summary.json").read_text())["source"] == kind
        assert (folder(tmp_path, name) / f"{name}.png").stat().st_size > 1000
    assert f"one page of all: python -m experiments.report {folder(tmp_path, 'pair').resolve()}" in out
    assert report([str(folder(tmp_path, "pair"))]) == 0
    html = (folder(tmp_path, "pair") / "report.html").read_text()
    first, second = html.split('<h1 class="part">measured apples</h1>')
    assert "Every number of this part is simulated. 4 points, 0 failed." in first and "measured" not in first
    assert "Every number of this part is measured. 4 points, 0 failed." in second and "simulated." not in second
    assert first.count("data:image/svg+xml") == second.count("data:image/svg+xml") == 1
    assert report([str(folder(tmp_path, "pair_here"))]) == 0  # and it has a page of its own
    assert "Every number on this page is measured." in (folder(tmp_path, "pair_here") / "report.html").read_text()


@pytest.mark.parametrize("override", ["settings.x=2,4", "policy=gpu_only", "repeats=2", "hardware=a10"])
def test_it_is_left_out_and_said_so_when_the_command_line_says_what_to_sweep(tmp_path, run, capsys, override):
    assert run(override) == 0
    out = capsys.readouterr().out
    assert f"pair_here: left out, as the command line says what to sweep ({override}); add also=[pair_here]" in out
    assert not (tmp_path / "results" / "pair_here").exists()


def test_it_can_be_asked_for_all_the_same_and_then_runs_as_in_its_file(tmp_path, run):
    assert run("settings.x=2", "policy=gpu_only", "also=[pair_here]") == 0
    assert len(rows(tmp_path, "pair")) == 1 and len(rows(tmp_path, "pair_here")) == 4


def test_it_can_be_left_out_without_a_word(tmp_path, run, capsys):
    assert run("also=[]") == 0
    assert "pair_here" not in capsys.readouterr().out and not (tmp_path / "results" / "pair_here").exists()


def test_how_to_run_is_shared_and_the_launcher_is_not(tmp_path, run):
    assert run("+debug=quick", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1") == 0
    assert {r["launcher"] for r in rows(tmp_path, "pair")} == {"joblib"}
    assert {r["launcher"] for r in rows(tmp_path, "pair_here")} == {"basic"}  # measured points disturb each other
    assert len(rows(tmp_path, "pair_here")) == 2  # repeats: 1 of debug=quick


def test_the_worst_exit_code_counts_and_a_failed_point_stops_nothing(tmp_path, run):
    text = (tmp_path / "experiment" / "pair.yaml").read_text()
    (tmp_path / "experiment" / "pair.yaml").write_text(text.replace("settings.x: 2,4", "settings.x: 0,4"))
    assert run() == 1
    assert [r["status"] for r in rows(tmp_path, "pair")].count("failed") == 2 and len(rows(tmp_path, "pair_here")) == 4
    assert run("fail_fast=true") == 1
    assert len(list((tmp_path / "results" / "pair_here").glob("2*"))) == 1  # not begun again


def test_resume_goes_on_with_the_companion_that_this_sweep_began_and_with_no_other(tmp_path, run, capsys):
    assert run() == 0
    before = folder(tmp_path, "pair_here").resolve()
    stop = tmp_path / "stop"
    text = (tmp_path / "experiment" / "pair_here.yaml").read_text()
    stopped = text.replace("kind: measured", f"kind: measured, stop_file: {stop}")
    (tmp_path / "experiment" / "pair_here.yaml").write_text(stopped)
    stop.touch()
    assert run() == 130
    assert len(rows(tmp_path, "pair")) == 4 and rows(tmp_path, "pair_here") == []
    begun = folder(tmp_path, "pair_here").resolve()
    assert begun != before
    stop.unlink()
    assert run("resume=true") == 0
    assert folder(tmp_path, "pair_here").resolve() == begun and len(rows(tmp_path, "pair_here")) == 4
    assert "pair: 0 points, 4 done before" in capsys.readouterr().out
    assert len(list((tmp_path / "results" / "pair_here").glob("2*"))) == 2


def test_a_companion_that_was_never_begun_begins_at_resume(tmp_path, run):
    assert run("also=[]") == 0
    assert run("resume=true") == 0
    assert len(rows(tmp_path, "pair")) == 4 and len(rows(tmp_path, "pair_here")) == 4


@pytest.mark.parametrize(
    ("also", "says"),
    [
        ("[pair]", "experiment pair names itself under also"),
        ("[nonsense]", "Could not find 'experiment/nonsense'"),
        ("[pair_here],[]", "also takes one value"),
    ],
)
def test_a_companion_that_cannot_be_is_refused_before_anything_runs(tmp_path, run, capsys, also, says):
    assert run(f"also={also}") == 2
    assert says in capsys.readouterr().err and not (tmp_path / "results").exists()


@pytest.mark.parametrize("name", ["ratio", "capacity", "cpu_cores", "control_path", "sessions"])
def test_the_shipped_experiments_are_measured_as_well(name):
    first = OmegaConf.load(CONFIGS / "experiment" / f"{name}.yaml")
    assert f"{name}_host" in first.also
    for other in first.also:
        file = OmegaConf.load(CONFIGS / "experiment" / f"{other}.yaml")
        assert file.name == other
        if other.endswith("_host"):  # measured: an interval needs three repeats, and what it inherits is not run again
            assert file.repeats >= 3 and not file.get("also")
