"""The simulator's short cuts (equal layers, quiet steps) change nothing: same steps, same times per token."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.config import EngineConfig
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.engine.replay import Replay
from hybridattn.planning.predict import by_simulation
from hybridattn.policies.registry import make_policy
from hybridattn.workload.arrivals import ClosedLoop, Poisson, synthetic
from hybridattn.workload.lengths import Uniform

SHAPE = ModelShape("small", 6, 512, 1536, 8, 2, 64, 4096, 4096)
PRICING = machine("t4", "xeon-8259cl-8c", "pcie3-x16")
COSTS = Costs(ModelCost(SHAPE, "fp16"), PRICING)


def serve(policy, workload, *, slow, submit_ns=0, run_ahead=2, gpu_blocks=30, **options):
    device = SimDevice(PRICING, record=False, submit_ns=submit_ns)
    device.resolves = not slow
    chosen = make_policy(policy, costs=COSTS, predict=by_simulation(), **options)
    config = EngineConfig(
        gpu_blocks, 60, 16, max_model_len=1024, max_num_seqs=24, max_num_batched_tokens=128, run_ahead=run_ahead
    )
    engine = Engine(PricedStages(SHAPE, "fp16"), device, chosen, config)
    steps = []
    served = Replay(engine, workload, on_step=steps.append).run()
    return served, steps


POLICIES = [
    ("gpu_only", {}),
    ("async_overlap", {}),
    ("async_overlap", {"same_step": False, "max_micro_batches": 2}),
    ("async_overlap", {"max_wait_us": 100, "max_micro_batches": 2}),
    ("sync_offload", {"max_rows": 3}),
    ("cpu_only", {}),
    ("asymmetric", {}),
    ("hybridattn.policies.rule:Rule", {"omega": 0.5}),
]


@pytest.mark.parametrize(("policy", "options"), POLICIES)
@given(seed=st.integers(0, 10**6), rate=st.sampled_from([5.0, 60.0, 2000.0]), run_ahead=st.integers(1, 3))
@settings(max_examples=8, deadline=None)
def test_the_short_cuts_change_nothing(policy, options, seed, rate, run_ahead):
    workload = synthetic(14, Poisson(rate), Uniform(40, 0.9), Uniform(12, 0.9), seed)
    for submit_ns in (0, 3_000):
        fast, slow = (
            serve(policy, workload, slow=s, submit_ns=submit_ns, run_ahead=run_ahead, **options) for s in (0, 1)
        )
        assert fast == slow
        assert len(fast[0].requests) == 14


def test_a_closed_loop_and_preemptions_too():
    workload = synthetic(30, ClosedLoop(9, think_ns=10**6), Uniform(60, 0.5), Uniform(40, 0.5), seed=3)
    fast, slow = (serve("gpu_only", workload, slow=s, gpu_blocks=22) for s in (False, True))
    assert fast == slow
    assert sum(r.preemptions for r in fast[0].requests) > 0


def test_fewer_steps_are_taken():
    """The short cut is taken at all: the device is asked for far fewer ops."""
    workload = synthetic(6, Poisson(50.0), Uniform(40), Uniform(60), seed=1)
    counts = []
    for slow in (False, True):
        asked = []
        device = SimDevice(lambda op, asked=asked: asked.append(op) or PRICING.price_ns(op), record=False)
        device.resolves = not slow
        engine = Engine(
            PricedStages(SHAPE, "fp16"), device, make_policy("gpu_only"),
            EngineConfig(60, 0, 16, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=256),
        )  # fmt: skip
        Replay(engine, workload).run()
        counts.append(len(asked))
    assert counts[0] * 3 < counts[1]


def test_records_compare_by_value():
    """Otherwise the equalities above would say nothing."""
    workload = synthetic(2, Poisson(50.0), Uniform(40), Uniform(6), seed=1)
    served, _ = serve("gpu_only", workload, slow=True)
    changed = dataclasses.replace(served.requests[0], end_ns=served.requests[0].end_ns + 1)
    assert changed != served.requests[0]
