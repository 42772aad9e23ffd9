"""A policy that only hands on behaves as the one it wraps: same steps, same tokens, by the fast path and without it."""

from __future__ import annotations

import pytest

from hybridattn.core.config import EngineConfig
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.engine.replay import Replay
from hybridattn.executor.executor import Executor
from hybridattn.executor.fast_path import FastExecutor
from hybridattn.planning.predict import by_simulation
from hybridattn.policies.base import HOOKS
from hybridattn.policies.delegate import Wrapper
from hybridattn.policies.registry import POLICIES, make_policy
from hybridattn.workload.arrivals import Poisson, synthetic
from hybridattn.workload.lengths import Uniform

SHAPE = ModelShape("small", 6, 512, 1536, 8, 2, 64, 4096, 4096)
PRICING = machine("t4", "xeon-8259cl-8c", "pcie3-x16")
COSTS = Costs(ModelCost(SHAPE, "fp16"), PRICING)
PREDICT = by_simulation()
CHOICES = [(name, {}) for name in POLICIES]
CHOICES += [("gpu_only", {"swap": True}), ("asymmetric", {"moves_block": True}), ("async_overlap", {"max_wait_us": 50})]
CHOICES += [("asymmetric", {"choice": "always"}), ("hybridattn.policies.rule:Rule", {"omega": 0.5})]


def serve(policy, resolves):
    device = SimDevice(PRICING, record=False)
    device.resolves = resolves
    config = EngineConfig(30, 200, 16, max_model_len=1024, max_num_seqs=24, max_num_batched_tokens=256, run_ahead=2)
    engine = Engine(PricedStages(SHAPE, "fp16"), device, policy, config)
    assert type(engine.executor) is (FastExecutor if resolves else Executor)
    steps = []
    served = Replay(
        engine, synthetic(16, Poisson(2000.0), Uniform(200, 0.9), Uniform(20, 0.9), 3), on_step=steps.append
    )
    return served.run(), steps


@pytest.mark.parametrize(("name", "options"), CHOICES)
def test_a_wrapper_behaves_as_what_it_wraps(name, options):
    def make():
        return make_policy(name, costs=COSTS, predict=PREDICT, **options)

    plain = serve(make(), resolves=True)
    assert len(plain[0].requests) == 16
    for policy in (Wrapper(make()), Wrapper(Wrapper(make()))):
        assert serve(policy, resolves=True) == plain
    assert serve(Wrapper(make()), resolves=False) == plain


def test_the_choices_use_every_hook_and_every_decision():
    """Otherwise the equalities above would say less than they seem to."""
    made = [make_policy(name, costs=COSTS, predict=PREDICT, **options) for name, options in CHOICES]
    assert {hook for policy in made for hook in policy.hooks} == HOOKS
    asymmetric = serve(make_policy("asymmetric", costs=COSTS, choice="always"), resolves=True)[1]
    assert sum(s.detours for s in asymmetric if s.gpu_rows) > 0 and sum(s.joins for s in asymmetric) > 0
    overlap = serve(make_policy("async_overlap"), resolves=True)[1]
    assert sum(s.skips for s in overlap) > 0
    offload = serve(make_policy("sync_offload"), resolves=True)[1]
    assert sum(s.waits for s in offload) > 0
