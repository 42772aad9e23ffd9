from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from experiments.report import main as report
from experiments.run import main
from hybridattn.analysis.results import ResultFolder

ROOT = Path(__file__).parents[2]
SMALL = ["+experiment=ratio", "hardware=t4", "policy=gpu_only,async_overlap", "settings.exposed_fraction=0.25"]


def sweep(tmp_path, *more):
    assert main([*SMALL, f"results_root={tmp_path}", *(more or ("settings.ratio=8,16",))]) == 0
    return tmp_path / "ratio" / "latest"


def test_a_report_holds_answer_figure_tables_provenance_and_the_command(tmp_path, capsys):
    folder = sweep(tmp_path)
    assert report([str(folder)]) == 0
    html = (folder / "report.html").read_text()
    assert "Every number on this page is simulated. 4 points, 0 failed." in html
    assert "From which ratio of CPU-held to GPU-held requests on does hybrid decode pay" in html
    assert (
        '<td data-label="best">async_overlap</td>' in html and '<td data-label="pays from">8.25 (8 to 16)</td>' in html
    )
    assert "One layer per step: a micro-batch joins" in html and "swept: ratio</td><td>8, 16</td>" in html
    assert "<td>when</td><td>20" in html
    assert "data:image/svg+xml;base64," in html and "<script" not in html and 'src="http' not in html
    assert html.startswith("<!doctype html>") and "<link" not in html and "@import" not in html
    for part in ("t4+xeon-8259cl-8c+pcie3-x16@", "Llama-2-7B", "basic", "How to repeat it", "1.18x"):
        assert part in html
    assert "python -m experiments.run +experiment=ratio hardware=t4" in html
    assert str(folder.resolve() / "report.html") in capsys.readouterr().out


def test_a_report_names_failed_points(tmp_path):
    folder = sweep(tmp_path)
    bad = {**ResultFolder.open(folder).rows()[0], "point_id": "hardware=t4 broken", "status": "failed"}
    ResultFolder.open(folder).add_row({**bad, "error": "ValueError: <x>", "traceback": "Traceback ..."})
    assert report([str(folder)]) == 0
    html = (folder / "report.html").read_text()
    assert "1 failed" in html and "ValueError: &lt;x&gt;" in html and "hardware=t4 broken" in html


@pytest.mark.parametrize("kind", ["missing", "empty", "rows alone"])
def test_what_cannot_be_reported_is_said_in_one_sentence(tmp_path, capsys, kind):
    folder = tmp_path / "nothing"
    if kind != "missing":
        made = ResultFolder.new(tmp_path / "x" / "1")
        folder = made.path
        if kind == "rows alone":
            made.add_row({"policy": "gpu_only"})
    assert report([str(folder)]) == 2
    said = {"missing": "no result folder", "empty": "no rows yet", "rows alone": "not a sweep"}[kind]
    assert said in capsys.readouterr().err


def browser():
    return next((found for n in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(n))), None)


@pytest.mark.slow
@pytest.mark.skipif(browser() is None, reason="no headless browser (chromium) is installed")
@pytest.mark.parametrize("width", [1400, 420])
def test_a_browser_shows_the_report_dark_on_light_with_nothing_cut_off(tmp_path, width):
    folder = sweep(tmp_path, "settings.ratio=2,4,8,16", "policy=gpu_only,sync_offload,asymmetric,async_overlap")
    assert report([str(folder)]) == 0
    shot = tmp_path / "shot.png"
    argv = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--window-size={width},1800", f"--screenshot={shot}",
            f"file://{folder.resolve()}/report.html"]  # fmt: skip
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    grey = imread(shot)[..., :3].mean(axis=2)
    assert grey.shape == (1800, width)
    assert np.median(grey) > 0.99  # light
    assert (grey < 0.35).mean() > 0.005  # with dark text on it
    margins = grey[:, [0, 1, 2, -3, -2, -1]]
    assert margins.min() > 0.97  # nothing touches an edge: no column of pixels is cut off
    assert (grey < 0.5).any(axis=1).sum() > 500  # and it fills the page


def test_the_module_runs_as_a_command(tmp_path):
    argv = [sys.executable, "-m", "experiments.report", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stderr.startswith("experiments.report: ")
