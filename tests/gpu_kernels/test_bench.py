"""The bandwidth benchmark: its flow, dry, and its refusal to pretend. No speed is judged here."""

import json
from typing import Any

import pytest
import torch

from gpu_kernels import bench
from gpu_kernels.environment import interpreted


def test_dry_run_goes_through_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    if not interpreted():
        pytest.skip("the dry run is for the interpreter")
    assert bench.main(["--json", "--dry-run"]) == 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["group"] for row in rows] == [1, 4, 8]
    for row in rows:
        assert row["error"] < 2e-3 and "not a measurement" in row["device"]
        assert len(row["decode_ns"]) == len(row["copy_ns"]) == 1 and row["share"] >= 0


def test_without_a_gpu_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert bench.main([]) == 2
    assert "bench: no CUDA device" in capsys.readouterr().err


def test_reference_error_sees_a_wrong_result() -> None:
    k, v, q = torch.randn(2, 1, 16, 32), torch.randn(2, 1, 16, 32), torch.randn(2, 32)
    pages = torch.tensor([1, 0])
    keys, values = (x[pages].reshape(32, 32)[:20] for x in (k, v))
    truth = torch.softmax(q @ keys.T * 32**-0.5, -1) @ values
    assert bench.reference_error(truth, q, k, v, pages, 20) < 1e-5
    assert bench.reference_error(truth + 0.5, q, k, v, pages, 20) == pytest.approx(0.5, abs=1e-5)
