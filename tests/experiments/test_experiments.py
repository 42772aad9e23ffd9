"""Every experiment file is run, shrunk; every file of every group can be composed and built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.build import cost_of, policy_of, pricing_of
from experiments.compose import app_of, configs
from experiments.run import main
from hybridattn.cost.costs import Costs
from hybridattn.policies.base import Policy

CONFIGS = Path(__file__).parents[2] / "configs"
FEW = "policy=gpu_only,async_overlap"
SHRUNK = {
    "ratio": ["hardware=t4", FEW, "settings.ratio=8,16", "settings.exposed_fraction=0.25"],
    "ratio_host": ["repeats=1", "policy=gpu_only,sync_offload", "settings.ratio=1", "settings.output_tokens=3"],
    "capacity": ["hardware=t4", FEW, "settings.demand=0.5,1,2,4"],
    "capacity_host": ["repeats=1", "policy=async_overlap", "settings.demand=0.5,2", "settings.output_tokens=3"],
}
ELSEWHERE = {"demo": "test_demo.py"}


def names(group):
    return sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))


def test_every_experiment_file_is_run_by_a_test():
    assert set(names("experiment")) == set(SHRUNK) | set(ELSEWHERE)


@pytest.mark.parametrize("name", sorted(SHRUNK))
def test_an_experiment_runs_shrunk(tmp_path, name):
    assert main([f"+experiment={name}", f"results_root={tmp_path}", *SHRUNK[name]]) == 0
    folder = tmp_path / name / "latest"
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    assert rows and summary["points"] == len(rows) and summary["failed"] == 0
    assert summary["source"] == rows[0]["kind"] and summary["profile"] and summary["commit"]
    for suffix in ("png", "svg"):
        assert (folder / f"{name}.{suffix}").stat().st_size > 1000
    assert len(list((folder / "points").glob("*.yaml"))) == len(rows)


@pytest.mark.parametrize("name", [n for n in names("experiment") if n not in ELSEWHERE])
def test_an_experiment_file_says_how_to_run_it(name):
    lines = (CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert any(f"python -m experiments.run +experiment={name}" in line for line in lines[1:6])


def test_the_simulated_ratio_finds_the_crossover_of_the_closed_form(tmp_path):
    """d (L + 1) = 0.25 * 33 on a machine whose CPU keeps up."""
    main(["+experiment=ratio", f"results_root={tmp_path}", *SHRUNK["ratio"], "settings.ratio=4,8,9,16"])
    summary = json.loads((tmp_path / "ratio" / "latest" / "summary.json").read_text())
    found = summary["crossover"]
    assert found["value"] == pytest.approx(8.25, rel=0.05) and found["low"] <= found["value"] <= found["high"]
    assert summary["source"] == "simulated" and "t4" in summary["profile"]


def test_a_measured_sweep_says_so(tmp_path):
    main(["+experiment=capacity_host", f"results_root={tmp_path}", *SHRUNK["capacity_host"], "settings.demand=0.5"])
    [row] = [json.loads(line) for line in (tmp_path / "capacity_host/latest/rows.jsonl").read_text().splitlines()]
    assert (row["kind"], row["device"], row["completed"], row["requests"]) == ("measured", "host", 2, 2)


@pytest.mark.parametrize("name", [n for n in names("policy")])
def test_every_policy_file_makes_its_policy(name):
    with configs() as composer:
        app = app_of(composer.compose([f"policy={name}"]))
    policy = policy_of(app, Costs(cost_of(app), pricing_of(app)))
    assert isinstance(policy, Policy) and app.policy.label == name


@pytest.mark.parametrize("name", [n for n in names("hardware") if n != "here"])
def test_every_hardware_file_prices_a_model(name):
    with configs() as composer:
        app = app_of(composer.compose([f"hardware={name}"]))
    assert Costs(cost_of(app), pricing_of(app)).pass_ns(1, 100) > 0


@pytest.mark.parametrize("group", ["model", "workload", "device", "tracker", "paths", "debug"])
def test_every_file_of_a_group_composes(group):
    with configs() as composer:
        for name in names(group):
            app_of(composer.compose([f"+debug={name}" if group == "debug" else f"{group}={name}"]))
