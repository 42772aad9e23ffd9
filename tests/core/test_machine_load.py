"""The load of a machine by the system's own ticks, here written by the test."""

from __future__ import annotations

import time

from hybridattn.core import machine_load
from hybridattn.core.machine_load import OthersLoad, said


def ticks(path, busy, idle=0):
    path.write_text(
        f"cpu  1 1 1 1 1 1 1 1 1 1\ncpu0 {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu1 {busy} 0 0 {idle} 0 0 0 0 0 0\n"
    )


def test_what_others_use_is_all_but_what_this_process_did(tmp_path, monkeypatch):
    own = [0.0]
    monkeypatch.setattr(machine_load, "_cpus", lambda: {0, 1})
    monkeypatch.setattr(machine_load, "_own_s", lambda: own[0])
    monkeypatch.setattr(machine_load.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(time, "monotonic", iter((0.0, 10.0, 10.0)).__next__)
    ticks(tmp_path / "stat", 1000)
    load = OthersLoad(tmp_path / "stat")
    ticks(tmp_path / "stat", 1400)  # each cpu was busy for 4 of 10 s
    assert load.share() == 0.4
    own[0] = 6.0  # of which 6 of 8 were this process's
    assert load.share() == 0.1


def test_it_is_said_in_words(tmp_path):
    assert OthersLoad(tmp_path / "none").share() is None and "does not tell" in said(None)
    assert said(0.02).startswith("other work uses 2% of the") and "slower" not in said(0.02)
    assert "slower than on a machine at rest" in said(0.5)
