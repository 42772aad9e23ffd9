"""Latency, throughput and goodput, with the cases that public bug reports name."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.errors import InputError
from hybridattn.core.records import RequestRecord
from hybridattn.metrics.latency import (
    Slo,
    distribution,
    e2el_ns,
    itl_ns,
    per_token_ns,
    queue_ns,
    summarize,
    tpot_ns,
    ttft_ns,
)
from hybridattn.metrics.throughput import (
    Window,
    goodput,
    inside,
    steady_window,
    throughput,
    whole_run,
    without_first,
)


def request(name="r", arrival=0, tokens=(), end=None, reason="length", prompt=10, **more):
    end = end if end is not None else (tokens[-1] if tokens else arrival)
    return RequestRecord(name, arrival, end, prompt, tuple(tokens), reason, **more)


def with_outputs(counts):
    return [request(str(i), tokens=[10 * (k + 1) for k in range(n)], end=10 * max(n, 1)) for i, n in enumerate(counts)]


def test_a_request_by_hand():
    r = request(arrival=100, tokens=(150, 170, 210), end=212, scheduled_ns=120)
    assert (ttft_ns(r), tpot_ns(r), itl_ns(r), e2el_ns(r)) == (50, 31, (20, 40), 112)
    assert (queue_ns(r), per_token_ns(r)) == (20, round(112 / 3))


@pytest.mark.parametrize(
    ("counts", "completed", "with_tpot"),
    [([0], 0, 0), ([1], 1, 0), ([1, 1], 2, 0), ([2], 1, 1), ([0, 1, 2, 5], 3, 2)],
)
def test_outputs_of_zero_and_one_token(counts, completed, with_tpot):
    summary = summarize(with_outputs(counts))
    assert (summary.completed, summary.empty, summary.failed) == (completed, counts.count(0), 0)
    assert (summary.tpot.count if summary.tpot else 0) == with_tpot
    assert (summary.ttft is None) == (completed == 0)
    # An answer without tokens is no throughput either (the case that made 74.9 empty requests per second).
    assert throughput(with_outputs(counts)).requests == completed


@pytest.mark.parametrize("n", [0, 1])
def test_tpot_is_missing_rather_than_zero(n):
    assert tpot_ns(with_outputs([n])[0]) is None
    assert itl_ns(with_outputs([n])[0]) == ()


def test_no_requests_and_only_failures_give_missing_values():
    for records in ([], [request(reason="error", end=5)]):
        summary = summarize(records)
        assert summary.ttft is summary.tpot is summary.itl is summary.e2el is summary.queue is summary.per_token is None
    assert whole_run([]) is throughput([]) is steady_window([]) is None
    assert goodput([], Slo(ttft_ns=1)).attainment is None
    assert goodput([], Slo(ttft_ns=1)).requests_per_s is None


def test_tokens_are_counted_by_id_not_from_text():
    # 15 single-space tokens would be one token if their text were tokenised again; 7 of 100 asked came.
    spaces, early = request(tokens=range(1, 16)), request(tokens=range(1, 8), reason="stop")
    assert throughput([spaces]).output_tokens == 15
    assert throughput([early]).output_tokens == 7


def test_failures_are_apart_from_latency_and_throughput():
    good = [request(str(i), tokens=(100, 200), end=200) for i in range(8)]
    bad = [
        request("fast1", end=1, reason="error"),
        request("fast2", end=1, reason="error"),
        request("late", tokens=(100, 900), end=1000, reason="error"),
        request("gone", tokens=(50,), end=60, reason="abort"),
    ]
    summary = summarize(good + bad)
    assert (summary.completed, summary.failed, summary.empty) == (8, 4, 0)
    assert summary.e2el.count == 8 and summary.e2el.max_ns == 200 and summary.ttft.mean_ns == 100
    found = throughput(good + bad)
    assert (found.requests, found.output_tokens, found.duration_ns) == (8, 16, 1000)
    assert found.requests_per_s == pytest.approx(8e6)
    assert goodput(good + bad, Slo(e2el_ns=200)).attainment == pytest.approx(8 / 12)


def test_before_across_and_inside_a_window():
    window = Window(100, 200)
    before = request("before", 0, (50, 100), prompt=1)
    across = request("across", 60, (90, 150, 180), prompt=2)
    within = request("inside", 100, (120, 200), prompt=4)
    tail = request("tail", 150, (190, 260), prompt=8)
    records = [before, across, within, tail]
    assert inside(records, window) == [within]
    found = throughput(records, window)
    # Completions: across and inside. Tokens: 150, 180 of across, 120, 200 of inside, 190 of the tail. An event at the
    # very start (before's last token) belongs to what was before. Prompts count at the first token.
    assert (found.requests, found.output_tokens, found.prompt_tokens) == (2, 5, 4 + 8)
    assert throughput(records).output_tokens == 9


def test_steady_window_leaves_out_burst_and_tail():
    # Ten requests, then a lonely one that takes nine times as long: it drags the whole run, not the steady window.
    records = [request(str(i), 0, (100 * (i + 1), 100 * (i + 1)), end=100 * (i + 1)) for i in range(10)]
    records.append(request("tail", 0, (9000, 10_000)))
    window = steady_window(records)
    assert window == Window(300, 700)
    assert throughput(records, window).requests_per_s == pytest.approx(1e7)
    assert throughput(records).requests_per_s == pytest.approx(1.1e6)
    assert steady_window(records[:1]) is None
    assert steady_window(records, 0.0, 1.0) == Window(0, 10_000)
    with pytest.raises(InputError, match="low 0.7, high 0.3"):
        steady_window(records, 0.7, 0.3)


def test_dropping_the_first_quarter_and_what_lies_inside_a_window():
    records = [request(str(i), 100 * i, (100 * i + 50,)) for i in range(8)]
    assert [r.request_id for r in inside(records, Window(200, 750))] == list("234567")
    assert [r.request_id for r in without_first(records[::-1], 0.25)] == list("234567")


def test_goodput_needs_every_objective_and_ignores_missing_latencies():
    fast = request("fast", 0, (10, 20))
    slow = request("slow", 0, (10, 1000))
    single = request("single", 0, (10,))
    failed = request("failed", 0, (10,), reason="error")
    found = goodput([fast, slow, single, failed], Slo(ttft_ns=10, tpot_ns=50))
    assert (found.met, found.counted) == (2, 4)
    assert found.requests_per_s == pytest.approx(2e6)
    with pytest.raises(InputError, match="tpot_ns must be positive, got 0"):
        Slo(tpot_ns=0)


def test_a_window_may_not_run_backwards():
    with pytest.raises(InputError, match="ends at 1 ns, before its start 2 ns"):
        Window(2, 1)


records_strategy = st.lists(
    st.builds(
        lambda arrival, gaps, tail, reason: request(
            "r",
            arrival,
            tuple(arrival + sum(gaps[: i + 1]) for i in range(len(gaps))),
            arrival + sum(gaps) + tail,
            reason,
        ),
        st.integers(0, 10**9),
        st.lists(st.integers(0, 10**9), max_size=6),
        st.integers(0, 10**6),
        st.sampled_from(["stop", "length", "abort", "error"]),
    ),
    max_size=12,
)


@settings(deadline=None, max_examples=100)
@given(records_strategy, st.integers(0, 10**9), st.integers(0, 5 * 10**9))
def test_every_request_and_every_token_is_counted_once(records, start, length):
    summary = summarize(records)
    assert summary.completed + summary.failed + summary.empty == len(records)
    for name in ("ttft", "tpot", "itl", "e2el", "queue", "per_token"):
        found = getattr(summary, name)
        assert found is None or 0 <= found.median_ns <= found.p90_ns <= found.p99_ns <= found.max_ns
    whole = whole_run(records)
    if whole is None:
        return
    cuts = {t for t in (whole.start_ns, start, start + length) if whole.start_ns <= t < whole.end_ns}
    edges = [whole.start_ns - 1, *sorted(cuts), whole.end_ns]
    parts = [throughput(records, Window(a, b)) for a, b in zip(edges, edges[1:], strict=False)]
    total = throughput(records)
    for name in ("requests", "prompt_tokens", "output_tokens"):
        assert sum(getattr(p, name) for p in parts) == getattr(total, name)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.none(), st.integers(0, 10**12)), max_size=20))
def test_distribution_is_missing_or_finite(samples):
    found = distribution(samples)
    present = [s for s in samples if s is not None]
    assert (found is None) == (not present)
    if found:
        assert found.count == len(present) and math.isclose(found.mean_ns, sum(present) / len(present), abs_tol=1)
        assert found.max_ns == max(present)
