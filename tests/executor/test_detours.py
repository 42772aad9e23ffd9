"""How the driver looks for micro-batches that may take a detour."""

from __future__ import annotations

from collections import Counter

from hybridattn.cost.catalog import shape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import machine
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.devices.sim_future import SimFuture
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.load import Load
from hybridattn.policies.rule import Rule


def test_one_that_is_known_to_be_ready_is_not_asked_again(monkeypatch):
    costs = Costs(ModelCost(shape("llama3.1-8b"), "fp16"), machine("a10", "epyc-7r32-16c", "pcie4-x16"))
    run = SteadyRun(costs, costs.pricing, Rule(costs, 8, 0.5), Load(24, 96, 1000), lambda p: SimDevice(p, record=False))
    ready, done = Counter(), SimFuture.done
    asked = []  # keeps the futures, so that no two have one id

    def counted(future):
        found = done(future)
        asked.append(future)
        ready[id(future)] += found
        return found

    monkeypatch.setattr(SimFuture, "done", counted)
    for _ in range(6):
        run.step()
    # Once while looking around, and once or twice where it then joins or takes its detour.
    assert max(ready.values()) == 3 and len(ready) > 200
