"""A folder of results in the hands of somebody who analyses it: without hydra, without experiments."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys

import pytest

import hybridattn
from hybridattn.analysis.outcome import HEAD
from hybridattn.analysis.results import ResultFolder
from hybridattn.core.errors import InputError

QUESTION = {"x": "ratio", "y": "tokens_per_s", "panels": ["hardware"], "baseline": "gpu_only", "candidate": "async"}


def row(policy, ratio, y, **more):
    origin = {"kind": "simulated", "device": "sim", "profile": "p", "commit": "c", "status": "ok", "hardware": "T4"}
    return {"point_id": f"{policy} {ratio}", "policy": policy, "ratio": ratio, "tokens_per_s": y, **origin, **more}


@pytest.fixture
def folder(tmp_path):
    made = ResultFolder.new(tmp_path / "mine" / "1")
    made.write_json("sweep.json", {"points": ["a", "b", "c", "d"]})
    made.write_json("question.json", {"title": "A title", "asked": [QUESTION]})
    for ratio in (1, 2):
        made.add_row(row("gpu_only", ratio, 10.0, gpu_tpot_ns=5e7))
        made.add_row(row("async", ratio, 9.0 if ratio == 1 else 12.0, gpu_tpot_ns=6e7, cpu_tpot_ns=1.6e9))
    return made.path


def test_a_folder_is_a_table_a_figure_and_what_was_found(folder, tmp_path, monkeypatch):
    results = hybridattn.open_results(folder)
    assert repr(results) == f"<mine: 4 points, simulated, in {folder}>"
    assert list(results.table()["tokens_per_s"]) == [10.0, 9.0, 10.0, 12.0]
    [found] = results.outcomes()
    assert dict(zip(HEAD, ("T4", "async", "2", "1.20x", "60 ms", "1.6 s (32 times as long)", "1.33 (1 to 2)"),
                    strict=True)) == found  # fmt: skip
    assert results.plot()._repr_png_()[:8] == b"\x89PNG\r\n\x1a\n"
    assert results.plot(y="gpu_tpot_ns", relative=False).axes[0].get_ylabel() == "gpu_tpot_ns"
    assert not any("theory" in label for label in drawn(results.plot()))
    with results.to_csv(tmp_path / "a.csv").open() as file:
        assert [r["policy"] for r in csv.DictReader(file)] == ["gpu_only", "async"] * 2
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("pandas", "matplotlib") else find(name)
    )
    assert results.table() == results.rows
    with pytest.raises(InputError, match="figures need matplotlib: pip install"):
        results.plot()


def drawn(figure):
    return figure.axes[0].get_legend_handles_labels()[1]


def test_a_figure_has_the_closed_form_and_published_points_beside_ours(folder):
    published = [{"panel": "T4", "series": "published", "x": x, "y": y} for x, y in (("2", "1.2"), ("1", "1.0"))]
    beside = {"theory": "one_layer_overlap", "published": published}
    document = ResultFolder.open(folder)
    document.write_json("question.json", {"title": "", "asked": [QUESTION], **beside})
    document.add_row(row("async", 4, 13.0, stretch=0.25, num_layers=32))
    results = hybridattn.open_results(folder)
    assert drawn(results.plot())[:2] == ["theory: one layer per step", "published"]
    [points] = [line for line in results.plot().axes[0].lines if line.get_label() == "published"]
    assert list(points.get_xdata()) == [1.0, 2.0]
    # they answer the sweep's own question, in its units, and nothing else
    assert drawn(results.plot(y="gpu_tpot_ns", relative=False)) == ["gpu_only", "async"]
    assert drawn(results.plot(baseline="absent")) == ["gpu_only", "async"]


def test_a_sweep_without_its_baseline_shows_values_with_their_unit(folder):
    document = ResultFolder.open(folder)
    asked = [{**QUESTION, "baseline": "absent", "y_label": "decode throughput [tokens/s]"}]
    document.write_json("question.json", {"title": "", "asked": asked})
    results = hybridattn.open_results(folder)
    [found] = results.outcomes()
    assert found["value"] == "12 tokens/s" and "gain" not in found
    assert results.asked[0].axes(found) == "at, pays from: ratio; value: decode throughput [tokens/s]"


def test_a_sweep_that_is_not_through_says_so_and_concludes_nothing(folder):
    document = ResultFolder.open(folder)
    document.write_json("sweep.json", {"points": [str(i) for i in range(84)]})
    results = hybridattn.open_results(folder)
    assert "4 of 84 points" in repr(results)
    [panel] = results.panels(results.asked[0])
    assert results.crossings(panel, results.asked[0])["async"].state == "found"  # a crossing that was seen is one
    document.add_row(row("async", 2, 8.0))
    document.add_row({**row("async", 2, 8.0), "point_id": "async 2"})
    results = hybridattn.open_results(folder)
    [panel] = results.panels(results.asked[0])
    assert results.crossings(panel, results.asked[0])["async"].state == "open"


def test_what_cannot_be_drawn_is_one_sentence(folder, tmp_path):
    with pytest.raises(InputError, match="no result folder"):
        hybridattn.open_results(tmp_path)
    with pytest.raises(InputError, match="has both ratio and nothing"):
        hybridattn.open_results(folder).plot(y="nothing")
    with pytest.raises(InputError, match="a question has no 'colour'; it has x, y"):
        hybridattn.open_results(folder).plot(colour="red")


def test_results_are_read_without_the_experiments_and_what_they_bring(folder):
    code = f"""
import sys, hybridattn
results = hybridattn.open_results({str(folder)!r})
results.outcomes(), results.plot()
loaded = [m for m in ("experiments", "hydra", "torch", "matplotlib.pyplot") if m in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
