"""The closed forms against the published numbers, against each other, and against a count of steps."""

import inspect
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.published import published_rows
from hybridattn.core.errors import InputError
from hybridattn.cost import crossover

ratios = st.floats(0.01, 100)


def test_eq6_thresholds_as_published():
    rows = published_rows("eq6_thresholds")
    assert len(rows) == 8
    for row in rows:
        expected = float(row["max_gpu_over_cpu_rate"])
        assert crossover.eq6_threshold(float(row["t_att_over_t_lin"])) == pytest.approx(expected, rel=1e-8)


def test_numbers_of_the_theory():
    assert crossover.capacity_gain_bound(1, 3) == pytest.approx(1.14, abs=0.005)
    assert crossover.capacity_gain_bound(0.5, 20) == pytest.approx(1.02, abs=0.005)
    assert crossover.eq6_threshold(0.1) == pytest.approx(23.1)
    assert crossover.eq6_minimum() == pytest.approx((1.41421, 5.82843), abs=1e-5)
    assert 1 / crossover.eq6_threshold(0.5) == pytest.approx(0.133, abs=5e-4)
    assert 1 / crossover.eq6_minimum()[1] == pytest.approx(0.172, abs=5e-4)
    assert crossover.overlap_crossover(0.25, 32) == pytest.approx(8.25)
    assert crossover.overlap_advance(32) == pytest.approx(32 / 33)


@given(ratios)
def test_eq6_has_its_minimum_at_sqrt_two(x):
    assert crossover.eq6_threshold(x) >= crossover.eq6_minimum()[1] - 1e-9


@settings(deadline=None)
@given(x=ratios, r=ratios)
def test_asymmetric_pipelining_gains_exactly_below_the_threshold(x, r):
    # From the rates themselves, with T_l = 1 and N_C = 1.
    t_l, t_a, n_g, n_c = 1.0, x, r, 1.0
    gpu_only = n_g * t_a / (t_l + t_a)
    pipelined = (n_g * t_a + n_c * (2 * t_l + t_a)) / (2 * t_l + t_a)
    assert crossover.ap_gain(x, r) == pytest.approx(pipelined / gpu_only)
    threshold = crossover.eq6_threshold(x)
    if not math.isclose(r, threshold, rel_tol=1e-9):
        assert (pipelined > gpu_only) == (r < threshold)


@settings(deadline=None)
@given(x=ratios, r=ratios, f=st.floats(0, 20))
def test_prefill_makes_asymmetric_pipelining_pay_for_slower_cpus(x, r, f):
    window, alone = 2 + x + f, 1 + x + f
    gains = r * x / window + 1 > r * x / alone
    if not math.isclose(r, crossover.eq6_threshold(x, f), rel_tol=1e-9):
        assert gains == (r < crossover.eq6_threshold(x, f))
    assert crossover.eq6_threshold(x, f) >= crossover.eq6_threshold(x)


@given(x=ratios)
def test_minimum_request_ratio_of_asymmetric_pipelining(x):
    ratio = crossover.ap_min_request_ratio(x)
    for factor, pays in ((0.99, False), (1.01, True)):
        assert ((1 + ratio * factor) / (2 + x) > 1 / (1 + x)) == pays


@settings(deadline=None)
@given(d=st.floats(0.001, 2), num_layers=st.integers(1, 200))
def test_overlap_gains_exactly_above_its_crossover(d, num_layers):
    ratio = crossover.overlap_crossover(d, num_layers)
    assert crossover.overlap_gain(ratio, d, num_layers) == pytest.approx(1)
    assert crossover.overlap_gain(ratio * 1.01, d, num_layers) > 1 > crossover.overlap_gain(ratio * 0.99, d, num_layers)


@pytest.mark.parametrize("num_layers", [1, 3, 32])
def test_a_micro_batch_that_joins_once_per_step_needs_a_step_more_than_layers(num_layers):
    # The GPU visits layers 0..L-1 in every step. A micro-batch standing at a layer joins when the GPU comes by, and its
    # attention of the next layer is never back before the GPU has passed there. A new token starts at the end of a
    # step, so that its layer 0 can first be joined in the step after.
    steps, tokens, standing_at, usable_from = 0, 0, 0, 1
    while tokens < 100:
        for layer in range(num_layers):
            if standing_at == layer and steps >= usable_from:
                standing_at, usable_from = layer + 1, steps + 1
        if standing_at == num_layers:
            # Sampled after the last layer; launched with the next step, whose layer 0 is passed before it is back.
            tokens, standing_at, usable_from = tokens + 1, 0, steps + 2
        steps += 1
    assert tokens * num_layers / (steps - 1) == pytest.approx(crossover.overlap_advance(num_layers), rel=0.02)


def test_no_crossing_once_the_cpu_is_saturated():
    # d = 0.25: the CPU must deliver a fifth of the GPU-only rate.
    assert crossover.overlap_crossing_exists(cpu_rate=21, gpu_only_rate=100, d=0.25)
    assert not crossover.overlap_crossing_exists(cpu_rate=19, gpu_only_rate=100, d=0.25)
    # The same from the definitions: at the crossover a B_C row-layers cost c each within (1 + d) P.
    num_layers, d, gpu_rows, step_s = 32, 0.25, 10, 0.1
    cpu_rows = crossover.overlap_crossover(d, num_layers) * gpu_rows
    rate = crossover.overlap_advance(num_layers) * cpu_rows / num_layers / ((1 + d) * step_s)
    assert crossover.overlap_crossing_exists(rate * 1.001, gpu_rows / step_s, d)
    assert not crossover.overlap_crossing_exists(rate * 0.999, gpu_rows / step_s, d)


@settings(deadline=None)
@given(x=ratios, r=ratios)
def test_bounds_are_bounds(x, r):
    assert crossover.capacity_gain_bound(x, r) <= crossover.upper_bound_gain(x, r) + 1e-12
    assert crossover.ap_gain(x, r) < crossover.upper_bound_gain(x, r)
    assert crossover.full_offload_gain(x, r) == pytest.approx(crossover.upper_bound_gain(x, r) - 1, rel=1e-6)


def test_neo_iteration_takes_the_longer_of_each_pair():
    assert crossover.neo_iteration_ns(10, (5, 4), 3, (6, 2)) == 10 * (5 + 7)
    assert crossover.neo_iteration_ns(10, (5, 4), 3, (9, 8)) == 10 * (8 + 9)
    assert crossover.neo_iteration_ns(2, (5, 0), 3, (0, 0)) == 2 * 8


def test_rows_and_windows():
    assert crossover.saturating_rows(1000, 10) == 100
    assert crossover.same_step_rows(960, 3, 32) == 10
    assert crossover.detour_min_rows(30, 0.5) == pytest.approx(20)
    assert crossover.mixed_window_ns(1, 2, 3, 4) == 10
    assert crossover.exposed_stretch(200, 800) == 0.25


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: crossover.eq6_threshold(0), "x must be positive and finite, got 0"),
        (lambda: crossover.eq6_threshold(1, -1), "f must be at least 0 and finite, got -1"),
        (lambda: crossover.capacity_gain_bound(1, math.inf), "r must be positive and finite, got inf"),
        (lambda: crossover.overlap_crossover(math.nan, 32), "d must be at least 0 and finite, got nan"),
        (lambda: crossover.overlap_advance(0), "num_layers must be positive"),
        (lambda: crossover.neo_iteration_ns(1, (1, -2), 3, (4, 5)), "linear_1 must be at least 0"),
    ],
)
def test_bad_input_names_the_argument(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_the_document_quotes_what_the_command_prints():
    docs = Path(__file__).parents[2] / "docs"
    printed = crossover.report().rstrip()
    assert printed in (docs / "results" / "closed_forms.md").read_text()
    prose = (docs / "crossover.md").read_text().split("## By simulation")[0]  # what follows was simulated
    quoted = set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", re.sub(r"arXiv \d+\.\d+", "", prose)))
    known = set(re.findall(r"\d+\.\d+", printed))
    # 0.5 for 0.50 is the same number; what no table holds has no business in the text.
    assert {q for q in quoted if not {q, q + "0"} & known} == set()


def test_the_document_derives_every_closed_form():
    document = (Path(__file__).parents[2] / "docs" / "crossover.md").read_text()
    own = {n for n, f in vars(crossover).items() if inspect.isfunction(f) and f.__module__ == crossover.__name__}
    helpers = {"ap_gain", "eq6_minimum", "overlap_gain", "exposed_stretch", "layer_ns", "report"}
    assert {n for n in own - helpers if not n.startswith("_") and n not in document} == set()


def test_an_eight_to_one_crossover_is_a_quarter_of_the_layer_exposed():
    for setting in crossover.LAYER_SETTINGS:
        whole = sum(crossover.layer_ns(*setting))
        d = crossover.exposed_stretch(whole // 4, whole)
        assert crossover.overlap_crossover(d, 32) == pytest.approx(8.25, rel=1e-4)
    a10 = sum(crossover.layer_ns(*crossover.LAYER_SETTINGS[1]))
    assert a10 / 4 == pytest.approx(300_000, rel=0.1)
