"""The three calibres, stages and phases."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.device import Span
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D, LANES
from hybridattn.core.records import RequestRecord, StepRecord
from hybridattn.metrics.share import Share, by_phase, phase_shares, shares, stage_of, step_phases


def span(lane, start, end, num_bytes=0, name="op"):
    return Span(lane, name, start, end, num_bytes=num_bytes)


def a_step(index, start, end, prefill=0):
    return StepRecord(index, start, end, 4, prefill, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def test_the_three_calibres_differ_where_they_should():
    spans = [
        span(GPU, 0, 60, 600, "linear"),
        span(D2H, 40, 70, 77, "send"),
        span(CPU, 50, 90, 400, "cpu_attention"),
    ]
    found = shares(spans, {"tokenise": 5, "schedule": 15})
    assert found.busy_time == Share(40, 70)  # copies beside kernels count once
    assert found.work == Share(400, 600)  # copied bytes are no work
    assert found.operator_time == Share(40 + 20, 60 + 30)  # everything added up, the driver's stages on the CPU's side
    assert found.work.cpu_fraction == pytest.approx(0.4)
    assert dict(found.stage_ns) == {
        "tokenise": 5, "schedule": 15, "detokenise": 0,
        "copy": 30, "linear": 60, "attention": 40, "sample": 0, "other": 0,
    }  # fmt: skip
    assert "schedule" not in dict(shares(spans).stage_ns)  # not told is missing, not 0


@pytest.mark.parametrize(
    ("lane", "name", "stage"),
    [
        (GPU, "attention", "attention"),
        (GPU, "linear[3]", "linear"),
        (GPU, "embed", "linear"),
        (GPU, "sample", "sample"),
        (GPU, "attentive", "other"),
        (D2H, "attention", "copy"),
        (H2D, "load_kv", "copy"),
        (CPU, "anything", "attention"),
    ],
)
def test_stage_of(lane, name, stage):
    assert stage_of(span(lane, 0, 1, name=name)) == stage


def test_nothing_has_no_share_and_host_stages_are_checked():
    assert shares([]).busy_time.cpu_fraction is None
    with pytest.raises(InputError, match=r"host_stage_ns\['lunch'\] = 3"):
        shares([], {"lunch": 3})
    with pytest.raises(InputError, match="negative side, got cpu -1"):
        Share(-1, 0)


STEPS = [a_step(0, 0, 90, prefill=64), a_step(1, 100, 190, prefill=64), a_step(2, 200, 290), a_step(3, 300, 390)]


def test_phases_of_a_chunked_prefill():
    # The token is known at 200, exactly when the next step begins: it belongs to the step that made it.
    requests = [RequestRecord("r", 0, 300, 128, (200, 300), "length"), RequestRecord("none", 0, 9, 4, (), "abort")]
    marks = step_phases(STEPS, requests)
    assert marks == [(0, "prefill"), (100, "first_token"), (200, "decode"), (300, "decode")]
    spans = [span(GPU, 0, 90, 90), span(GPU, 100, 190, 90), span(CPU, 150, 250, 1000), span(GPU, 310, 320, 5)]
    found = phase_shares(spans, STEPS, requests)
    assert found["prefill"].busy_time == Share(0, 90)
    assert found["first_token"].busy_time == Share(50, 90)
    assert found["first_token"].work == Share(500, 90)
    assert found["decode"].work == Share(500, 5)


def test_without_passes_there_are_no_phases():
    assert phase_shares([span(GPU, 0, 1)], [], []) == {}


@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.tuples(st.sampled_from(LANES), st.integers(0, 500), st.integers(0, 400), st.integers(0, 10**6)), max_size=8
    ),
    st.lists(st.integers(0, 600), min_size=1, max_size=5, unique=True),
)
def test_cutting_at_phases_loses_neither_time_nor_bytes(raw, marks):
    spans = [span(lane, start, start + took, num_bytes) for lane, start, took, num_bytes in raw]
    phases = [(m, ("prefill", "first_token", "decode")[i % 3]) for i, m in enumerate(sorted(marks))]
    pieces = [p for part in by_phase(spans, phases).values() for p in part]
    for lane in LANES:
        for size in ("duration_ns", "num_bytes"):
            assert sum(getattr(p, size) for p in pieces if p.lane == lane) == sum(
                getattr(s, size) for s in spans if s.lane == lane
            )
    assert all(p.end_ns >= p.start_ns for p in pieces)
