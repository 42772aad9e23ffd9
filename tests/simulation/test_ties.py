"""What happens at one and the same virtual time, tie by tie."""

from __future__ import annotations

from hybridattn.core.config import EngineConfig
from hybridattn.core.op import CPU, D2H, GPU, SKIPPED, WAITED, Op, Work
from hybridattn.core.request import DeclaredTokens
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly

SHAPE = ModelShape("small", 2, 64, 128, 2, 2, 16, 64, 256)


def op(name, lane, took_ns, run=None, priority=WAITED):
    return Op(name, lane, Work("other", 0, took_ns, 1), run, priority=priority)


def price(op):
    return op.work.num_bytes


def test_an_op_that_ends_now_is_done():
    device = SimDevice(price)
    future = device.submit(op("a", GPU, 10))
    device.sleep_until_ns(9)
    assert not future.done()
    device.sleep_until_ns(10)
    assert future.done()


def test_an_op_starts_at_the_very_end_of_what_it_waits_for():
    device = SimDevice(price)
    down = device.submit(op("down", D2H, 10))
    assert device.submit(op("attend", CPU, 5), (down,)).start_ns == 10


def test_closures_that_end_together_run_in_order_of_submission():
    device, ran = SimDevice(price, execute=True), []
    for name, lane in (("first", D2H), ("second", GPU), ("third", CPU)):
        device.submit(op(name, lane, 10, lambda name=name: ran.append(name)))
    device.sleep_until_ns(10)
    assert ran == ["first", "second", "third"]


def test_a_skipped_op_that_starts_now_is_not_overtaken_but_one_that_starts_later_is():
    device = SimDevice(price)
    device.submit(op("running", CPU, 10, priority=SKIPPED))
    queued = device.submit(op("queued", CPU, 10, priority=SKIPPED))
    device.sleep_until_ns(10)  # `queued` starts at this very moment
    waited = device.submit(op("waited", CPU, 5))
    assert (queued.start_ns, waited.start_ns) == (10, 20)
    behind = device.submit(op("behind", CPU, 10, priority=SKIPPED))
    urgent = device.submit(op("urgent", CPU, 5))
    assert (urgent.start_ns, behind.start_ns) == (25, 30)


def engine(policy, resolves=True, **blocks):
    config = EngineConfig(
        blocks.get("gpu", 8), blocks.get("cpu", 0), 16, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64
    )
    device = SimDevice(lambda op: 100, record=False)
    device.resolves = resolves
    return Engine(PricedStages(SHAPE, "fp16"), device, policy, config)


def test_requests_that_arrive_together_are_served_in_the_order_in_which_they_were_added():
    made = engine(GpuOnly(), gpu=2)  # room for one at a time
    for _ in range(3):
        made.add(DeclaredTokens(20), 3, arrival_ns=50)
    made.run()
    records = made.take_records().requests
    assert [r.request_id for r in records] == ["r0", "r1", "r2"]
    assert records[0].end_ns < records[1].token_ns[0] < records[1].end_ns < records[2].token_ns[0]


def test_a_request_that_arrives_at_the_end_of_a_step_is_in_the_next_one():
    """Also where the step is one of many that were priced as one step."""
    for resolves in (True, False):
        made = engine(GpuOnly(), resolves)
        first = made.add(DeclaredTokens(20), 8)
        step_ns = 100 * (1 + 2 * SHAPE.num_layers)
        made.add(DeclaredTokens(20), 2, arrival_ns=3 * step_ns)
        made.run()
        second = made.take_records().requests[0]
        assert second.request_id == "r1" and second.scheduled_ns == 3 * step_ns
        assert first.token_ns[3] == second.token_ns[0] == 4 * step_ns


def steps_with(cpu_ns):
    device = SimDevice(lambda op: {GPU: 100, CPU: cpu_ns}.get(op.lane, 0))
    config = EngineConfig(8, 8, 16, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64)
    made = Engine(PricedStages(SHAPE, "fp16"), device, AsyncOverlap(cpu_fraction=0.5, same_step=False), config)
    made.add(DeclaredTokens(10), 60)
    made.add(DeclaredTokens(10), 6)  # the second lives on the CPU tier
    made.run()
    last = next(r for r in made.take_records().requests if r.tier == "cpu")
    return last.end_ns, made.drain()


def test_attention_that_returns_as_the_gpu_comes_by_joins():
    """A step takes 500 ns. Attention of 500 ns is back at the very moment the GPU is at its layer again: it joins. One
    nanosecond more costs it a whole step."""
    on_time, spans = steps_with(500)
    begins = {s.start_ns for s in spans if s.lane == GPU and s.name == "attention"}
    assert sum(s.end_ns in begins for s in spans if s.lane == CPU) >= 5  # the tie does occur
    late, _ = steps_with(501)
    assert late - on_time >= 5 * 500
