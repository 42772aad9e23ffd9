"""The real Triton launchers under the stages of a CUDA card: same tokens as the host device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "cuda_interpreted.py"


def test_interpreted_kernels_give_the_hosts_tokens():
    """GPU rows, CPU rows, and a chunked CPU-tier prompt whose chunks begin inside a page; one layer has a window. The
    same with every request moved between the tiers as often as it can be, and with requests that lie on both."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["cuda"]["violations"] == []
    assert found["cuda"]["tokens"] == found["host"]["tokens"]
    assert found["split"]["violations"] == [] and found["split"]["tokens"] == found["host"]["tokens"][1:2]
    assert found["moved"]["violations"] == [] and found["moved"]["moves"] >= 3
    assert found["moved"]["tokens"] == found["host"]["tokens"]
    assert [len(t) for t in found["host"]["tokens"]] == [3, 3, 4]
    opened, late = found["late"]
    assert opened >= 10 and late == []  # whatever a call launches was compiled when the engine opened
    assert len({t for row in found["host"]["tokens"] for t in row}) > 5
