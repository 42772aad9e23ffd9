from __future__ import annotations

import pytest

from hybridattn.analysis.crossing import crossover, gains
from hybridattn.analysis.figure import _balanced, draw_sweep
from hybridattn.analysis.series import Question, origin_of, panels_of
from hybridattn.analysis.theory import Line
from hybridattn.core.errors import InputError

ASKED = Question("ratio", "rate", panels=("hardware",), baseline="gpu_only", candidate="async_overlap", unit="to one")


def rows(kind="simulated"):
    found = []
    for hardware in ("T4", "A10"):
        for policy, slope in (("gpu_only", 0.0), ("async_overlap", 0.2)):
            for ratio in (1, 2, 4):
                value = 10 + slope * (ratio - 3) * 10
                origin = {"kind": kind, "device": "sim", "profile": f"{hardware}@1", "commit": "abc", "status": "ok"}
                found.append({"hardware": hardware, "policy": policy, "ratio": ratio, "rate": value, **origin})
    return found


def test_rows_become_panels_of_series_with_their_origin():
    panels = panels_of(rows(), ASKED)
    assert [p.label for p in panels] == ["T4", "A10"]
    assert [s.name for s in panels[0].series] == ["gpu_only", "async_overlap"]
    assert str(panels[0].origin) == "simulated with profile T4@1, commit abc"
    found = gains(*panels[0].series)
    assert {x: g.mean for x, g in found.items()} == pytest.approx({1: 0.6, 2: 0.8, 4: 1.2})


def test_failed_rows_and_rows_without_the_value_are_left_out():
    bad = [{**rows()[0], "status": "failed", "rate": 1e9}, {**rows()[0], "rate": None}]
    assert panels_of(bad, ASKED) == []
    assert panels_of([*rows(), *bad], ASKED)[0].series[0].samples[1] == (10,)


def test_simulated_and_measured_rows_share_no_panel():
    mixed = [*rows(), {**rows()[0], "kind": "measured"}]
    assert [p.label for p in panels_of(mixed, ASKED)] == ["simulated, T4", "simulated, A10", "measured, T4"]
    with pytest.raises(InputError, match="simulated and measured cannot share"):
        origin_of(mixed)
    assert origin_of([]).kinds == ()


def test_figures_are_written_with_provenance_theory_and_crossover(tmp_path):
    panels = panels_of(rows(), ASKED)
    found = {p.label: crossover(p.series[0], p.series[1]) for p in panels}
    line = {"T4": [Line("theory", (1.0, 4.0), (0.6, 1.2)), Line("published", (2.0,), (0.9,), published=True)]}
    paths = [tmp_path / "a.png", tmp_path / "a.svg"]
    draw_sweep(panels, ASKED, paths, title="A question", crossings=found, lines=line)
    assert paths[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert paths[1].read_text().lstrip().startswith("<?xml")


def test_a_question_needs_its_columns():
    with pytest.raises(InputError, match="columns for x and y"):
        Question("", "rate")
    with pytest.raises(InputError, match="needs a baseline"):
        Question("ratio", "rate")


def test_many_profiles_are_counted_and_three_are_named():
    few = [{**r, "profile": f"p{i % 3}"} for i, r in enumerate(rows())]
    assert str(origin_of(few)) == "simulated with profile p0, p1, p2, commit abc"
    many = [{**r, "profile": f"p{i}"} for i, r in enumerate(rows())]
    assert str(origin_of(many)) == "simulated with profile p0 to p11 (12 in all), commit abc"


@pytest.mark.parametrize("log_y", [False, True])
def test_times_are_shown_in_milliseconds(tmp_path, log_y):
    timed = [{**r, "rate": r["rate"] * 1e8} for r in rows()]
    asked = Question("ratio", "rate", panels=("hardware",), y_label="latency [ns]", relative=False, log_y=log_y)
    draw_sweep(panels_of(timed, asked), asked, [tmp_path / "a.svg"])
    assert "<!-- latency [ms] -->" in (tmp_path / "a.svg").read_text()  # how matplotlib notes what a glyph path says


def test_a_title_is_broken_into_lines_of_about_equal_length():
    text = "one policy over another: no crossover in range: it pays from the smallest point on, as far as was looked"
    lines = _balanced(text)
    assert " ".join(lines) == text and len(lines) == 2 and abs(len(lines[0]) - len(lines[1])) < 12
    assert _balanced("short") == ["short"] and _balanced("") == []


def swept(word, **columns):
    return [{**r, **columns, "point_id": f"policy={r['policy']} settings.ratio={r['ratio']} {word}"} for r in rows()]


def test_a_swept_key_that_the_question_does_not_name_makes_panels_of_its_own():
    panels = panels_of([*swept("model=a", model="A-7B"), *swept("model=b", model="B-8B")], ASKED)
    assert [p.label for p in panels] == ["T4, A-7B", "A10, A-7B", "T4, B-8B", "A10, B-8B"]
    assert all(len(ys) == 1 for p in panels for s in p.series for ys in s.samples.values())
    again = [*swept("repeat=0 +seed=3", seed=3), *swept("repeat=1 +seed=4", seed=4)]  # draws of one setting
    assert {len(ys) for p in panels_of(again, ASKED) for s in p.series for ys in s.samples.values()} == {2}


def test_a_swept_option_of_a_policy_makes_series_beside_one_baseline():
    mine = [r for wait in (0, 500) for r in swept(f"policy.options.max_wait_us={wait}", max_wait_us=wait)]
    given = [r for r in mine if r["policy"] != "gpu_only"] + [r for r in swept("") if r["policy"] == "gpu_only"]
    [panel, _] = panels_of(given, ASKED)
    assert [s.name for s in panel.series] == [
        "async_overlap, max wait us 0", "async_overlap, max wait us 500", "gpu_only"]  # fmt: skip


def test_keys_that_end_alike_are_told_apart():
    given = [{**r, "mean": 8, "outputs.mean": m} for m in (1, 2)
             for r in swept(f"workload.prompts.mean=8 workload.outputs.mean={m}")]  # fmt: skip
    assert [p.label for p in panels_of(given, ASKED)][::2] == ["T4, outputs.mean 1", "T4, outputs.mean 2"]


def test_the_axis_says_over_the_baseline_only_where_it_is_drawn():
    asked = Question("ratio", "rate", baseline="gpu_only", y_label="throughput [tokens/s]")
    [both], [alone] = (panels_of(r, asked) for r in (rows()[:6], rows()[3:6]))
    assert (asked.shown(both), asked.shown(alone)) == ("throughput / gpu_only", "throughput [tokens/s]")
