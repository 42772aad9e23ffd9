"""wandb is a second sink: offline, bounded, and the rows are in the result folder whatever it does."""

from __future__ import annotations

import importlib.util
import json
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from experiments.track import track
from experiments.wandb_sink import _column
from hybridattn.analysis.results import ResultFolder
from hybridattn.core.errors import InputError

NO_NETWORK = """
import socket
_connect = socket.socket.connect
def connect(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "localhost", "::1"):
        raise OSError("the network is blocked by the test")
    return _connect(self, address)
socket.socket.connect = connect
"""


def tracker(**options):
    given = {"name": "wandb", "project": "p", "mode": "offline", "tags": ["t"], "timeout_s": 60.0}
    return SimpleNamespace(**(given | options))


@pytest.fixture
def folder(tmp_path):
    made = ResultFolder.new(tmp_path / "x" / "1")
    made.write_json("sweep.json", {"name": "x", "overrides": [], "commit": "c", "launcher": "basic"})
    for point in (5, 3):  # out of order on purpose
        row = {"point_id": f"a={point}", "point": point, "status": "ok", "policy": "gpu_only", "value": 1.5}
        made.add_row({**row, "missing": None})
    return made


def test_H07_offline_with_the_network_blocked_it_ends_and_has_a_run_for_every_point(
    tmp_path, folder, monkeypatch, capsys
):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_NETWORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    console = Console(record=True)
    assert track(folder, tracker(), console), console.export_text()
    state = folder.read_json("wandb.json")
    assert state["copied"] == {"a=5": "ok", "a=3": "ok"} and len(state["id"]) == 32
    runs = {p.name.rpartition("-")[2]: b"".join(f.read_bytes() for f in p.glob("*.wandb"))
            for p in (folder.path / "wandb").glob("offline-run-*")}  # fmt: skip
    assert set(runs) == {"5", "3", "all"}
    assert b"a=5" in runs["5"] and b"value" in runs["5"] and b"gpu_only/value" not in runs["5"]
    assert f"wandb sync {folder.path}/wandb/offline-run-*" in " ".join(capsys.readouterr().out.split())


def test_columns_of_numbers_stay_numbers():
    assert _column([1, None, 2.5]) == [1.0, None, 2.5] and _column([1, "a", None, True]) == ["1", "a", None, "True"]


def test_H07_not_installed_is_a_warning(folder, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    console = Console(record=True, width=300)
    assert not track(folder, tracker(), console)
    assert "warning: wandb is not installed" in console.export_text() and len(folder.rows()) == 2


def fake_wandb(tmp_path, monkeypatch, body):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


def test_H07_a_wandb_that_hangs_is_ended(tmp_path, folder, monkeypatch):
    fake_wandb(tmp_path, monkeypatch, "import time\ndef init(**k): time.sleep(600)\n")
    console, started = Console(record=True, width=300), time.monotonic()
    assert not track(folder, tracker(timeout_s=3), console)
    assert "did not end within 7 s" in console.export_text() and len(folder.rows()) == 2
    assert time.monotonic() - started < 60
    assert not (folder.path / "wandb.json").exists()  # the next try copies everything


def test_H07_a_wandb_that_dies_half_way_loses_nothing(tmp_path, folder, monkeypatch):
    fake_wandb(tmp_path, monkeypatch, "import os, signal\ndef init(**k): os.kill(os.getpid(), signal.SIGKILL)\n")
    console = Console(record=True, width=300)
    assert not track(folder, tracker(), console)
    assert "ended with code -9" in console.export_text()
    assert [json.loads(line)["point"] for line in folder.rows_file.read_text().splitlines()] == [5, 3]


def test_an_unknown_tracker_is_refused(folder):
    with pytest.raises(InputError, match="tracker 'mlflow'"):
        track(folder, tracker(name="mlflow"), Console())
    assert track(folder, tracker(name="none"), Console())
