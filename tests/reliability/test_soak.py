"""The soak script, shortened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def soak(device, requests, *policies, share=False):
    argv = [sys.executable, "-W", "error", "scripts/soak.py", "--device", device, "--requests", str(requests)]
    argv += ["--share"] if share else []
    argv += ["--policies", *policies] if policies else []
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_few_hundred_requests_on_the_simulator():
    (found,) = soak("sim", 300, "async_overlap")
    assert sum(found["reasons"].values()) == 300 and found["on_cpu"] > 0


def test_requests_with_common_prefixes_and_sessions_on_the_simulator():
    found = soak("sim", 600, "async_overlap", "split", share=True)
    assert all(f["reused_tokens"] > 0 for f in found)


@pytest.mark.slow
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("device", "requests"), [("sim", 10_000), ("host", 1000)])
def test_thousands_of_requests_under_every_policy(device, requests, share):
    found = soak(device, requests, share=share)
    assert len(found) == 5 and sum(sum(f["reasons"].values()) for f in found) == requests
    assert sum(f["preemptions"] for f in found) > 0
    assert not share or sum(f["reused_tokens"] for f in found) > 0
