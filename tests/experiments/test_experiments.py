"""Every experiment file is run, shrunk; every file of every group can be composed and built."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from experiments.build import cost_of, policy_of, pricing_of
from experiments.composed import app_of
from experiments.points import decode
from experiments.points.overlap import OverlapSettings
from experiments.points.serve import ServeSettings
from experiments.run import main
from experiments.schema import App, Device
from hybridattn.core.errors import InputError
from hybridattn.cost.costs import Costs
from hybridattn.policies.base import Policy

CONFIGS = Path(__file__).parents[2] / "configs"
FEW = "policy=gpu_only,async_overlap"
SHRUNK = {
    "ratio": ["hardware=t4", FEW, "settings.ratio=8,16", "settings.exposed_fraction=0.25"],
    "ratio_host": ["repeats=1", "policy=gpu_only,sync_offload", "settings.ratio=1", "settings.output_tokens=3"],
    "policies_host": ["repeats=1", "settings.case=steady-64-one-each", "policy=gpu_only,sync_offload"],
    "capacity": ["hardware=t4", FEW, "settings.demand=0.5,1,2,4"],
    "rate": ["hardware=a10", "policy=gpu_only,asymmetric", "settings.context=4000", "settings.rate_ratio=4,12"],
    "context_length": ["hardware=a10", FEW, "settings.context=4000,16000"],
    "load": ["policy=gpu_only,async_overlap", "workload.options.arrivals.rate_per_s=0.4,2", "settings.limit=20"],
    "output_length": ["hardware=a10g_16c", FEW, "workload.options.outputs.mean=20,40", "settings.limit=40"],
    "cpu_cores": ["hardware=a10g_4c,a10g_64c", FEW, "settings.context=1000"],
    "control_path": ["hardware=a10g_4c,a10g_64c", "hardware.gpu=h200", "policy=gpu_only", "settings.limit=12"],
    "control_path_host": ["repeats=1", "settings.neighbours=0,1", "settings.prompts=8", "settings.steps=4"],
    "cpu_cores_host": ["repeats=1", "policy=async_overlap", "settings.neighbours=0,1", "settings.output_tokens=2"],
    "sessions": ["hardware=a10", "workload.options.mean_pause_ns=32000000000", "workload.options.count=12"],
    "sessions_host": [
        "repeats=1",
        "settings.context=recompute,move",
        "workload.options.mean_pause_ns=10000000",
        "workload.options.count=2",
        "workload.options.turns=2",
        "workload.options.first_prompt.mean=32",
    ],
    "overlap": ["hardware=a10", "settings.fraction=0,0.1,1"],
    "prefix": ["hardware=a10", "settings.prefix=512,2048", "settings.requests=1,8"],
    "kernels": [
        "settings.dtype=bf16",
        "settings.group=4",
        "settings.tokens=256,1024",
        "settings.total_tokens=2048",
        "settings.rounds=2",
    ],
    "kernel_backends": [
        "settings.backend=native,numba,numba_topk_approx",
        "settings.group=1,4",
        "settings.tokens=256",
        "settings.total_tokens=512",
        "settings.rounds=2",
    ],
    "ratio_cuda": [
        "device=host",
        "policy=gpu_only,sync_offload",
        "settings.ratio=1",
        "settings.gpu_requests=2",
        "settings.prompt_tokens=20",
        "settings.max_model_len=256",
        "settings.window_s=0.05",
    ],
    "split": ["settings.place=t4/llama2-7b/400", "settings.cold=0,2"],
    "long_context": ["settings.place=a10/llama3.1-8b/8192", "settings.room=0.5"],
    "split_host": [
        "repeats=1",
        "model=attention_heavy",
        "settings.context=100",
        "settings.output_tokens=12",
        "settings.requests=2",
        "settings.room=1",
    ],
    "long_context_host": [
        "repeats=1",
        "model=attention_heavy",
        "settings.context=100,130",
        "settings.output_tokens=6",
    ],
    "capacity_host": ["repeats=1", "policy=async_overlap", "settings.demand=0.5,2", "settings.output_tokens=3"],
}
SIMULATED = (
    "eq6", "eight_to_one", "pays_from", "capacity_bound", "offload", "apex", "grid", "split_grid", "neo_fig6c",
    "neo_fig10a", "neo_fig10a_scan", "speed", "flat", "azure",
)  # fmt: skip
ELSEWHERE = {"demo": "test_demo.py", "validate": "test_validate.py"} | dict.fromkeys(SIMULATED, "test_sim_scripts.py")


def composed(*overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", list(overrides))


def names(group):
    return sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))


def test_every_experiment_file_is_run_by_a_test():
    assert set(names("experiment")) == set(SHRUNK) | set(ELSEWHERE)


# Measured; ratio_host and tests of their own run the same points in the default suite.
SLOW = ("long_context_host", "capacity_host", "cpu_cores_host", "control_path_host", "sessions_host")


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory):
    """Runs an experiment shrunk, once; its folder."""

    @functools.cache
    def of(name):
        root = tmp_path_factory.mktemp("shrunk")
        assert main([f"+experiment={name}", f"results_root={root}", *SHRUNK[name]]) == 0
        return root / name / "latest"

    return of


def rows_of(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in sorted(SHRUNK)])
def test_an_experiment_runs_shrunk(shrunk, name):
    folder = shrunk(name)
    rows = rows_of(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert rows and summary["points"] == len(rows) and summary["failed"] == 0
    assert summary["source"] == rows[0]["kind"] and summary["profile"] and summary["commit"]
    for suffix in ("png", "svg"):
        assert (folder / f"{name}.{suffix}").stat().st_size > 1000
    assert len(list((folder / "points").glob("*.yaml"))) == len(rows)
    if name == "policies_host":  # which ends in the middle
        assert all((r["kind"], r["device"], r["failed"]) == ("measured", "host", 0) for r in rows)
        assert [r["prompt_tokens_read"] for r in rows] == [1, 2]  # of prompts of 64: one request waits for the GPU
    elif name.endswith("_host") and name != "control_path_host":
        assert all((r["kind"], r["device"], r["completed"]) == ("measured", "host", r["requests"]) for r in rows)


@pytest.mark.parametrize("name", [n for n in names("experiment") if n not in ELSEWHERE])
def test_an_experiment_file_says_how_to_run_it(name):
    lines = (CONFIGS / "experiment" / f"{name}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert any(f"python -m experiments.run +experiment={name}" in line for line in lines[1:6])


@pytest.mark.parametrize(("name", "value"), [("context", 100), ("exposed_fraction", 0.25), ("rate_ratio", 2)])
def test_what_acts_in_simulations_alone_is_refused_where_it_is_measured(name, value):
    with pytest.raises(InputError, match=f"settings.{name}={value} acts in simulations alone; on host prompt_tokens"):
        decode.point(App(device=Device(name="host")), decode.DecodeSettings(ratio=1, **{name: value}))


def test_the_simulated_ratio_finds_the_crossover_of_the_closed_form(tmp_path):
    """d (L + 1) = 0.25 * 33 on a machine whose CPU keeps up."""
    main(["+experiment=ratio", f"results_root={tmp_path}", *SHRUNK["ratio"], "settings.ratio=4,8,9,16"])
    summary = json.loads((tmp_path / "ratio" / "latest" / "summary.json").read_text())
    found = summary["crossover"]
    assert found["value"] == pytest.approx(8.25, rel=0.05) and found["low"] <= found["value"] <= found["high"]
    assert summary["source"] == "simulated" and "t4" in summary["profile"]


def test_asymmetric_pipelining_pays_from_the_rate_of_eq6_on(shrunk):
    """x = 1.5 on an A10 at 4,000 tokens: between N_C / N_G = 1/12 and 1/4 (closed form: 1/6)."""
    folder = shrunk("rate")
    at = {(r["policy"], r["rate_ratio"]): r["tokens_per_s"] for r in rows_of(folder)}
    assert at["asymmetric", 4] > at["gpu_only", 4] and at["asymmetric", 12] <= 1.001 * at["gpu_only", 12]
    found = json.loads((folder / "summary.json").read_text())["crossover"]
    assert 1 / 12 <= found["low"] <= found["value"] <= found["high"] <= 1 / 4 and found["unit"] == "N_C / N_G"


def test_a_session_finds_its_context_again_wherever_it_rested(tmp_path):
    """Five turns of 4,000 tokens and more: nine of them fill an A10, so twelve that stay on it drive each other out."""
    longer = "workload.options.mean_pause_ns=8000000000"
    main(["+experiment=sessions", f"results_root={tmp_path}", *SHRUNK["sessions"], longer])
    rows = [json.loads(line) for line in (tmp_path / "sessions/latest/rows.jsonl").read_text().splitlines()]
    by = {r["context"]: r for r in rows}
    assert (by["recompute"]["reused_tokens"], by["move"]["reused_fraction"]) == (0, pytest.approx(1, abs=0.01))
    assert by["move"]["ttft_next_turn_mean_ns"] < 0.8 * by["recompute"]["ttft_next_turn_mean_ns"]
    assert by["move"]["evicted_contexts"] == 0 <= by["keep"]["evicted_contexts"]
    assert len({r["history_tokens"] for r in rows}) == 1 and all(r["later_turns"] == 48 for r in rows)


def test_on_host_contexts_really_move(tmp_path, capsys):
    main(["+experiment=sessions_host", f"results_root={tmp_path}", *SHRUNK["sessions_host"]])
    rows = [json.loads(line) for line in (tmp_path / "sessions_host/latest/rows.jsonl").read_text().splitlines()]
    dropped, moved = rows
    assert (dropped["context"], dropped["reused_tokens"]) == ("recompute", 0)
    assert (dropped["moves_down"], dropped["moves_up"], dropped["moved_bytes"]) == (0, 0, 0)
    assert (moved["moves_down"], moved["moves_up"]) == (2, 2) and moved["moving_ns"] > 0
    assert moved["moved_bytes"] == 2 * moved["reused_tokens"] * 2 * 3 * 64 * 4 * 30  # down and up; K, V of 30 layers
    assert "where K,V are dropped; moved to the CPU tier and back" in capsys.readouterr().out


def test_a_common_prefix_is_read_once_and_one_request_alone_gains_nothing(shrunk):
    by = {(r["prefix"], r["requests"], r["sharing"]): r for r in rows_of(shrunk("prefix"))}
    shared, alone = (by[2048, 8, name] for name in ("shared", "each for itself"))
    assert (alone["read_tokens"], shared["read_tokens"]) == (8 * (2048 + 64), 2048 + 8 * 64)
    assert shared["reused_tokens"] == 7 * 2048 and shared["ttft_mean_ns"] < 0.5 * alone["ttft_mean_ns"]
    one = by[2048, 1, "shared"]["output_tokens_per_s"], by[2048, 1, "each for itself"]["output_tokens_per_s"]
    assert one[0] == one[1]


def test_a_layer_shared_with_the_cpu_hides_little_work_and_exposes_all_of_it(shrunk):
    by = {r["fraction"]: r for r in rows_of(shrunk("overlap"))}
    assert by[0]["hidden_fraction"] is None and by[0]["exposed_ns"] == 0
    assert 0 <= by[1]["hidden_fraction"] < 0.1 < by[0.1]["hidden_fraction"] <= 1
    assert by[1]["layer_ns"] > by[0]["layer_ns"]


@pytest.mark.parametrize("name", [n for n in names("policy")])
def test_every_policy_file_makes_its_policy(name):
    app = app_of(composed(f"policy={name}"))
    policy = policy_of(app, Costs(cost_of(app), pricing_of(app)))
    assert isinstance(policy, Policy) and app.policy.label == name


@pytest.mark.parametrize("name", [n for n in names("hardware") if n != "here"])
def test_every_hardware_file_prices_a_model(name):
    app = app_of(composed(f"hardware={name}"))
    assert Costs(cost_of(app), pricing_of(app)).step_ns(1, 100) > 0


@pytest.mark.parametrize("group", ["model", "workload", "device", "tracker", "paths", "debug"])
def test_every_file_of_a_group_composes(group):
    for name in names(group):
        app_of(composed(f"+debug={name}" if group == "debug" else f"{group}={name}"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ServeSettings(page_size=0), "settings.page_size must be one of 16, 32, 64, 128, got 0"),
        (lambda: OverlapSettings(rows=0), "settings.rows and settings.context must be at least 1, got 0 and 1000"),
    ],
)
def test_settings_of_nothing_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
