"""The closed forms of cost/split.py against the executor on the ideal machine: gain, best share, where cases end."""

from __future__ import annotations

import itertools
import random

import pytest

from experiments.ideal import ideal
from experiments.machines import engine_on, open_sim
from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import InputError
from hybridattn.core.request import DeclaredTokens
from hybridattn.cost.split import split_case, split_layer
from hybridattn.planning.predict import by_simulation
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies import planning
from hybridattn.policies.base import ColdView
from hybridattn.policies.estimate import at_once, split_step
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly
from hybridattn.policies.layouts import Layout
from hybridattn.policies.load import Limits, Load
from hybridattn.policies.planning import choose
from hybridattn.policies.registry import make_policy
from hybridattn.policies.split import Split

LAYERS, CONTEXT, HOT = 8, 1000, 100_000
KEY_NS = 10.0  # T = 1 ms
# r, T / tau (0: tau is 0), T / T_l
SETTINGS = list(itertools.product((1.5, 3, 6, 12), (0, 2, 5, 20), (0.3, 1.0, 4.0)))


def machine(r, over_tau, x):
    attention = HOT * KEY_NS
    return ideal(attention / x, KEY_NS, KEY_NS * r, LAYERS, round(attention / over_tau) if over_tau else 0)


def rate(costs, rows, cold):
    """Tokens per ns of ``rows`` rows with ``cold`` cold tokens each."""
    run = SteadyRun(costs, costs.pricing, GpuOnly(), Load(rows, 0, CONTEXT), open_sim, cold=cold)
    return run.measure(1, 1).tokens_per_s / 1e9


@pytest.mark.parametrize(("r", "over_tau", "x"), [(1.5, 0, 1.0), (3, 0, 1.0), (6, 0, 0.3), (3, 20, 1.0), (6, 5, 0.3)])
def test_micro_batches_beside_cold_parts_fill_what_they_leave_of_the_cpu(r, over_tau, x):
    """A micro-batch at every layer: the GPU's rows wait for nothing but its way up, and the CPU never rests."""
    costs = machine(r, over_tau, x)
    layer = split_layer(costs, HOT // CONTEXT, HOT)
    hidden = layer.hidden(HOT)
    rows, each = round((HOT + hidden) / CONTEXT), int(layer.left(HOT, hidden) / CONTEXT)
    beside = AsyncOverlap(None, LAYERS + 1, equal=True)
    load = Load(rows, each * (LAYERS + 1), CONTEXT)
    run = SteadyRun(costs, costs.pricing, beside, load, open_sim, cold=per_row(hidden, rows)).measure(20, 40)
    step_ns = LAYERS * (layer.layer_ns(HOT, 0) + costs.up_ns(each))
    assert run.gpu_tpot_ns == pytest.approx(step_ns, rel=0.01)
    gain = run.tokens_per_s / rate(costs, HOT // CONTEXT, 0) / 1e9
    # all of that but a last fraction of a row, and what the wait for the way up costs
    assert gain * step_ns / (LAYERS * layer.layer_ns(HOT, 0)) == pytest.approx(layer.gain_together(HOT), rel=0.03)


def test_the_chooser_and_the_closed_forms_take_both_together_where_that_is_best(monkeypatch):
    """Few requests hide, and the linear stages leave the CPU much time; with a limit for every row they cannot."""
    costs = machine(3, 0, 1.0)
    load, predict = Load(HOT // CONTEXT, 400, CONTEXT), by_simulation()
    few = [Layout("sync_offload"), Layout("async_overlap", 8)]
    monkeypatch.setattr(planning, "candidates", lambda load, costs, limits: few)
    for layout in (choose(load, costs, predict, Limits(), split=True)[0], at_once(load, costs, Limits(), 1.0, True)):
        assert layout.kind == "split_overlap" and layout.micro_batches == LAYERS + 1
    tokens, step_ns = split_step(load, layout, costs)
    assert predict(load, layout, costs, True).tokens_per_s / 1e9 == pytest.approx(tokens / step_ns, rel=0.05)
    assert at_once(load, costs, Limits(), 1.0).kind != layout.kind
    assert at_once(load, costs, Limits(1.1, 1.1), 1.0, True).kind != "split_overlap"


@pytest.mark.parametrize(("r", "x"), [(1.5, 0.3), (3, 4.0)])
def test_a_limit_bounds_what_is_cold(r, x):
    """Where more than hides would pay, a step takes as long as the limit says; elsewhere it stays as it is."""
    costs = machine(r, 5, x)
    layer, view = split_layer(costs, HOT // CONTEXT, HOT), ColdView(100, HOT // 8, 0, HOT // 32, 32)
    _, most = Split(costs, gpu_limit=1.1).cold_pages(view)
    _, free = Split(costs).cold_pages(view)
    stretch = layer.layer_ns(HOT, most * 32) / layer.layer_ns(HOT, 0)
    assert stretch == pytest.approx(1.1 if layer.more_pays(HOT) else 1.0, rel=0.02)
    assert (free > most) == layer.more_pays(HOT) == (x < 1)
    with pytest.raises(InputError, match="gpu_limit needs a cost model .* and 1 at least, got 0.9"):
        Split(costs, gpu_limit=0.9)


def per_row(tokens, rows):
    return round(tokens / rows)


@pytest.mark.parametrize(("r", "over_tau", "x"), SETTINGS)
def test_gain_best_share_and_boundary_are_within_3_percent(r, over_tau, x):
    costs = machine(r, over_tau, x)
    layer = split_layer(costs, HOT // CONTEXT, HOT)
    assert layer.ratio == pytest.approx(r, rel=1e-3)
    base = rate(costs, HOT // CONTEXT, 0)

    def gain(cold):  # GPU memory limits the batch to HOT
        rows = (HOT + cold) / CONTEXT
        return rate(costs, round(rows), per_row(cold, rows)) / base

    hidden = layer.hidden(HOT)
    assert gain(hidden) == pytest.approx(layer.gain(HOT), rel=0.03)
    if abs((layer.linear_ns + layer.tau_ns) / layer.cpu_token_ns / HOT - 1) > 0.05:
        assert (gain(3 * hidden) > gain(hidden)) == layer.more_pays(HOT)

    rows = HOT // CONTEXT
    share = layer.best_share(HOT)
    steps = {f: rows / rate(costs, rows, per_row(f * HOT, rows)) for f in (share, share - 0.03, share + 0.03) if f > 0}
    assert min(steps.values()) >= steps.get(share, 0.0) * 0.9999  # nothing beside it is better
    assert steps[share] == pytest.approx(LAYERS * layer.layer_ns(HOT * (1 - share), HOT * share), rel=0.03)


def test_no_gain_where_attention_is_shorter_than_the_way():
    layer = split_layer(machine(3, 0.5, 1.0), 100, HOT)
    assert layer.hidden(HOT) == layer.best_share(HOT) == 0 and layer.gain(HOT) == 1


def test_the_cases():
    assert [split_case(*load) for load in ((4, 100, 399), (4, 100, 400), (1, 401, 400))] == [1, 2, 3]


@pytest.mark.parametrize(("r", "over_tau", "x"), [(2, 0, 1.0), (8, 20, 1.0), (3, 0, 4.0)])
def test_the_policy_reaches_the_gain(r, over_tau, x):
    """Requests that come, grow and end, in pages: tokens per second as predicted, but for pages that are half full and
    copies of pages."""
    costs, rates = machine(r, over_tau, x), []
    for policy in (make_policy("gpu_only"), make_policy("split", costs)):
        config = EngineConfig(
            HOT // 32, HOT // 16, 32, max_model_len=2000, max_num_seqs=300, max_num_batched_tokens=8192
        )
        engine, draw = engine_on(costs, policy, config), random.Random(1)
        while len(engine.executor.steps) < 200:
            while engine.unfinished < 200:
                engine.add(DeclaredTokens(draw.randint(600, 1400)), draw.randint(20, 180))
            engine.step()
        steps = engine.executor.steps[100:]
        rates.append(sum(s.gpu_rows for s in steps) / (steps[-1].end_ns - steps[0].start_ns))
    gain = split_layer(costs, HOT // CONTEXT, HOT).gain(HOT)
    assert rates[1] / rates[0] == pytest.approx(gain, rel=0.05)
