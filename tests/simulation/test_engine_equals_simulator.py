"""The same requests with the same step costs, once computing and once only priced: same steps, same times (M14)."""

from __future__ import annotations

import random

import pytest
from toy_stages import ToyStages, reference

from hybridattn.core.config import EngineConfig
from hybridattn.core.op import CPU, D2H, GPU, H2D, Op, Work
from hybridattn.core.shapes import ModelShape
from hybridattn.core.trace import violations
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.policies.registry import make_policy

LAYERS, PAGE = 4, 16
SHAPE = ModelShape("toy", LAYERS, 64, 128, 2, 2, 16, 50, 512)


def cost(op):
    """A price that depends on what both kinds of stages say alike: lane, rows, layer."""
    if op.lane == GPU:
        return 700 + 13 * op.work.rows
    return (900 if op.lane == CPU else 90) + 17 * op.work.rows


def run(stages, device, policy, jobs):
    config = EngineConfig(12, 40, PAGE, max_model_len=200, max_num_seqs=8, max_num_batched_tokens=24)
    engine = Engine(stages, device, policy, config)
    for prompt, count, arrival_ns in jobs:
        engine.add(prompt, count, arrival_ns=arrival_ns)
    engine.run()
    return engine.take_records()


class MovingToy(ToyStages):
    """The toy model with moves of whole requests between the tiers."""

    def move(self, request, source, blocks, tokens):
        there, here = (self.gpu, self.cpu) if source == "gpu" else (self.cpu, self.gpu)
        target = list(request.pages.arriving)

        def copy():
            for layer in range(self.num_layers):
                for p in range(tokens):
                    here.values[layer][here.slot(target, p)] = there.values[layer][there.slot(blocks, p)]

        lane = D2H if source == "gpu" else H2D
        return Op("move k,v", lane, Work("copy", 0, 0, tokens), copy, requests=(request.request_id,))


class RowsOnly(PricedStages):
    """Priced stages whose attention counts rows as the toy's does: a prompt chunk by its tokens."""

    def begin(self, batch):
        super().begin(batch)
        self._attention.rows = batch.num_tokens


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("gpu_only", {}),
        ("sync_offload", {"cpu_fraction": 0.5}),
        ("async_overlap", {"cpu_fraction": 0.5}),
        ("async_overlap", {"cpu_fraction": 0.4, "same_step": False, "max_micro_batches": 2}),
        ("async_overlap", {"cpu_fraction": 0.4, "max_wait_us": 0.3}),
        ("cpu_only", {}),
        ("asymmetric", {"cpu_fraction": 0.6}),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_M14_executed_and_priced_runs_have_the_same_steps_and_times(policy, options, seed):
    rng = random.Random(seed)
    jobs = [
        ([rng.randrange(50) for _ in range(rng.randint(3, 60))], rng.randint(1, 9), rng.randint(0, 60_000))
        for _ in range(7)
    ]
    toy = MovingToy(LAYERS, 12, 40, PAGE, 8)
    executed = run(toy, SimDevice(cost, execute=True), make_policy(policy, **options), jobs)
    priced = run(RowsOnly(SHAPE, "fp16"), SimDevice(cost, record=False), make_policy(policy, **options), jobs)
    assert executed.steps == priced.steps
    assert executed.requests == priced.requests
    assert len(executed.requests) == len(jobs)


def test_M14_three_requests_by_hand():
    """Two steps of one chunk each, then decode: 3 requests of 8 tokens, 24 a step, all in the first step."""
    device = SimDevice(lambda op: 1000 if op.lane == GPU else 0, execute=True)
    jobs = [([1] * 8, 3, 0)] * 3
    records = run(ToyStages(LAYERS, 12, 40, PAGE, 8), device, make_policy("gpu_only"), jobs)
    one_step = 1000 * (1 + 2 * LAYERS)  # embedding and pre(0), then attention and linear of each layer
    assert len(records.steps) == 3
    assert [r.token_ns for r in records.requests] == [(one_step, 2 * one_step, 3 * one_step)] * 3


def serve_with_moves(seed, cpu_blocks):
    """Serve 9 requests on a small GPU tier; how many times one moved."""
    rng = random.Random(seed)
    jobs = [([rng.randrange(50) for _ in range(rng.randint(3, 50))], rng.randint(4, 30)) for _ in range(9)]
    durations = random.Random(seed)
    device = SimDevice(lambda op: durations.randint(0, 900), execute=True)
    policy = make_policy("asymmetric")
    policy.swap_in_below = 0.8
    config = EngineConfig(8, cpu_blocks, PAGE, max_model_len=128, max_num_seqs=12, max_num_batched_tokens=32)
    engine = Engine(MovingToy(LAYERS, 8, cpu_blocks, PAGE, 12), device, policy, config)
    requests = [engine.add(p, n) for p, n in jobs]
    engine.run()
    spans = engine.drain()
    assert violations(spans) == []
    assert all(pool.num_free == pool.num_blocks for pool in engine.kv.pools.values())
    assert [r.token_ids[r.num_prompt :] for r in requests] == [reference(p, n, LAYERS) for p, n in jobs]
    return sum(s.name == "move k,v" for s in spans)


@pytest.mark.parametrize("cpu_blocks", [8, 40])
def test_requests_that_move_between_the_tiers_keep_their_text(cpu_blocks):
    assert sum(serve_with_moves(seed, cpu_blocks) for seed in range(6)) > 0


def test_outputs_of_the_executed_run_are_right():
    jobs = [([3, 1, 4], 5, 0), ([1, 5, 9, 2], 4, 0)]
    engine = Engine(
        ToyStages(LAYERS, 12, 40, PAGE, 8),
        SimDevice(cost, execute=True),
        make_policy("sync_offload", cpu_fraction=0.5),
        EngineConfig(12, 40, PAGE, max_model_len=200, max_num_seqs=8, max_num_batched_tokens=24),
    )  # fmt: skip
    requests = [engine.add(p, n) for p, n, _ in jobs]
    engine.run()
    assert [r.token_ids[r.num_prompt :] for r in requests] == [reference(p, n, LAYERS) for p, n, _ in jobs]
