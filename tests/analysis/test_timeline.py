from __future__ import annotations

from hybridattn.analysis.timeline import busiest_window, draw_timeline
from hybridattn.core.device import Span
from hybridattn.core.op import CPU, GPU
from hybridattn.core.trace import Trace


def trace(*spans):
    return Trace("sim", "simulated", "t4", "abc", list(spans))


def test_the_window_is_where_both_lanes_are_busy_longest():
    found = busiest_window(
        trace(
            Span(GPU, "linear", 0, 10), Span(CPU, "attention", 8, 20),  # 2 together
            Span(GPU, "linear", 100, 140), Span(CPU, "attention", 105, 135),  # 30 together
            Span(GPU, "attention", 200, 210),
        ),
        50,
    )  # fmt: skip
    assert found == (105, 155)


def test_mixed_steps_are_preferred_to_the_tail_of_cpu_rows():
    spans = [Span(GPU, "attention", 10, 12), Span(GPU, "linear", 12, 20), Span(CPU, "attention", 9, 13)]
    tail = [Span(GPU, "linear", 100, 200), Span(CPU, "attention", 100, 200)]
    assert busiest_window(trace(*spans, *tail), 50) == (9, 59)


def test_a_trace_without_cpu_attention_starts_at_its_beginning():
    assert busiest_window(trace(Span(GPU, "linear", 7, 9)), 5) == (7, 12)


def test_a_picture_is_drawn_also_of_an_empty_window(tmp_path):
    draw_timeline(trace(), tmp_path / "a.png", (0, 10))
    draw_timeline(trace(Span(GPU, "linear", 2, 4), Span(CPU, "attention", 3, 5)), tmp_path / "b.svg", (0, 10), "title")
    assert (tmp_path / "a.png").stat().st_size > 1000
    svg = (tmp_path / "b.svg").read_text()
    assert svg.startswith("<?xml")
