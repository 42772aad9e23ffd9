"""Predictions by short simulations: what a planning policy is given as ``predict``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hybridattn.core.device import Device
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import driver_of
from hybridattn.cost.pricing import Pricing
from hybridattn.cost.profile import Profile
from hybridattn.devices.sim import SimDevice
from hybridattn.planning.steady import Steady, SteadyRun
from hybridattn.policies.estimate import over_both
from hybridattn.policies.layouts import Layout, policy_of
from hybridattn.policies.load import Load

QUICK = (12, 18)  # steps of warm-up, steps measured
THOROUGH = (30, 50)


def open_priced(pricing: Pricing, **driver: Any) -> Device:
    """A simulated device that keeps no spans.

    ``driver`` is what the driver and the lanes' threads cost (``hybridattn.cost.machine.driver_of``).
    """
    return SimDevice(pricing, record=False, **driver)


def predict_for(profile: Profile) -> Callable[[Load, Layout, Costs, bool], Steady]:
    """``by_simulation`` with what driver and lanes of a measured machine cost."""
    return by_simulation(partial(open_priced, **driver_of(profile)))


def by_simulation(
    open_device: Callable[[Pricing], Device] = open_priced,
) -> Callable[[Load, Layout, Costs, bool], Steady]:
    """``predict(load, layout, costs, thorough)``: the layout's own policy on the real executor, simulated.

    Results are kept, so that planning again for a load seen before costs nothing.
    """
    known: dict[tuple[Load, Layout, str, bool], Steady] = {}

    def predict(load: Load, layout: Layout, costs: Costs, thorough: bool) -> Steady:
        key = load, layout, costs.pricing.fingerprint, thorough
        if key not in known:
            cold = 0
            if layout.kind in ("split", "split_overlap"):
                load, cold = over_both(load, layout, costs)
            elif layout.max_rows is not None and layout.kind != "sync_offload":
                load = Load(load.gpu_rows, min(load.cpu_rows, layout.max_rows), load.context, load.prompt_per_token)
            run = SteadyRun(costs, costs.pricing, policy_of(layout, costs), load, open_device, cold)
            known[key] = run.measure(*(THOROUGH if thorough else QUICK))
        return known[key]

    return predict
