"""The demo, shrunk: what it prints, what it leaves behind, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.run import main

ROOT = Path(__file__).parents[2]


def run(tmp_path, *overrides):
    argv = [sys.executable, "-m", "experiments.run", f"results_root={tmp_path}", *overrides]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def test_the_demo_answers_compares_and_leaves_rows_trace_and_picture(tmp_path, capsys):
    (tmp_path / "page.txt").write_text("A page of a few lines. " * 12)
    shrunk = ["settings.max_tokens=5", f"settings.page={tmp_path}/page.txt", "settings.gpu_kv_blocks=8"]
    assert main([f"results_root={tmp_path}", "+experiment=demo", *shrunk]) == 0
    out = capsys.readouterr().out
    assert out.count("8 of 8 answers (40 token ids) equal to") == 3
    assert "demo found (measured):" in out and "| throughput, output tokens/s |" in out
    latest = tmp_path / "demo" / "latest"
    assert latest.is_symlink()
    rows = [json.loads(line) for line in (latest / "rows.jsonl").read_text().splitlines()]
    assert [r["policy"] for r in rows] == ["gpu_only", "sync_offload", "async_overlap"]
    for row in rows:
        assert (row["kind"], row["device"], row["equal_to_reference"]) == ("measured", "host", True)
        assert row["profile"] and row["commit"] and row["output_tokens_per_s"] > 0
    assert rows[0]["polls_made"] == 0 and rows[2]["polls_made"] > 0
    assert rows[2]["overlap_fraction"] > 0
    assert rows[1]["layers_per_step"] == pytest.approx(30)
    summary = json.loads((latest / "summary.json").read_text())
    assert (summary["source"], summary["device"], summary["failed"]) == ("measured", "host", 0)
    trace = json.loads((latest / "trace.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    used = {names[e["tid"]] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert used == {"gpu.compute", "cpu.attention", "gpu.d2h", "gpu.h2d"}
    assert (latest / "timeline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = "".join(path.read_text() for path in (latest / "rows.jsonl", latest / "trace.json", latest / "summary.json"))
    assert "A page of a few lines" not in text and "JOIN" not in text  # results carry no prompt text


def test_another_policy_runs_without_the_options_of_those_in_the_file(tmp_path, capsys):
    shrunk = ["settings.page=''", "settings.prompts=[a]", "settings.max_tokens=2", "policy=gpu_only"]
    assert main([f"results_root={tmp_path}", "+experiment=demo", *shrunk]) == 0
    assert "gpu_only: 1 of 1 answers (2 token ids) equal to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "no experiment was chosen: add +experiment=NAME"),
        (("+experiment=demo", "+settings.max_tokns=5"), "max_tokns"),
        (("+experiment=demo", "settings.max_tokens=many"), "max_tokens"),
        (("+experiment=demo", "settings.prompts=[]"), "settings.prompts holds no prompt"),
        (("+experiment=demo", "settings.page=nowhere.md"), "settings.page 'nowhere.md' is no file"),
        (("+experiment=demo", "policy=nonsense"), "Could not find 'policy/nonsense'"),
    ],
)
def test_bad_settings_get_one_sentence_and_exit_code_2(tmp_path, overrides, message, capsys):
    assert main([f"results_root={tmp_path}", *overrides]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


def test_the_exit_code_reaches_the_shell(tmp_path):
    done = run(tmp_path, "+experiment=demo", "+settings.max_tokns=5")
    assert done.returncode == 2 and "max_tokns" in done.stderr and "Traceback" not in done.stderr
