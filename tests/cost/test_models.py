"""Roofline, table, correction and pricing: the models behind a price."""

import dataclasses
import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, Op, Work
from hybridattn.cost.correction import Correction
from hybridattn.cost.pricing import Constant, Pricing, Together
from hybridattn.cost.roofline import Efficiency, Roofline
from hybridattn.cost.table import ExtrapolationWarning, Sample, Table, held_out_error, table_from_samples


def work(kind="linear", flops=0.0, num_bytes=0, rows=1, kv_tokens=0):
    return Work(kind, flops, num_bytes, rows, kv_tokens)


ROOFLINE = Roofline(100e12, 500e9, 1000, {"linear": Efficiency(0.5, 0.8)})


def test_roofline_takes_the_slower_of_flops_and_bytes():
    # 400 GB/s and 50 TFLOPS are reached: 4 MB take 10 us, 5e9 flop 100 us.
    assert ROOFLINE.price_ns(work(num_bytes=4_000_000)) == 11_000
    assert ROOFLINE.price_ns(work(flops=5e9, num_bytes=4_000_000)) == 101_000
    knee = work(flops=125 * 4e6, num_bytes=4_000_000)
    assert ROOFLINE.price_ns(knee) == 11_000


@settings(deadline=None)
@given(st.floats(0, 1e15), st.integers(0, 10**11), st.floats(0, 1e15), st.integers(0, 10**11))
def test_more_work_never_takes_less_time(flops, num_bytes, more_flops, more_bytes):
    less = ROOFLINE.price_ns(work(flops=flops, num_bytes=num_bytes))
    assert (
        ROOFLINE.launch_ns
        <= less
        <= ROOFLINE.price_ns(work(flops=flops + more_flops, num_bytes=num_bytes + more_bytes))
    )


def test_roofline_refuses_what_it_has_no_efficiency_for():
    with pytest.raises(InputError, match="no roofline for Work\\(copy.*this one prices linear"):
        ROOFLINE.price_ns(work("copy"))
    with pytest.raises(InputError, match="bandwidth must be positive and finite, got 0"):
        Roofline(1e12, 0, 0, {})
    with pytest.raises(InputError, match=r"efficiency memory must be in \(0, 1\], got 1.5"):
        Efficiency(0.5, 1.5)


LINE = Table(("rows",), ((1, 4, 16),), (100, 130, 250))
GRID = Table(("rows", "kv_per_row"), ((1, 3), (0, 100, 200)), ((10, 20, 40), (30, 60, 120)))


def test_table_hits_its_points_and_interpolates_between_them():
    assert [LINE.price_ns(work(rows=r)) for r in (1, 2, 4, 10, 16)] == [100, 110, 130, 190, 250]
    assert GRID.price_ns(work(rows=3, kv_tokens=300)) == 60
    assert GRID.price_ns(work(rows=2, kv_tokens=300)) == 60  # halfway in rows and in context: (20+40+60+120) / 4
    assert GRID.price_ns(work(rows=2, kv_tokens=0)) == 20


def test_extrapolation_continues_the_line_and_warns_once_per_table():
    table = dataclasses.replace(LINE)
    with pytest.warns(ExtrapolationWarning, match="rows 32 lies outside the measured 1 to 16"):
        assert table.price_ns(work(rows=32)) == 410
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.price_ns(work(rows=64)) == 730
    steep = Table(("num_bytes",), ((10, 20),), (0, 100))
    with pytest.warns(ExtrapolationWarning):
        assert steep.price_ns(work(num_bytes=0)) == 0  # never negative


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=6, unique=True), st.floats(0, 1), st.floats(0.1, 50))
def test_a_table_of_a_line_is_that_line(points, at, slope):
    points = tuple(sorted(points))
    table = Table(("num_bytes",), (points,), tuple(slope * p for p in points))
    value = points[0] + at * (points[-1] - points[0])
    assert table.price_ns(work(num_bytes=value)) == pytest.approx(slope * value, abs=1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((("rows",), ((1,),), (5,)), "at least two increasing points"),
        ((("rows",), ((4, 1),), (5, 6)), "at least two increasing points"),
        ((("colour",), ((1, 2),), (5, 6)), "table axis 'colour' is none of"),
        ((("rows",), ((1, 2),), (5,)), r"prices do not have the shape \(2,\)"),
        ((("rows", "flops"), ((1, 2), (1, 2)), ((5, 6), (7,))), r"prices do not have the shape \(2, 2\)"),
        ((("rows",), ((1, 2),), (5, -6)), "a price is negative"),
        ((("rows", "flops", "num_bytes"), ((1, 2),), (5, 6)), "one or two axes"),
    ],
)
def test_a_bad_table_is_refused(args, message):
    with pytest.raises(InputError, match=message):
        Table(*args)


def sample(rows, took_ns, kv_tokens=0):
    return Sample(GPU, "linear", rows, kv_tokens, 0.0, 0, took_ns)


def test_a_table_goes_through_the_medians_of_its_samples():
    table = table_from_samples([sample(4, 50), sample(1, 10), sample(1, 1000), sample(1, 12)], ("rows",))
    assert table == Table(("rows",), ((1, 4),), (12, 50))
    grid = [sample(r, r * 10 + kv, r * kv) for r in (1, 2) for kv in (5, 9)]
    assert table_from_samples(grid, ("rows", "kv_per_row")).price_ns(work(rows=2, kv_tokens=18)) == 29
    with pytest.raises(InputError, match=r"no sample at \(2, 9\)"):
        table_from_samples(grid[:-1], ("rows", "kv_per_row"))
    with pytest.raises(InputError, match="a table needs samples"):
        table_from_samples([], ("rows",))


def test_held_out_error_predicts_each_inner_point_from_the_others():
    line = [sample(r, 100 * r) for r in (1, 2, 5)]
    assert held_out_error(line, ("rows",)) == pytest.approx(0)
    bent = [sample(1, 100), sample(2, 250), sample(3, 300)]
    assert held_out_error(bent, ("rows",)) == pytest.approx(50 / 250)
    assert held_out_error(bent[:2], ("rows",)) is None
    # Two axes: the product of rows and context is bilinear, so every grid line follows from its neighbours.
    grid = [sample(r, r * c, r * c) for r in (1, 2, 7) for c in (10, 30, 90)]
    assert held_out_error(grid, ("rows", "kv_per_row")) == pytest.approx(0)
    grid[4] = sample(2, 2 * 60, 2 * 30)  # the point in the middle: twice what its neighbours say
    assert held_out_error(grid, ("rows", "kv_per_row")) > 0.05


def test_correction_converges_and_believes_no_absurd_measurement():
    learnt = Correction(weight=0.5, limit=4)
    assert learnt.factor(CPU, "decode_attention") == 1.0
    for _ in range(20):
        learnt.observe(CPU, "decode_attention", 100, 150)
    assert learnt.factor(CPU, "decode_attention") == pytest.approx(1.5, rel=1e-4)
    assert learnt.factor(GPU, "decode_attention") == 1.0
    learnt.observe(CPU, "decode_attention", 100, 10**9)
    assert learnt.factor(CPU, "decode_attention") == pytest.approx(1.5 + 0.5 * (4 - 1.5), rel=1e-3)
    learnt.observe(GPU, "linear", 0, 5)
    assert learnt.factor(GPU, "linear") == 1.0
    with pytest.raises(InputError, match=r"weight must be in \(0, 1\], got 0"):
        Correction(weight=0)
    with pytest.raises(InputError, match="measured -1 ns"):
        learnt.observe(CPU, "decode_attention", 1, -1)


def op(lane, what):
    return Op("x", lane, what)


MODELS = {(GPU, "linear"): ROOFLINE, (CPU, "decode_attention"): Constant(1000), (D2H, "copy"): Constant(70)}


def test_pricing_finds_the_model_of_lane_and_kind():
    pricing = Pricing("m", "f", MODELS)
    assert pricing.price_ns(op(GPU, work(num_bytes=4_000_000))) == 11_000
    assert pricing.price_ns(op(CPU, work("decode_attention"))) == pricing.work_ns(CPU, work("decode_attention")) == 1000


@pytest.mark.parametrize(("lane", "kind"), [(CPU, "prefill_attention"), (D2H, "linear"), (GPU, "copy")])
def test_pricing_refuses_what_was_neither_measured_nor_modelled(lane, kind):
    with pytest.raises(InputError, match=f"pricing m has no price for '{kind}' on lane {lane}: neither measured nor"):
        Pricing("m", "f", MODELS).price_ns(op(lane, work(kind)))


def test_kernels_of_one_op_add_up():
    parts = (work(num_bytes=4_000_000), work(flops=5e9, rows=7))
    together = Together(*parts)
    assert (together.flops, together.num_bytes, together.rows) == (5e9, 4_000_000, 7)
    # One roofline over the sums would say 101 us: the bytes would hide under the flops of another kernel.
    assert Pricing("m", "f", MODELS).price_ns(op(GPU, together)) == 11_000 + 101_000


def test_contention_multiplies_the_price():
    pricing = Pricing("m", "f", MODELS, {(CPU, D2H): 1.5})
    attention = op(CPU, work("decode_attention"))
    assert pricing.price_ns(attention) == 1000
    assert pricing.price_ns(attention, busy=(D2H,)) == 1500
    assert pricing.price_ns(attention, busy=(GPU,)) == 1000
    with pytest.raises(InputError, match="contention of cpu.attention with gpu.d2h is 0.5, must be >= 1"):
        Pricing("m", "f", MODELS, {(CPU, D2H): 0.5})
    with pytest.raises(InputError, match="contention of cpu.attention with gpu.d2h is nan"):
        Pricing("m", "f", MODELS, {(CPU, D2H): math.nan})
    with pytest.raises(InputError, match="lane 'gpu.magic' is none of"):
        Pricing("m", "f", {("gpu.magic", "linear"): ROOFLINE})
