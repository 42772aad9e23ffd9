"""From timed ops to the tables of a profile, without measuring anything."""

from __future__ import annotations

import random

from hybridattn.calibration.bench import timed_of
from hybridattn.calibration.measure import micro_batch_op_cost
from hybridattn.calibration.samples import AXES, Timed, handovers, samples_of, thinned
from hybridattn.core.op import CPU, D2H, GPU, H2D, Op
from hybridattn.cost.catalog import shape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import measured_machine
from hybridattn.cost.profile import measured_profile
from hybridattn.cost.stages_cost import ModelCost

COST = ModelCost(shape("smollm2-135m"), "fp32")
LAYERS = COST.shape.num_layers


def took(lane, work):
    """A made-up machine: linear in what matters."""
    if work.kind == "linear":
        return 100_000 + 10_000 * work.rows
    if work.kind == "head":
        return 300_000 + 5_000 * work.rows
    if work.kind == "decode_attention":
        return (20_000 if lane == GPU else 9_000) + 30 * work.kv_tokens
    return 1_000 + work.num_bytes // 10 if work.kind == "copy" else 50_000 + int(work.flops / 1e5)


def a_step(rows, context):
    """The ops of one step of blocking offload with ``rows`` rows on each tier."""
    both, kv_tokens = 2 * rows, rows * context
    first = Timed(GPU, -1, COST.first(both), 100_000 + 10_000 * both + 7_000)
    middle = COST.linear(both)
    last = COST.last(both, both)
    ops = [first, Timed(GPU, LAYERS - 1, last, took(GPU, middle) + took(GPU, COST.head(both)))]
    for layer in range(LAYERS - 1):
        ops.append(Timed(GPU, layer, middle, took(GPU, middle)))
    for layer in range(LAYERS):
        for lane, work in (
            (GPU, COST.decode_attention(rows, kv_tokens)),
            (CPU, COST.decode_attention(rows, kv_tokens)),
            (D2H, COST.send_qkv(rows)),
            (H2D, COST.fetch_output(rows)),
        ):
            ops.append(Timed(lane, layer, work, took(lane, work)))
    return ops


def profile():
    timed = [op for rows in (1, 4, 16) for context in (64, 256, 512) for op in a_step(rows, context)]
    for chunk in (32, 128):
        timed += [Timed(GPU, 0, COST.prefill_attention(chunk, chunk), took(GPU, COST.prefill_attention(chunk, chunk)))]
    random.Random(0).shuffle(timed)
    return measured_profile("here", "f", COST.shape.name, "fp32", thinned(samples_of(timed)), AXES, {})


def test_the_tables_give_back_the_machine_that_was_measured():
    pricing = measured_machine(profile(), COST.shape.name, "fp32", "f")
    costs = Costs(COST, pricing)
    assert costs.linear_ns(20) == 100_000 + 10_000 * 20  # between the points
    assert costs.last_ns(8) == took(GPU, COST.linear(8)) + took(GPU, COST.head(8))
    assert costs.cpu_ns(4, 4 * 160) == 9_000 + 30 * 4 * 160
    assert costs.attention_ns(16, 16 * 512) == 20_000 + 30 * 16 * 512
    assert abs(costs.down_ns(8) - (1_000 + COST.send_qkv(8).num_bytes // 10)) <= 1


def test_each_point_is_one_sample_the_median_of_its_measurements():
    work = COST.linear(4)
    found = thinned(samples_of([Timed(GPU, 0, work, t) for t in (5, 1, 9)]))
    assert [(s.kind, s.rows, s.took_ns) for s in found] == [("linear", 4, 5)]


def test_held_out_errors_of_a_linear_machine_are_small():
    errors = profile().held_out_error
    assert errors["gpu.compute/linear"] < 0.01 and errors["cpu.attention/decode_attention"] < 0.01


def test_handovers_are_ninths_of_how_late_ops_begin_on_each_lane():
    work = COST.send_qkv(1)
    timed = [Timed(D2H, 0, work, 10, late_ns) for late_ns in range(90)]
    timed += [Timed(CPU, 0, work, 10, 40, woke_ns) for woke_ns in (30, 20, 90)]
    timed += [Timed(GPU, 0, work, 10, -3)]  # began before its submission returned: not late
    found = handovers(timed)
    assert found[D2H] == tuple([round(4.5 + 10 * i) for i in range(9)])  # the rare late ones count
    assert found[CPU] == (40,) * 9 and found[GPU] == (0,) * 9
    assert found["wake"][4] == 30 and found["wake"] == tuple(sorted(found["wake"]))


def test_an_op_is_late_by_what_passes_after_submission_lane_and_predecessors():
    class Future:
        def __init__(self, op, start_ns, end_ns):
            self.op, self.start_ns, self.end_ns = op, start_ns, end_ns

    def op(lane):
        return Op("x", lane, COST.send_qkv(1))

    down, cpu, up = op(D2H), op(CPU), op(H2D)
    first, second = Future(down, 12, 20), Future(down, 21, 30)
    attended, fetched = Future(cpu, 37, 60), Future(up, 80, 85)
    seen = [
        (down, first, (), 10),
        (down, second, (), 11),
        (cpu, attended, (second,), 12),
        (up, fetched, (attended,), 72),
    ]
    timed = timed_of(seen)
    assert [t.late_ns for t in timed] == [2, 1, 7, 8]  # submitted, lane, predecessor, submitted
    assert [t.woke_ns for t in timed] == [None, None, 12, None]


def test_an_op_of_a_micro_batch_takes_what_the_gpus_ops_take_more_beside_micro_batches():
    def steps(rows, extra_ns):
        gpu = [COST.linear(2 * rows), COST.decode_attention(rows, 64 * rows)]
        others = [Timed(lane, 0, COST.send_qkv(rows), 10) for lane in (D2H, CPU, H2D)]
        return [Timed(GPU, 0, work, took(GPU, work) + extra_ns) for work in gpu] + others

    measured = [steps(r, extra) for r, extra in ((1, 300), (2, 600), (4, 900))]
    assert (
        micro_batch_op_cost(measured, lambda work: took(GPU, work)).value == 400
    )  # 600 at each of two ops, three others
