"""Traces: invariants that catch each kind of fault, overlap, and the Chrome format."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.chrome import write_chrome
from hybridattn.core.device import Span
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, GPU, LANES
from hybridattn.core.records import RequestRecord
from hybridattn.core.shapes import ModelShape, dtype_bytes
from hybridattn.core.stages import Batch, Segment
from hybridattn.core.trace import Trace, overlap_ns, violations

SHAPE = dict(
    num_layers=32, hidden_size=4096, intermediate_size=14336, num_q_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256, max_model_len=8192,
)  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([Span("tpu", "a", 0, 1)], "unknown lane tpu"),
        ([Span(GPU, "a", 5, 4)], "ends at 4, before its start 5"),
        ([Span(GPU, "a", 5, 9, ready_ns=6)], "before what it waits for ended at 6"),
        ([Span(GPU, "a", 0, 5), Span(GPU, "b", 4, 8)], "a and b overlap on gpu.compute"),
    ],
)
def test_each_kind_of_violation_is_named(spans, message):
    (found,) = violations(spans)
    assert message in found


def test_lanes_may_overlap_each_other_and_touch_within():
    assert violations([Span(GPU, "a", 0, 5), Span(GPU, "b", 5, 8), Span(CPU, "c", 2, 7)]) == []


@given(st.lists(st.integers(0, 30), max_size=12), st.lists(st.integers(0, 30), max_size=12))
@settings(max_examples=100, deadline=None)
def test_overlap_equals_counting_instants(a, b):
    def lane(name, edges):
        cuts = sorted(set(edges))
        return [Span(name, "x", s, e) for s, e in zip(cuts[::2], cuts[1::2], strict=False)]

    xs, ys = lane(GPU, a), lane(CPU, b)
    busy = lambda spans, t: any(s.start_ns <= t < s.end_ns for s in spans)  # noqa: E731
    assert overlap_ns(xs, ys) == sum(busy(xs, t) and busy(ys, t) for t in range(31))


def test_chrome_trace_names_its_lanes_and_its_source(tmp_path):
    spans = [
        Span(GPU, "linear", 1_000_000, 3_000_000, layer=2, rows=4, num_bytes=10),
        Span(CPU, "attention", 2_000_000, 2_500_000),
    ]
    write_chrome(Trace("sim", "simulated", "t4", "abc", spans, clock_spread_ns=7), tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert list(names.values()) == list(LANES)
    linear, attention = (e for e in found["traceEvents"] if e["ph"] == "X")
    assert (names[linear["tid"]], linear["ts"], linear["dur"]) == (GPU, 0.0, 2000.0)
    assert (names[attention["tid"]], attention["ts"], attention["dur"]) == (CPU, 1000.0, 500.0)
    assert linear["args"] == {"layer": 2, "rows": 4, "bytes": 10}
    source = {"device": "sim", "kind": "simulated", "profile": "t4", "commit": "abc"}
    assert found["otherData"] == {**source, "clock_spread_ns": 7, "dropped_spans": 0}


def test_kv_bytes_of_known_models():
    assert ModelShape("llama3.1-8b", **SHAPE).kv_bytes_per_token_layer("bf16") == 4096
    assert ModelShape("llama3.1-8b", **SHAPE).kv_bytes_per_token("bf16") == 131_072
    assert ModelShape("llama2-7b", **{**SHAPE, "num_kv_heads": 32}).kv_bytes_per_token("fp16") == 524_288
    assert 8.0e9 < ModelShape("llama3.1-8b", **SHAPE).num_params < 8.1e9


def test_shapes_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="num_layers must be at least 1, got 0"):
        ModelShape("x", **{**SHAPE, "num_layers": 0})
    with pytest.raises(InputError, match="num_q_heads 32 is not a multiple of num_kv_heads 5"):
        ModelShape("x", **{**SHAPE, "num_kv_heads": 5})
    with pytest.raises(InputError, match="dtype 'fp4' is unknown"):
        dtype_bytes("fp4")


def test_records_that_go_back_in_time_are_refused():
    with pytest.raises(InputError, match="end_ns 1 lies before arrival_ns 2"):
        RequestRecord("r", 2, 1, 1, (), "stop")
    with pytest.raises(InputError, match="token_ns goes back in time"):
        RequestRecord("r", 0, 9, 1, (4, 3), "stop")


def test_a_batch_keeps_decode_rows_first_and_decode_rows_single():
    class Named:
        request_id = "r"

    decode = Segment(Named(), "gpu", 4, 1, True, False)
    prefill = Segment(Named(), "cpu", 0, 4, True, True)
    assert Batch((decode, prefill)).num_tokens == 5 and Batch((decode, prefill)).offloaded == (prefill,)
    with pytest.raises(InputError, match="decode rows must come before"):
        Batch((prefill, decode))
    with pytest.raises(InputError, match="one token of a GPU-tier request"):
        Segment(Named(), "cpu", 4, 1, True, False)
