"""The bench of the driver of a card, on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "from hybridattn.devices import bench; bench.ROUNDS = bench.STEPS = 2; bench.main(['--json'])"


@pytest.mark.slow
def test_a_step_without_cpu_rows_is_a_handful_of_replays_and_launches_nothing_at_a_layer():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=400,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {f["name"]: f for f in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 16 and all(len(f["samples"]) >= 1 for f in found.values())
    for rows in ("8 x 512", "32 x 4096"):
        graphs, eager = (found[f"a layer of {rows}, {how}"]["calls"] for how in ("graphs", "eager"))
        assert graphs["graph"] <= 8 and graphs["kernel"] <= 4  # these choose the tokens
        assert eager["kernel"] / 32 <= 8 and graphs["record"] == eager["record"] <= 6
