"""The flat row of a run, memory, and the worked example of docs/metrics.md."""

import json
import re
from pathlib import Path

import pytest

from hybridattn.core.device import Span
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D
from hybridattn.core.records import RequestRecord, RunRecords, StepRecord
from hybridattn.core.shapes import ModelShape
from hybridattn.core.trace import Trace
from hybridattn.metrics.latency import Slo
from hybridattn.metrics.memory import TierMemory, kv_bytes, relative_error
from hybridattn.metrics.report import RunMetrics, run_metrics
from hybridattn.metrics.throughput import Window

MS = 1_000_000
LLAMA_8B = ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072)


def worked_example():
    """The run that docs/metrics.md works out: times in ms."""
    requests = [
        RequestRecord("g", 0, 60 * MS, 100, tuple(t * MS for t in (20, 40, 60)), "length", "gpu", scheduled_ns=0),
        RequestRecord("c", 0, 80 * MS, 50, tuple(t * MS for t in (20, 80)), "length", "cpu", scheduled_ns=10 * MS),
        RequestRecord("x", 10 * MS, 30 * MS, 50, (), "error", error="refused"),
    ]
    steps = [
        StepRecord(0, 0, 20 * MS, 1, 150, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        StepRecord(1, 20 * MS, 40 * MS, 1, 0, 1, 1, 1, 2, 1, 1, 1, 0, 0),
        StepRecord(2, 40 * MS, 60 * MS, 1, 0, 1, 1, 1, 2, 1, 1, 1, 0, 0),
        StepRecord(3, 60 * MS, 80 * MS, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1),
    ]
    raw = [
        (GPU, "linear", 0, 20, 1000), (GPU, "linear", 20, 30, 500), (GPU, "attention", 32, 40, 300),
        (GPU, "linear", 40, 60, 500), (GPU, "linear", 76, 80, 200),
        (D2H, "send", 20, 21, 8), (CPU, "cpu_attention", 25, 65, 1500), (H2D, "fetch", 65, 66, 4),
    ]  # fmt: skip
    spans = [Span(lane, name, a * MS, b * MS, num_bytes=n) for lane, name, a, b, n in raw]
    return RunRecords(2, requests, steps), Trace("sim", "simulated", "profile-1", "abc1234", spans)


def test_the_worked_example_of_the_document():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    row = run_metrics(*worked_example(), slo=Slo(ttft_ns=30 * MS, tpot_ns=25 * MS)).as_row()
    stated = re.findall(r"^\| `(\w+)` \| ([\d.]+|missing) \|", text.split("## Worked example")[1], re.M)
    assert len(stated) >= 20
    for name, value in stated:
        if value == "missing":
            assert row[name] is None, name
        else:
            assert row[name] == pytest.approx(float(value), rel=1e-3), name


def test_a_row_is_plain_named_with_units_and_has_provenance():
    memory = TierMemory("gpu", 100, (("kv", 40), ("weights", 50)))
    row = run_metrics(*worked_example(), memory=[memory]).as_row()
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert (row["device"], row["kind"], row["profile"], row["commit"]) == ("sim", "simulated", "profile-1", "abc1234")
    assert row["memory_gpu_used_bytes"] == 90
    counts = {
        "num_layers", "completed", "failed", "empty", "preemptions", "steps", "polls_made", "polls_hit",
        "polls_missed", "joins", "skips", "waits", "detours", "layers_per_step", "completed_gpu_tier",
        "completed_cpu_tier", "recomputed_tokens", "reused_tokens",
    }  # fmt: skip
    for name in row.keys() - counts - {"device", "kind", "profile", "commit"}:
        assert name.endswith(("_ns", "_per_s", "_bytes", "_fraction")), name


def test_rows_of_different_runs_have_the_same_columns():
    empty = run_metrics(RunRecords(2), Trace("sim", "simulated", "p", "c")).as_row()
    full = run_metrics(*worked_example(), slo=Slo(e2el_ns=1)).as_row()
    assert list(empty) == list(full)
    # Without spans nothing is claimed about lanes.
    assert empty["gpu_busy_ns"] is empty["cpu_share_work_fraction"] is empty["ttft_mean_ns"] is None


def test_a_window_restricts_latency_and_throughput():
    records, trace = worked_example()
    row = run_metrics(records, trace, window=Window(0, 60 * MS)).as_row()
    assert (row["completed"], row["failed"]) == (1, 1)
    assert row["output_tokens_per_s"] == pytest.approx(4 / 0.06)


def test_kind_must_be_known():
    with pytest.raises(InputError, match="kind 'guessed' is none of measured, emulated, simulated"):
        RunMetrics("d", "guessed", "p", "c", {})


def test_memory_of_a_tier():
    assert kv_bytes(LLAMA_8B, "bf16", 10, 32) == 10 * 32 * 131_072
    tier = TierMemory("cpu", 1000, (("kv", 250),))
    assert (tier.used, tier.free, tier.used_fraction) == (250, 750, 0.25)
    assert relative_error(95, 100) == pytest.approx(0.05)
    with pytest.raises(InputError, match="tier cpu: 1001 bytes are booked of 1000"):
        TierMemory("cpu", 1000, (("kv", 1001),))
    with pytest.raises(InputError, match="tier cpu: kv has -1 bytes"):
        TierMemory("cpu", 1000, (("kv", -1),))
    with pytest.raises(InputError, match="num_blocks must not be negative, got -2"):
        kv_bytes(LLAMA_8B, "bf16", -2, 32)
    with pytest.raises(InputError, match="real must be positive"):
        relative_error(1, 0)
