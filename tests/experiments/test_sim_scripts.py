from __future__ import annotations

import pytest

from experiments.sim.apex import SETTINGS, judge, verdicts
from experiments.sim.flat import POLICIES, serve
from experiments.sim.machines import Setting
from experiments.sim.speed import LAYOUTS, layer_steps_per_s


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_speed_of_the_simulator_is_counted_for_every_layout(layout):
    setting = Setting.of("a10", "epyc-7r32-16c", "pcie4-x16", "llama3.1-8b")
    assert layer_steps_per_s(setting, layout, 3) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_of_a_long_run_ends_and_memory_stays_flat(policy):
    row = serve(policy, 3000)
    assert row["requests"] == 3000
    assert row["late_mib"] - row["early_mib"] < 8


def test_the_published_ranges_are_sanity_bounds():
    row = {"machine": "t4", "apex_gain": 1.9, "over_asymmetric": 1.2, "adaptive_gain": 2.0, "bound": 2.5, "cell": "a"}
    other = {**row, "machine": "a10", "apex_gain": 1.05, "cell": "b"}
    t4, a10, above = verdicts([row, other])
    assert "the ranges meet" in t4 and "do not meet" in a10 and above.endswith("none")
    assert verdicts([{**row, "adaptive_gain": 2.6}, other])[2].endswith("a")


def test_one_setting_of_the_bounds():
    row = judge(SETTINGS[0])
    assert row["apex_gain"] == max(row["asymmetric_gain"], row["overlap_gain"]) < row["bound"]
    assert row["adaptive_gain"] > 0.97 * row["apex_gain"]
