"""The soak script, shortened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def soak(device, requests, *policies):
    argv = [sys.executable, "-W", "error", "scripts/soak.py", "--device", device, "--requests", str(requests)]
    argv += ["--policies", *policies] if policies else []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_few_hundred_requests_on_the_simulator():
    (found,) = soak("sim", 300, "async_overlap")
    assert sum(found["reasons"].values()) == 300 and found["on_cpu"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("device", "requests"), [("sim", 4000), ("host", 1200)])
def test_thousands_of_requests_under_every_policy(device, requests):
    found = soak(device, requests)
    assert len(found) == 4 and sum(sum(f["reasons"].values()) for f in found) == requests
    assert sum(f["preemptions"] for f in found) > 0
