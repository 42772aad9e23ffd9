from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.analysis.crossing import Crossing, crossing, crossover, gains
from hybridattn.analysis.series import Series
from hybridattn.core.errors import InputError


def series(name, values):
    return Series(name, {x: tuple(np.atleast_1d(y).tolist()) for x, y in values.items()})


BASE = series("base", {x: 10.0 for x in (1, 2, 4, 8)})


def test_the_crossing_lies_on_the_line_between_its_neighbours():
    assert crossing({1: 0.8, 2: 0.9, 3: 1.1}).value == pytest.approx(2.5)
    assert crossing({1: 0.8, 2: 0.9, 8: 1.1}, log_x=True).value == pytest.approx(4.0)


@given(st.floats(0.05, 6), st.floats(0.1, 3))
@settings(deadline=None, max_examples=60)
def test_a_line_is_crossed_where_it_is_one(at, slope):
    xs = [0.0, 1.0, 2.5, 4.0, 7.0]
    found = crossing({x: 1 + slope * (x - at) for x in xs})
    assert found.state == "found" and found.value == pytest.approx(at, abs=1e-6)


def test_no_crossover_in_range_is_said_as_such():
    never, always = crossing({1: 0.5, 2: 0.9}), crossing({1: 1.5, 2: 1.9})
    assert (never.state, never.value) == ("never", None) and (always.state, always.value) == ("always", None)
    assert "no crossover in range" in never.describe() and "no crossover in range" in always.describe()
    assert crossing({1: 1.0}).state == "unknown" and crossover(BASE, None).state == "unknown"


def test_a_policy_that_equals_the_baseline_does_not_pay():
    found = crossing({0.5: 1.0, 1: 1.0, 2: 1.2})
    assert found.state == "found" and found.value == pytest.approx(1.0)
    assert crossing({0.5: 1.0, 1: 1.0 + 1e-12}).state == "never"


def test_what_stops_paying_says_where():
    found = crossing({1: 0.9, 2: 1.1, 3: 1.1, 4: 0.9})
    assert found.value == pytest.approx(1.5) and found.until == pytest.approx(3.5)
    assert "until 3.5" in found.describe()


def test_one_deterministic_repeat_has_the_grid_points_as_its_interval():
    found = crossover(BASE, series("a", {1: 8.0, 2: 9.0, 4: 12.0, 8: 15.0}), log_x=True)
    assert (found.low, found.high) == (2, 4) and 2 < found.value < 4
    at_point = crossover(BASE, series("a", {1: 10.0, 2: 10.0, 4: 12.0, 8: 15.0}))
    assert (at_point.value, at_point.low, at_point.high) == (2, 2, 4)


def test_two_repeats_have_no_interval():
    found = crossover(series("base", {1: [10, 10], 2: [10, 10]}), series("a", {1: [8, 9], 2: [12, 12]}))
    assert found.value is not None and found.low is None and found.high is None


def test_the_bootstrap_interval_covers_the_true_crossover_at_about_its_rate():
    """gain = 1 at x = 3; noise of 3 % on each sample; five repeats."""
    rng, covered, runs = np.random.default_rng(1), 0, 40
    xs = (1, 2, 3, 4, 5)
    for seed in range(runs):
        base = series("base", {x: 10 * (1 + 0.03 * rng.standard_normal(5)) for x in xs})
        mine = series("a", {x: (10 + 0.5 * (x - 3)) * (1 + 0.03 * rng.standard_normal(5)) for x in xs})
        found = crossover(base, mine, draws=200, seed=seed)
        covered += found.low is not None and found.low <= 3 <= found.high
    assert covered >= 0.7 * runs  # percentile intervals of five repeats are known to be narrow


def test_the_bootstrap_is_reproducible_and_says_how_often_it_crossed():
    base = series("base", {1: [9, 10, 11], 2: [9, 10, 11]})
    mine = series("a", {1: [9, 9.9, 10.8], 2: [12, 13, 14]})  # in some draws it pays at 1 already
    first, second = (crossover(base, mine, seed=3) for _ in range(2))
    assert first == second and first.share is not None and first.share < 0.95
    assert "of the bootstrap's draws cross" in first.describe()


def test_a_log_axis_refuses_zero():
    with pytest.raises(InputError, match="cannot be logarithmic"):
        crossing({0: 0.5, 1: 2.0}, log_x=True)
    with pytest.raises(InputError, match="state 'maybe'"):
        Crossing("maybe")
    assert not math.isnan(crossing({1: 0.5, 2: 2.0}, log_x=True).value)


def test_two_repeats_give_a_value_without_an_interval():
    base, candidate = Series("b", {1.0: (1, 1), 2.0: (1, 1)}), Series("c", {1.0: (0.5, 0.5), 2.0: (1.5, 1.5)})
    found = crossover(base, candidate)
    assert (found.value, found.low, found.high) == (1.5, None, None)
    assert found.describe("apples") == "pays from 1.5 apples on (no interval from 2 repeats)"


def test_a_verdict_of_nowhere_that_the_draws_do_not_support_says_so():
    base = Series("b", {1.0: (1, 1, 1), 2.0: (1, 1, 1)})
    noisy = Series("c", {1.0: (0.5, 0.5, 0.5), 2.0: (0.2, 0.9, 1.8)})  # the mean, 0.97, pays nowhere
    found = crossover(base, noisy)
    assert found.state == "never" and 0.1 < found.share < 0.9
    says = f"no crossover in range: it pays nowhere; yet {found.share:.0%} of the bootstrap's draws cross"
    assert found.describe() == says
    sure = crossover(base, Series("c", {1.0: (0.5, 0.5, 0.5), 2.0: (0.8, 0.8, 0.8)}))
    assert sure.share == 0 and sure.describe() == "no crossover in range: it pays nowhere"


def test_differences_within_the_intervals_are_not_distinguishable():
    base, mine = series("b", {1: [9, 10, 11], 2: [9, 10, 11]}), series("a", {1: [9.2, 10, 11.2], 2: [9.1, 10.3, 11]})
    found = crossover(base, mine)
    assert (found.state, found.value) == ("unsure", None) and "not distinguishable" in found.describe()
    assert not any(g.sure for g in gains(base, mine).values())
    assert str(gains(base, mine)[2]).startswith("1.01x (0.8") and "not distinguishable" in str(gains(base, mine)[2])
    better = gains(base, series("a", {1: [13, 14, 15]}))[1]
    assert better.sure and better.low > 1 and "not" not in str(better)
    assert str(gains(series("b", {1: 10}), series("a", {1: 12}), measured=True)[1]) == "1.20x (1 run, no interval)"


def test_where_both_run_the_same_ops_no_crossover_is_looked_for():
    def alone(name, values, on_cpu):
        found = series(name, values)
        return Series(name, found.samples, {x: ({"cpu_rows": on_cpu if x > 1 else 0},) for x in found.xs})

    base, noisy = {0.5: [9, 9, 9], 1: [9, 9, 9]}, {0.5: [10, 10, 10], 1: [10, 10, 10]}
    found = crossover(alone("gpu_only", base, 0), alone("auto", noisy, 4))
    assert found.state == "same" and "no crossover is looked for" in found.describe()
    assert str(gains(alone("gpu_only", base, 0), alone("auto", noisy, 4))[1]) == "1.00x (the same ops)"
    later = (
        alone("gpu_only", {**base, 2: [9, 9, 9], 4: [9, 9, 9]}, 0),
        alone("auto", {**noisy, 2: [8, 8, 8], 4: [10, 10, 10]}, 4),
    )
    assert crossover(*later).value == pytest.approx(3)  # not at 0.5, where the same ops were faster


def test_lower_is_better_turns_the_gain_around():
    found = crossover(BASE, series("a", {1: 12.0, 2: 11.0, 4: 9.0, 8: 5.0}), lower_is_better=True)
    assert found.state == "found" and 2 < found.value < 4 and found.until is None
