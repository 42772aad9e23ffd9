"""Overlap, bubbles, polls, layers per step and stretch, against pictures counted by hand."""

import pytest

from hybridattn.core.device import Span
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D
from hybridattn.core.records import StepRecord
from hybridattn.metrics.overlap import (
    busy_ns,
    gpu_bubble_ns,
    layers_per_step,
    overlap_fraction,
    stretch,
    summarize_overlap,
)


def span(lane, start, end, num_bytes=0, name="op"):
    return Span(lane, name, start, end, num_bytes=num_bytes)


def a_step(index=0, start=0, end=100, gpu_rows=4, prefill=0, micro_batches=0, advanced=0, made=0, hit=0, **decisions):
    decisions = {"joins": 0, "skips": 0, "waits": 0, "detours": 0} | decisions
    return StepRecord(
        index, start, end, gpu_rows, prefill, 8 * micro_batches, micro_batches, advanced, made, hit, **decisions
    )


#  gpu   |0####40|     |60##80|        CPU attention [20, 100): hidden in [20, 40) and [60, 80): 40 of 80
#  cpu       |20############100|
PICTURE = [span(GPU, 0, 40), span(GPU, 60, 80), span(CPU, 20, 100), span(D2H, 10, 20, 64), span(H2D, 100, 110, 32)]


def test_overlap_and_bubble_of_the_picture():
    assert overlap_fraction(PICTURE) == pytest.approx(0.5)
    assert gpu_bubble_ns(PICTURE) == 20
    found = summarize_overlap([a_step(made=5, hit=2, skips=3, joins=2)], PICTURE)
    assert (found.cpu_busy_ns, found.gpu_busy_ns, found.d2h_bytes, found.h2d_bytes) == (80, 60, 64, 32)
    assert (found.d2h_busy_ns, found.h2d_busy_ns) == (10, 10)
    assert (found.polls_made, found.polls_hit, found.polls_missed, found.joins, found.skips) == (5, 2, 3, 2, 3)
    assert found.gpu_bubble_fraction == pytest.approx(20 / 80)
    assert found.poll_hit_fraction == pytest.approx(0.4)


def test_what_is_not_there_is_missing():
    assert overlap_fraction([span(GPU, 0, 10)]) is None
    assert overlap_fraction([span(CPU, 0, 10)]) == 0.0
    assert gpu_bubble_ns([span(CPU, 0, 10)]) is None
    empty = summarize_overlap([], [])
    assert empty.overlap_fraction is empty.gpu_bubble_fraction is empty.poll_hit_fraction is empty.stretch is None
    assert empty.layers_per_step is None


def test_busy_time_counts_covered_time_once():
    assert busy_ns([span(D2H, 0, 10), span(H2D, 5, 12), span(GPU, 20, 20), span(GPU, 30, 31)]) == 13


def test_layers_per_step_of_one_layer_overlap():
    # One micro-batch, three layers: it advances in three steps of four (the fourth starts its next token).
    num_layers = 3
    steps = [a_step(i, micro_batches=1, advanced=0 if i % (num_layers + 1) == num_layers else 1) for i in range(8)]
    assert layers_per_step(steps) == pytest.approx(num_layers / (num_layers + 1))
    # A round of detours is no step: it would hide how far joins alone carry a micro-batch.
    assert layers_per_step([*steps, a_step(gpu_rows=0, micro_batches=1, advanced=3)]) == pytest.approx(0.75)


def test_stretch_compares_steps_of_equal_gpu_rows():
    alone = [a_step(end=100, gpu_rows=4), a_step(end=200, gpu_rows=8)]
    mixed = [a_step(end=125, gpu_rows=4, micro_batches=2), a_step(end=250, gpu_rows=8, micro_batches=2)]
    other = [a_step(end=900, gpu_rows=4, prefill=64, micro_batches=1), a_step(end=900, gpu_rows=16, micro_batches=1)]
    assert stretch(alone + mixed + other) == pytest.approx(0.25)
    assert stretch(mixed) is None
    assert stretch(mixed[:1], alone_ns=50) == pytest.approx(1.5)
    with pytest.raises(InputError, match="alone_ns must be positive, got 0"):
        stretch(mixed, alone_ns=0)
