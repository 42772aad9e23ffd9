"""The simulated experiments, shrunk: each runs by its own file, prints its table, and its verdict judges."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments.keep import main as keep
from experiments.machines import Place, priced
from experiments.points.apex import verdict as apex_verdict
from experiments.points.grid import CPU_GB_S, PLACES, RATIOS, goals
from experiments.points.speed import LAYOUTS
from experiments.run import main
from experiments.wording import respelt
from hybridattn.core.errors import InputError
from hybridattn.cost.machine import machine

CONFIGS = Path(__file__).parents[2] / "configs" / "experiment"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n2023-11-16 18:15:50.99,396,9\n"
SHRUNK = {
    "eq6": ["settings.x=1,2", "settings.num_layers=16", "settings.gpu_rows=60"],
    "eight_to_one": ["settings.place=ideal,a10/llama3.1-8b/1000", "settings.exposed_us=null"],
    "pays_from": ["settings.place=a10/llama3.1-8b/4000", "settings.cpu_gb_s=150"],
    "capacity_bound": ["settings.place=ideal/1/3,t4/llama2-7b/400/4"],
    "offload": ["settings.cpu_gb_s=15", "settings.output=200,400"],
    "apex": ["settings.place=t4/llama2-7b/800/25", "settings.output=null", "settings.ratio=1,8"],
    "grid": ["settings.place=t4/llama2-7b/800", "settings.cpu_gb_s=400", "settings.ratio=1,4"],
    "split_grid": ["settings.place=t4/llama2-7b/800", "settings.cpu_gb_s=100", "settings.ratio=1"],
    "neo_fig6c": ["settings.rate_per_s=0.4,0.6", "settings.requests=60"],
    "neo_fig10a": ["settings.box=g5.2xlarge,g5.16xlarge/524288", "settings.requests=40"],
    "neo_fig10a_scan": ["settings.box=g5.16xlarge", "settings.cpu_gb_s=50,100", "settings.requests=40"],
    "speed": ["settings.steps=3", "settings.runs=1"],
    "flat": ["settings.requests=3000"],
    "azure": [],
}
SAYS = {
    "eq6": r"ideal model: largest error \d+\.\d% \(goal: within 5 %\)",
    "eight_to_one": r"crossover against d L / a, 2 settings: largest error [23]\.\d% \(goal: 10 %\)",
    "pays_from": "adaptive pays later than another policy in: no cell",
    "capacity_bound": "above the bound: none",
    "offload": "below 0.6: 15 GB/s at output 200; 15 GB/s at output 400",
    "apex": "above the upper bound of any overlap: none",
    "grid": r"limits kept in 2 of 2 \(100%\)",
    "split_grid": r"limits for every row: more than 1.05 times the best without them in 1 of 1",
    "neo_fig6c": "published about 3.48",
    "neo_fig10a": "at most 524,288 tokens of host K,V:",
    "neo_fig10a_scan": "g5.16xlarge with 983,040 tokens of host K,V:",
    "speed": "layer-steps/s: ",
    "flat": r"largest growth over the last nine tenths: \d",
    "azure": "gpu_only: 2 requests served, 0 refused",
}


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory):
    """Runs an experiment shrunk, once; its folder."""
    done: dict[str, Path] = {}

    def of(name):
        if name not in done:
            root = tmp_path_factory.mktemp("shrunk")
            (root / "trace.csv").write_text(AZURE)
            more = [f"workload.options.path={root}/trace.csv"] if name == "azure" else []
            assert main([f"+experiment={name}", f"results_root={root}", *SHRUNK[name], *more]) == 0
            done[name] = root / name / "latest"
        return done[name]

    return of


def rows_of(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", SHRUNK)
def test_a_simulated_experiment_writes_rows_and_prints_its_table(shrunk, name):
    folder = shrunk(name)
    rows, lines = rows_of(folder), json.loads((folder / "verdict.json").read_text())
    assert rows and all(r["status"] == "ok" and r["error"] is None and r["device"] == "sim" for r in rows)
    assert {r["kind"] for r in rows} == {"measured" if name in ("speed", "flat") else "simulated"}
    assert all(r["profile"] and r["commit"] for r in rows)
    assert any(line.startswith("|---") for line in lines)
    assert any(re.search(SAYS[name], line) for line in lines), lines
    assert "asked" not in " ".join(lines)


def test_what_an_experiment_printed_is_kept_with_its_origin(shrunk, tmp_path, capsys):
    assert keep([str(shrunk("capacity_bound")), str(tmp_path)]) == 0
    text = (tmp_path / "capacity_bound.md").read_text()
    head = f"    python -m experiments.run +experiment=capacity_bound {SHRUNK['capacity_bound'][0]}\n"
    assert head in text and "commit " in text and "ideal, t4+xeon-8259cl-8c+pcie3-x16" in text
    assert "| t4 llama2-7b |" in text and "```\nabove the bound: none" in text and str(tmp_path) not in text
    assert keep([str(tmp_path)]) == 2 and "is no result folder" in capsys.readouterr().err


def test_every_kept_page_is_linked_and_names_its_command_and_commit():
    docs = CONFIGS.parents[1] / "docs"
    pages = {p.stem: p.read_text() for p in (docs / "results").glob("*.md")}
    linked = set(re.findall(r"\(results/(\w+)\.md\)", (docs / "crossover.md").read_text()))
    assert linked == set(pages)
    for name, text in pages.items():
        if name != "closed_forms":
            assert f"\n    python -m experiments.run +experiment={name}\n" in text and "commit " in text, name


def test_a_sweep_that_is_not_complete_is_not_kept(shrunk, tmp_path, capsys):
    folder = tmp_path / "cut"
    folder.mkdir()
    for name in ("rows.jsonl", "sweep.json", "verdict.json"):
        (folder / name).write_bytes((shrunk("capacity_bound") / name).read_bytes())
    (folder / "rows.jsonl").write_text((folder / "rows.jsonl").read_text().splitlines()[0] + "\n")
    assert keep([str(folder), str(tmp_path)]) == 2
    assert "is incomplete: 1 of 2 points ran" in capsys.readouterr().err


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_speed_of_the_simulator_is_counted_for_every_layout(shrunk, layout):
    by = {r["layout"]: r for r in rows_of(shrunk("speed"))}
    assert by[layout]["policy"] == str(LAYOUTS[layout]) and by[layout]["layer_steps_per_s"] > 0


def test_every_request_of_a_long_run_ends_and_memory_stays_flat(shrunk):
    for row in rows_of(shrunk("flat")):
        assert row["ended"] == 3000 and row["late_mib"] - row["early_mib"] < 8


def test_the_published_ranges_are_sanity_bounds(shrunk):
    (one,) = [r for r in rows_of(shrunk("apex")) if r["ratio"] == 1]
    assert one["apex_gain"] == max(one["asymmetric_gain"], one["overlap_gain"]) < one["bound"]
    assert one["adaptive_gain"] > 0.97 * one["apex_gain"]
    row = {**one, "apex_gain": 1.9, "over_asymmetric": 1.2, "adaptive_gain": 2.0, "bound": 2.5, "cell": "a"}
    other = {**row, "hardware": "a10", "apex_gain": 1.05, "cell": "b"}
    t4, a10, above = apex_verdict([row, other])[-3:]
    assert "the ranges meet" in t4 and "do not meet" in a10 and above.endswith("none")
    assert apex_verdict([{**row, "adaptive_gain": 2.6}, other])[-1].endswith("a")


def test_every_second_cell_of_the_grid_has_prompts(shrunk):
    by = {r["ratio"]: r for r in rows_of(shrunk("grid"))}
    assert (by[1]["output"], by[4]["output"]) == (200, None)  # the second place, the third bandwidth: an odd cell first
    assert [by[n]["cell"] for n in (1, 4)] == [
        "t4 llama2-7b ctx 800 out 200 400 GB/s 1:1", "t4 llama2-7b ctx 800 out - 400 GB/s 4:1"
    ]  # fmt: skip
    worse = {**by[1], "adaptive_gain": 0.5 * by[1]["best_fixed_gain"]}
    assert "at least 0.500 (goal: 0.99); below 0.99 in 1 of 1" in goals([worse])[0]


def test_a_cell_that_is_not_on_the_board_has_to_say_its_output(tmp_path):
    cell = ["settings.place=a10/llama3.1-8b/3000", "settings.cpu_gb_s=80", "settings.ratio=2"]
    assert main(["+experiment=grid", f"results_root={tmp_path}", *cell]) == 1
    (row,) = rows_of(tmp_path / "grid" / "latest")
    assert "a10/llama3.1-8b/3000 at 80.0 GB/s and 2:1 is no cell of the grid" in row["error"]


def test_the_grid_sweeps_all_its_cells():
    text = "".join((CONFIGS / "grid.yaml").read_text().replace("\\", "").split())
    for values in (PLACES, CPU_GB_S, RATIOS):
        assert ",".join(v if isinstance(v, str) else f"{v:g}" for v in values) in text


def test_a_trace_that_is_not_there_is_named(tmp_path):
    assert main(["+experiment=azure", f"results_root={tmp_path}"]) == 1
    (row,) = rows_of(tmp_path / "azure" / "latest")
    assert "data/AzureLLMInferenceTrace_conv.csv" in row["error"]


def test_a_place_is_a_hardware_file_a_model_and_a_context():
    place = Place.parse("a10/llama3.1-8b/1000")
    assert place.costs() == priced("llama3.1-8b", machine("a10", "epyc-7r32-16c", "pcie4-x16"))
    assert Place.parse("a10/llama3.1-8b/1000/30").more == 30 and str(place) == "a10 llama3.1-8b ctx 1000"
    assert Place.parse("A100-80G/Llama-3.1-8B/1000") == Place.parse("a100/llama31-8b/1000")
    with pytest.raises(InputError, match="must read hardware/model/context, got 'a10/llama3.1-8b'"):
        Place.parse("a10/llama3.1-8b")
    with pytest.raises(InputError, match="names the hardware 'b10'; known are a10,"):
        Place.parse("b10/llama3.1-8b/1000").costs()
    with pytest.raises(InputError, match="two requests do not fit into the 1,761 tokens of KV on the GPU"):
        Place.parse("t4/llama2-7b/900").gpu_rows(1.0, 40)


def test_models_and_cards_may_be_spelt_as_elsewhere():
    assert respelt("model=llama3.1-8b,Llama-2-7B") == "model=llama31-8b,llama2-7b"
    assert respelt("model=smollm2-135m") == "model=smollm2"
    assert respelt("hardware=a100-80g,A10G,a10g_4c,T4") == "hardware=a100,a10g_16c,a10g_4c,t4"
    for word in ("model=gpt-5", "hardware=here", "settings.context=400", "hardware.gpu=h200", "-m"):
        assert respelt(word) == word
