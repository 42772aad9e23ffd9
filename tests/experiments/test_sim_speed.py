from __future__ import annotations

import pytest

from experiments.sim.machines import Setting
from experiments.sim.speed import LAYOUTS, layer_steps_per_s


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_speed_of_the_simulator_is_counted_for_every_layout(layout):
    setting = Setting.of("a10", "epyc-7r32-16c", "pcie4-x16", "llama3.1-8b")
    assert layer_steps_per_s(setting, layout, 3) > 0
