"""Lengths, arrivals, closed loops, sessions: as drawn, and as fed to a run."""

import heapq
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.errors import InputError
from hybridattn.workload.arrivals import AllAtOnce, ClosedLoop, Gamma, Poisson, synthetic
from hybridattn.workload.item import Feed, WorkItem, Workload
from hybridattn.workload.lengths import Fixed, LogNormal, Uniform
from hybridattn.workload.sessions import Conversation, Turn, agent_sessions, sessions_workload

SECOND = 1_000_000_000


def drawn(lengths, count=20_000):
    return lengths.draw(np.random.default_rng(7), count)


def test_lengths_have_the_stated_distribution():
    assert set(drawn(Fixed(5), 3)) == {5}
    uniform = drawn(Uniform(1000, 0.1))
    assert (uniform.min(), uniform.max()) == (900, 1100) and uniform.mean() == pytest.approx(1000, rel=0.01)
    skewed = drawn(LogNormal(200, cv=0.8, high=100_000))
    assert skewed.mean() == pytest.approx(200, rel=0.05)
    assert skewed.std() / skewed.mean() == pytest.approx(0.8, rel=0.1)
    clipped = drawn(LogNormal(200, cv=2, high=300, low=50))
    assert (clipped.min(), clipped.max()) == (50, 300)


def test_arrivals_have_the_stated_rate_and_burstiness():
    for arrivals, cv in ((Poisson(50), 1.0), (Gamma(50, 0.25), 2.0), (Gamma(50, 25), 0.2)):
        gaps = np.diff(arrivals.draw(np.random.default_rng(3), 20_000)) / SECOND
        assert gaps.mean() == pytest.approx(0.02, rel=0.06)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)
        assert (gaps >= 0).all()
    assert not AllAtOnce().draw(np.random.default_rng(0), 4).any()


def test_a_seed_fixes_the_workload_and_each_part_has_its_own_stream():
    def make(arrivals, seed=1):
        return synthetic(40, arrivals, Uniform(100), LogNormal(30, 1, 500), seed)

    assert make(Poisson(3)) == make(Poisson(3)) != make(Poisson(3), seed=2)
    faster = make(Gamma(30, 0.5))
    lengths = [(i.prompt_tokens, i.output_tokens) for i in make(Poisson(3)).items]
    assert [(i.prompt_tokens, i.output_tokens) for i in faster.items] == lengths
    same = synthetic(40, AllAtOnce(), Uniform(100, 0.5), Uniform(100, 0.5)).items
    assert any(i.prompt_tokens != i.output_tokens for i in same)
    assert make(Poisson(3)).rate_per_s == pytest.approx(3, rel=0.5)
    assert make(AllAtOnce()).rate_per_s is None and "all at once" in make(AllAtOnce()).describe()
    assert "closed loop of 4" in make(ClosedLoop(4)).describe()


def test_what_does_not_fit_is_left_out_and_counted():
    workload = Workload("w", (WorkItem(0, 10, 5), WorkItem(1, 10, 50), WorkItem(2, 60, 1)))
    short = workload.within(15)
    assert [i.arrival_ns for i in short.items] == [0] and short.dropped == {"longer than 15 tokens": 2}
    assert workload.within(1000) == workload
    assert Workload("none", ()).describe() == "none: no requests"


def run(workload, service_ns, most=10_000):
    """Feed a run in which item i takes service_ns(i); returns (arrival, end) by item and the greatest concurrency."""
    feed = Feed(workload)
    coming = feed.start()
    heapq.heapify(coming)
    ending, times, peak = [], {}, 0
    for _ in range(most):
        if coming and (not ending or coming[0][0] < ending[0][0]):
            arrival, i = heapq.heappop(coming)
            times[i] = (arrival, arrival + service_ns(i))
            heapq.heappush(ending, (arrival + service_ns(i), i))
            peak = max(peak, len(ending))
        elif ending:
            end, i = heapq.heappop(ending)
            for found in feed.ended(i, end):
                heapq.heappush(coming, found)
        else:
            return times, peak
    raise AssertionError("the feed does not end")


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 20),
    concurrency=st.one_of(st.none(), st.integers(1, 6)),
    think=st.integers(0, 50),
    service=st.lists(st.integers(1, 100), min_size=20, max_size=20),
)
def test_a_feed_brings_every_item_once_within_the_concurrency(count, concurrency, think, service):
    items = tuple(WorkItem(0, 1, 1) for _ in range(count))
    times, peak = run(Workload("w", items, concurrency, think), lambda i: service[i])
    assert sorted(times) == list(range(count))
    assert peak == min(count, concurrency or count) if think == 0 else peak <= min(count, concurrency or count)


def test_a_closed_loop_by_hand():
    workload = synthetic(4, ClosedLoop(2, think_ns=5), Fixed(1), Fixed(1))
    times, peak = run(workload, lambda i: (10, 30, 10, 10)[i])
    assert times == {0: (0, 10), 1: (0, 30), 2: (15, 25), 3: (30, 40)} and peak == 2
    # A free slot brings no request before its own time.
    late = Workload("late", (WorkItem(0, 1, 1), WorkItem(70, 1, 1)), concurrency=1)
    assert run(late, lambda i: 10)[0] == {0: (0, 10), 1: (70, 80)}


def test_a_session_resumes_after_its_pause_with_its_history():
    one = Conversation("a", 100, (Turn(50, 10), Turn(20, 5, pause_ns=300), Turn(1, 1, pause_ns=0)))
    workload = sessions_workload([one, Conversation("b", 40, (Turn(7, 3),))])
    assert [(i.session, i.history_tokens, i.after) for i in workload.items] == [
        ("b", 0, None), ("a", 0, None), ("a", 60, 1), ("a", 85, 2),
    ]  # fmt: skip
    assert workload.items[3].context_tokens == one.context_tokens == 87
    times, _ = run(workload, lambda i: 10)
    assert times == {0: (40, 50), 1: (100, 110), 2: (410, 420), 3: (420, 430)}
    assert workload.scaled(0.5).items[2].delay_ns == 150
    with pytest.raises(InputError, match="items that follow others: single ones cannot be left out"):
        workload.within(10)
    with pytest.raises(InputError, match="cannot be drawn with replacement"):
        workload.take(2, replacement=True)


def test_agent_sessions_in_a_closed_loop_run_one_session_at_a_time():
    workload = agent_sessions(3, 4, ClosedLoop(1), Fixed(100), Uniform(20, 0.5), Fixed(10), mean_pause_ns=1000, seed=5)
    times, peak = run(workload, lambda i: 10)
    assert len(times) == 12 and peak == 1
    order = [workload.items[i].session for i in sorted(times, key=lambda i: times[i])]
    assert order == [f"session-{k}" for k in range(3) for _ in range(4)]
    pauses = [i.delay_ns for i in workload.items if i.after is not None]
    assert len(set(pauses)) == 9 and 300 < statistics.mean(pauses) < 3000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(0), "fixed length must be at least 1 token, got 0"),
        (lambda: Uniform(10, 1), r"spread must be in \[0, 1\), got 1"),
        (lambda: LogNormal(0, 1, 10), "mean of at least 1"),
        (lambda: LogNormal(5, 1, 10, 11), "low 11, high 10"),
        (lambda: Poisson(0), "rate_per_s must be positive and finite, got 0"),
        (lambda: Gamma(1, -1), "burstiness must be positive and finite, got -1"),
        (lambda: WorkItem(-1, 1, 1), "arrival_ns must not be negative, got -1"),
        (lambda: WorkItem(0, 0, 1), "prompt_tokens must be at least 1, got 0"),
        (lambda: Workload("w", (WorkItem(5, 1, 1), WorkItem(4, 1, 1))), "item 1 arrives at 4 ns"),
        (lambda: Workload("w", (WorkItem(0, 1, 1, after=0),)), "item 0 follows item 0, which is not before it"),
        (lambda: Workload("w", (), concurrency=0), "concurrency must be at least 1, got 0"),
        (lambda: Workload("w", (WorkItem(0, 1, 1),)).take(0), "count must be at least 1, got 0"),
        (lambda: synthetic(0, AllAtOnce(), Fixed(1), Fixed(1)), "count must be at least 1, got 0"),
        (lambda: Conversation("s", 0, ()), "session s has no turns"),
        (lambda: Conversation("s", 0, (Turn(1, 1, 5),)), "its first turn has a pause of 5 ns"),
    ],
)
def test_bad_input_names_the_argument_and_the_number(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_arrivals_beyond_the_clock_are_refused():
    with pytest.raises(InputError, match="rate_per_s 1e-30 puts 4 arrivals over more than 292 years"):
        Poisson(1e-30).draw(np.random.default_rng(0), 4)
