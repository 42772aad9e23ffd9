"""Small versions of the published results: the closed forms hold on the executor, and bounds are bounds."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from experiments.ideal import ideal
from experiments.machines import open_sim, priced, pricing_at
from experiments.points import capacity_bound, eight_to_one, neo_fig10a
from experiments.points.eq6 import ideal_threshold
from experiments.points.neo_fig6c import lengths, sustained
from experiments.points.neo_fig10a import KERNEL_TOKENS, RAM_GB, box, errors, figure, fit, hosts
from experiments.points.offload import OffloadSettings
from experiments.points.offload import gain as offload_gain
from experiments.schema import App
from hybridattn.core.config import EngineConfig
from hybridattn.core.request import DeclaredTokens
from hybridattn.cost.catalog import shape
from hybridattn.cost.costs import Costs
from hybridattn.cost.crossover import capacity_gain_bound, eq6_threshold, overlap_crossover, upper_bound_gain
from hybridattn.cost.machine import machine
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.planning.predict import by_simulation
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.adaptive import Adaptive
from hybridattn.policies.fixed import SyncOffload
from hybridattn.policies.layouts import fixed_layouts, policy_of
from hybridattn.policies.load import Limits, Load
from hybridattn.policies.registry import make_policy

MACHINE = machine("a10", "epyc-7r32-16c", "pcie4-x16")
SHALLOW = dataclasses.replace(shape("llama3.1-8b"), num_layers=8)  # as wide, less to simulate
A10 = Costs(ModelCost(SHALLOW, "fp16"), MACHINE)


@pytest.mark.parametrize("x", [0.5, 1.0, 2.0])
def test_eq6_on_the_ideal_machine(x):
    assert ideal_threshold(x, num_layers=64, gpu_rows=120) == pytest.approx(eq6_threshold(x), rel=0.05)


def test_a_quarter_of_the_layer_exposed_gives_eight_to_one():
    costs = eight_to_one.exposed(ideal(800_000.0, 200_000 / 32_000, 0.01), 250_000, 32)
    gain, d, a = eight_to_one.overlap(costs, 32, 4 * 33, 1000)
    assert d == pytest.approx(0.25, abs=0.01) and a == pytest.approx(32 / 33, rel=0.01)
    seen = eight_to_one.crossover(costs, 32, 1000)
    assert seen == pytest.approx(overlap_crossover(d, 32), rel=0.1) and 7.5 < seen < 9
    assert gain < 1


@pytest.mark.parametrize(("x", "r"), [(0.5, 3), (1.0, 3), (1.0, 10)])
def test_ample_memory_gains_no_more_than_the_bound(x, r):
    key_ns = x * 1e6 / (200 * 1000)
    gain, moved = capacity_bound.best_gain(ideal(1e6, key_ns, key_ns * r, 8), 200, 1000)
    bound = capacity_gain_bound(x, r)
    assert 1 + 0.5 * (bound - 1) < gain <= bound * 1.0001 and moved > 0


def test_no_layout_exceeds_the_upper_bound():
    costs = ideal(1e6, 1e6 / 40_000, 8e6 / 40_000, 8)  # x = 1, r = 8
    load = Load(40, 160, 1000)
    alone = 40 / costs.step_ns(40, 40_000) * 1e9
    for layout in fixed_layouts(costs, 40, 160, 1000):
        run = SteadyRun(costs, costs.pricing, policy_of(layout, costs), load, open_sim)
        assert run.measure(30, 60).tokens_per_s / alone <= upper_bound_gain(1.0, 8.0) * 1.01


def test_full_offload_to_a_weak_cpu_loses():
    weak = priced("llama3.1-8b", pricing_at("a10g", "epyc-7r32-16c", "pcie4-x16", 15.0))
    assert offload_gain(weak, OffloadSettings(15.0, output=400))["gain"] < 0.6


# -- adaptive and auto -----------------------------------------------------------------------------------------------


def steady(policy, load, settle=0, factor=1.0):
    costs = A10
    run = SteadyRun(costs, costs.corrected(factor).pricing, policy, load, open_sim)
    for _ in range(settle):
        run.step()
    return run.measure(20, 60)


def test_adaptive_is_at_least_as_good_as_the_best_fixed_policy():
    load = Load(24, 72, 1000)
    best = max(steady(policy_of(layout, A10), load).tokens_per_s for layout in fixed_layouts(A10, 24, 72, 1000))
    assert steady(Adaptive(A10, by_simulation()), load, settle=60).tokens_per_s >= 0.99 * best


def test_adaptive_keeps_its_limits():
    load, limits = Load(24, 72, 1000), Limits(1.25, 15.0)
    found = steady(Adaptive(A10, by_simulation(), 1.25, 15.0), load, settle=60)
    alone_ns = A10.step_ns(24, 24_000)
    assert limits.kept_by(found, alone_ns, slack=0.02)
    assert found.tokens_per_s > 24 / alone_ns * 1e9


def test_adaptive_learns_that_the_cpu_is_slower_than_it_believed():
    load = Load(24, 72, 1000)
    policy = Adaptive(A10, by_simulation())
    run = SteadyRun(A10, A10.corrected(1.4).pricing, policy, load, open_sim)
    for _ in range(80):
        run.step()
    assert run.executor.forecast.cpu_factor == pytest.approx(1.4, rel=0.02)
    assert policy.plans >= 2


def test_an_infinitely_dear_cpu_gives_gpu_only():
    costs = A10.corrected(1e5)
    policy = Adaptive(costs, by_simulation())
    run = SteadyRun(costs, costs.pricing, policy, Load(24, 24, 1000), open_sim)
    run.step()
    assert policy.layout.kind == "gpu_only"


def spans_of(name, gpu_blocks):
    policy = make_policy(name, costs=A10, predict=by_simulation())
    config = EngineConfig(gpu_blocks, 4000, 16, max_model_len=2048, max_num_seqs=32, max_num_batched_tokens=512)
    engine = Engine(PricedStages(SHALLOW, "fp16"), SimDevice(MACHINE), policy, config)
    for i in range(8):
        engine.add(DeclaredTokens(200 + i), 12, arrival_ns=i * 10**8)
    engine.run()
    records = engine.take_records()
    assert sum(p.polls_made for p in records.steps) == 0
    return engine.drain(), records.requests, records.steps


def test_auto_submits_exactly_the_ops_of_gpu_only_when_all_fits():
    assert spans_of("auto", 1000) == spans_of("gpu_only", 1000)


# -- small parts -----------------------------------------------------------------------------------------------------


def test_a_fit_finds_where_a_growing_gain_meets_its_target():
    assert fit(lambda b: 1 + b / 100, 1.4, start=10.0, runs=12)[0] == pytest.approx(40.0, rel=0.03)


def test_only_the_largest_box_of_the_output_length_figure_is_simulated_with_two_sizes_of_host_memory(monkeypatch):
    gains = {200: 1.2, 300: 1.3}

    def rate(at, policy, output, count, cpu_gb_s, **options):  # as if outputs did not matter
        return 1.0 if policy == "gpu_only" else 1 + cpu_gb_s / 100 * at.cpu_tokens / 491_520

    monkeypatch.setattr(neo_fig10a, "rate", rate)
    monkeypatch.setattr(neo_fig10a, "published", lambda: dict.fromkeys(RAM_GB, gains))
    neo_fig10a.baseline.cache_clear()
    names = [*RAM_GB, f"g5.16xlarge/{KERNEL_TOKENS}"]
    points = figure([neo_fig10a.point(App(), neo_fig10a.Fig10aSettings(name, requests=10)) for name in names])
    neo_fig10a.baseline.cache_clear()
    assert len(points) == 10
    by_ram, by_kernel = hosts(points).values()
    assert [p["box"] for p in by_ram] == [p["box"] for p in by_kernel] == [b for b in RAM_GB for _ in gains]
    assert [p["host_tokens"] for p in by_ram[6:]] == [983_040] * 2
    assert [p["host_tokens"] for p in by_kernel[6:]] == [box(names[-1]).cpu_tokens] * 2 == [KERNEL_TOKENS] * 2
    assert by_ram[:6] == by_kernel[:6]
    for fitted, predicted in zip(points[::2], points[1::2], strict=True):  # at the bandwidth that was fitted
        assert (fitted["use"], predicted["use"]) == ("fitted", "predicted")
        assert predicted["simulated"] == pytest.approx(fitted["simulated"])
    assert "over 4 held-out points" in errors(by_ram)[0]


def test_the_lengths_of_the_load_figure_come_from_a_trace_or_have_its_means_and_spreads(tmp_path):
    trace = tmp_path / "osc.json"
    pairs = [(269, 42), (270, 52), (1, 1)]
    trace.write_text(json.dumps([{"prompt": p, "max_tokens": m} for p, m in pairs]))
    assert [(i.prompt_tokens, i.output_tokens) for i in lengths(2, str(trace)).items] == pairs[:2]
    drawn = np.array([(i.prompt_tokens, i.output_tokens) for i in lengths(2000, None).items])
    assert drawn.mean(0) == pytest.approx([372.5, 45.3], rel=0.02)
    assert drawn.std(0) == pytest.approx([103.7, 8.9], rel=0.05)


def test_the_sustained_rate_lies_on_the_line_between_two_points():
    assert sustained([(1.0, 0.5), (2.0, 1.5)]) == pytest.approx(1.5)
    assert sustained([(1.0, 0.5), (2.0, 0.9)]) is None


def test_bounded_offload_that_hides_costs_the_gpu_rows_little():
    hidden = steady(SyncOffload(max_rows=3), Load(24, 3, 1000))
    assert hidden.gpu_tpot_ns <= 1.02 * A10.step_ns(24, 24_000)


def test_the_simulator_runs_where_torch_cannot_be_imported():
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'numba', 'triton'): sys.modules[name] = None\n"
        "from experiments.points.eq6 import ideal_threshold\n"
        "assert 4.5 < ideal_threshold(1.0, 16, 60) < 6.5\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
