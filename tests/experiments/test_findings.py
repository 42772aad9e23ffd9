"""What a sweep prints at its end: crossovers, ladders, extremes, verdicts and failures, on points that are made up."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

import hybridattn
from experiments.findings import busy_lines, enough, failures, panel_lines
from experiments.finish import print_outcomes
from experiments.run import main
from hybridattn.analysis.crossing import Crossing
from hybridattn.analysis.series import Question, Series, panels_of
from hybridattn.core.errors import InputError

POINTS = """
from dataclasses import dataclass
from experiments.settings import experiment

@dataclass
class Settings:
    x: int = 1
    kind: str = "simulated"

@experiment(Settings)
def point(app, settings):
    if settings.x < 0:
        raise ValueError("x is negative" if settings.x > -10 else f"x is {settings.x}")
    gain = {"gpu_only": 1.0, "async_overlap": settings.x / 6, "sync_offload": 0.5}[app.policy.label]
    return {"kind": settings.kind, "device": "sim", "profile": "none", "y": 10 * gain, "z": settings.x}
"""
VERDICT = """
def verdict(rows):
    return [f"{len(rows)} rows, the mean of y is {sum(r['y'] for r in rows) / len(rows):g}"]

def broken(rows):
    return 1 / 0

def no_list(rows):
    return "one line"

nothing = 3
"""
ASK = ["analysis.x=x", "analysis.y=y", "analysis.baseline=gpu_only", "analysis.candidate=async_overlap"]
SWEEP = ["policy=gpu_only,async_overlap,sync_offload", "+settings.x=4,8"]


@pytest.fixture
def run(tmp_path, monkeypatch, request):
    """Runs the app on the points above; ``request.param`` is more code of their module."""
    name = f"points_of_{tmp_path.name}"  # a module of its own: others stay imported
    (tmp_path / f"{name}.py").write_text(POINTS + getattr(request, "param", ""))
    (tmp_path / "elsewhere.py").write_text(VERDICT)
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda *more: main(["-m", "name=made", f"point={name}:point", f"results_root={tmp_path}/results", *more])


def table(out):
    """The cells of the table at the end."""
    rows = [[c.strip() for c in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    head = next(line for line in out.splitlines() if line.startswith("┃"))
    names = [c.strip() for c in head.strip("┃").split("┃")]
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_it_ends_with_a_table_of_gain_and_price_and_where_it_pays(tmp_path, run, capsys):
    assert run(*SWEEP, *ASK, "analysis.unit=apples") == 0
    out = capsys.readouterr().out
    assert "made found (simulated):" in out
    [row] = table(out)
    assert row == {"best": "async_overlap", "at": "8", "gain": "1.33x", "TPOT GPU rows": "-", "TPOT CPU rows": "-",
                   "pays from": "6 (4 to 8)"}  # fmt: skip
    said = json.loads((tmp_path / "results/made/latest/crossovers.json").read_text())[""]
    assert said["async_overlap"]["says"] == "pays from 6 apples on (4 to 8, grid points around it)"
    assert said["sync_offload"]["says"] == "no crossover in range: it pays nowhere"
    notebook = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb", "COLUMNS": "20"})
    print_outcomes(hybridattn.open_results(tmp_path / "results/made/latest"), notebook)
    assert table(notebook.file.getvalue()) == [row]  # a notebook is a terminal of few columns: nothing is folded


def test_the_candidate_is_told_of_where_another_policy_is_best(run, capsys):
    assert run(*SWEEP, *ASK, "analysis.candidate=sync_offload", "analysis.unit=apples") == 0
    assert "sync_offload over gpu_only: no crossover in range: it pays nowhere" in capsys.readouterr().out


def test_a_sweep_with_points_to_come_says_how_many_and_concludes_nothing(tmp_path, run, capsys):
    words = ["policy=gpu_only,sync_offload", "+settings.x=4,8,-1", *ASK, "analysis.candidate=sync_offload"]
    assert run(*words) == 1
    out = capsys.readouterr().out
    assert "made found (simulated, 4 of 6 points):" in out and "no crossover among the points that ran so far" in out
    assert "nowhere" not in out


def test_each_panel_is_named(run, capsys):
    assert (
        run("policy=gpu_only,async_overlap", "+settings.x=2,8", "hardware=t4,a10", *ASK, "analysis.panels=[hardware]")
        == 0
    )
    out = capsys.readouterr().out
    assert [(row["setting"], row["pays from"]) for row in table(out)] == [("T4", "6 (2 to 8)"), ("A10", "6 (2 to 8)")]


def test_a_sweep_without_its_baseline_says_so(run, capsys):
    assert run("policy=async_overlap", "+settings.x=2,8", *ASK) == 0
    assert "no crossover can be told: gpu_only, the baseline, is not in this sweep" in capsys.readouterr().out


def test_a_baseline_alone_says_so(run, capsys):
    assert run("policy=gpu_only", "+settings.x=2,8", *ASK) == 0
    assert "there is nothing beside gpu_only to compare it with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lower", "best"), [("false", ("async_overlap", "8", "13.33")), ("true", ("sync_offload", "4", "5"))]
)
def test_without_a_baseline_the_best_value_is_told(run, capsys, lower, best):
    ask = ["analysis.x=x", "analysis.y=y", "analysis.relative=false", f"analysis.lower_is_better={lower}"]
    assert run(*SWEEP, *ask) == 0
    [row] = table(capsys.readouterr().out)
    assert (row["best"], row["at"], row["value"]) == best
    assert run(*SWEEP, *ask, "analysis.series=hardware") == 0  # nothing says which of those is best
    assert "async_overlap: T4: y from 6.667 (at 4) to 13.33 (at 8)" in capsys.readouterr().out


@pytest.mark.parametrize("run", [VERDICT], indirect=True)
def test_a_verdict_beside_the_point_is_printed_and_kept(tmp_path, run, capsys):
    assert run("policy=gpu_only,async_overlap", "+settings.x=3,6,-1") == 1
    out = capsys.readouterr().out
    assert "4 rows, the mean of y is 8.75" in out  # the failed points are not given to it
    assert json.loads((tmp_path / "results/made/latest/verdict.json").read_text()) == ["4 rows, the mean of y is 8.75"]


def test_a_verdict_may_be_named_from_anywhere(run, capsys):
    assert run("policy=gpu_only", "+settings.x=3", "verdict=elsewhere:verdict") == 0
    assert "made found (simulated):\n  1 rows, the mean of y is 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"),
    [("broken", "the verdict elsewhere:broken failed (ZeroDivisionError: division by zero)"),
     ("no_list", "the verdict elsewhere:no_list must return a list of strings, got 'one line'")],
)  # fmt: skip
def test_a_verdict_that_fails_costs_no_row_and_no_figure(tmp_path, run, capsys, name, says):
    assert run(*SWEEP, *ASK, f"verdict=elsewhere:{name}") == 1
    out = capsys.readouterr().out
    assert says in out and "6 points ran, 0 failed; results: " in out and "6 (4 to 8)" in out
    assert (tmp_path / "results/made/latest/made.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("override", "says"),
    [("verdict=elsewhere:nowhere", "verdict 'elsewhere:nowhere' cannot be imported"),
     ("verdict=elsewhere:nothing", "verdict of experiment made is no function but a int"),
     ("point=../x", "point '../x' is no import path: write package.module:function"),
     ("point=..x:run", "point '..x:run' is no import path"),
     ("point=nowhere.at_all:run", "point 'nowhere.at_all:run' cannot be imported"),
     ("point=elsewhere", "point 'elsewhere' is no import path"),
     ("point=elsewhere:verdict", "point 'elsewhere:verdict' is not marked with @experiment")],
)  # fmt: skip
def test_a_name_that_leads_nowhere_is_one_sentence_before_anything_runs(tmp_path, run, capsys, override, says):
    assert run("policy=gpu_only", override) == 2
    err = capsys.readouterr().err
    assert says in err and err.startswith("experiments.run: ") and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "results").exists()


def test_failures_of_one_message_are_printed_once_with_their_count(run, capsys):
    assert run("policy=gpu_only", "+settings.x=1,-1,-2,-3,-4,-5,-10") == 1
    out = [line for line in capsys.readouterr().out.splitlines() if line.startswith("failed: ")]
    assert out == [
        "failed: 5 points (+settings.x=-1 | +settings.x=-2 | +settings.x=-3 | and 2 more): ValueError: x is negative",
        "failed: +settings.x=-10: ValueError: x is -10",
    ]


def test_failures_of_up_to_three_points_name_them_all():
    rows = [{"status": "failed", "error": "E: e", "point_id": p} for p in ("a", "b", "c")]
    assert failures([*rows, {"status": "ok", "point_id": "d"}]) == [("3 points (a | b | c)", "E: e")]


LADDER = Question("cores", "y", unit="cores", relative=False)


def series(**means):
    return Series("s", {float(x[1:]): (float(y),) for x, y in means.items()})


@pytest.mark.parametrize(
    ("means", "lower", "says"),
    [
        ({"_4": 100, "_8": 140, "_16": 146, "_32": 148}, False, "8 cores are enough"),
        ({"_4": 100, "_8": 101, "_16": 130, "_32": 131}, False, "16 cores are enough"),  # not 4: a later step pays
        ({"_4": 100, "_8": 100, "_16": 90}, False, "4 cores are enough"),
        (
            {"_4": 100, "_8": 140, "_16": 200},
            False,
            "more than 16 cores may still help (the last doubling still brings 43% of y)",
        ),
        ({"_4": 100, "_16": 109}, False, "4 cores are enough"),  # two doublings for 9 %: 4.4 % each
        ({"_4": 100, "_16": 111}, False, "more than 16 cores may still help"),  # 5.4 % each
        ({"_4": 90, "_8": 60, "_16": 59}, True, "8 cores are enough"),
        ({"_4": 90}, False, "y at 4 cores alone: a single point is no ladder"),
    ],
)
def test_enough_is_where_no_later_doubling_brings_five_percent(means, lower, says):
    assert says in enough(series(**means), LADDER, lower)


def test_a_ladder_from_zero_is_refused():
    with pytest.raises(InputError, match="a ladder of cores cannot begin at 0"):
        enough(series(_0=1, _4=2), LADDER)


def test_a_ladder_and_a_crossover_are_both_told():
    rows = [{"policy": p, "cores": c, "y": y, "kind": "simulated"} for p, ys in {"a": (1, 1), "b": (0.5, 2)}.items()
            for c, y in zip((4, 8), ys, strict=True)]  # fmt: skip
    question = Question("cores", "y", baseline="a", candidate="b", unit="cores")
    [panel] = panels_of(rows, question)
    ladder = type("Ladder", (), {"enough": True, "lower_is_better": False})
    lines = panel_lines(panel, question, {"b": Crossing("never")}, ladder)
    assert [line.split(":")[0] for line in lines] == ["a", "b"]  # the table tells of b, which is best


def test_further_columns_get_figures_of_their_own(tmp_path, run, capsys):
    more = "analysis.more=[{y:z,y_label:zeds,enough:true}]"
    assert run(*SWEEP, *ASK, "analysis.unit=apples", more) == 0
    folder = tmp_path / "results/made/latest"
    assert (folder / "made_z.png").stat().st_size > 1000 and (folder / "made_z.svg").is_file()
    assert "gpu_only: more than 8 apples may still help" in capsys.readouterr().out


def test_rows_of_a_busy_machine_are_counted():
    rows = [{"others_cpu_fraction": share} for share in (0.02, None, 0.4, 0.2)]
    [line] = busy_lines(rows)
    assert "beside 2 of 3 points other work used 15% or more of the cpus, 40% at most" in line
    assert busy_lines(rows[:2]) == []
