"""Plans: the textbook check, what fits, what limits, who wins, and bounds that predictions must keep."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.errors import InputError
from hybridattn.cost.catalog import shape
from hybridattn.cost.costs import Costs
from hybridattn.cost.crossover import eq6_threshold, overlap_gain
from hybridattn.cost.gains import OUTLOOKS, STRATEGIES, Outlook, PricedLoad, predict
from hybridattn.cost.machine import machine
from hybridattn.cost.planning import WORTH_IT, plan
from hybridattn.cost.pricing import Constant, Pricing
from hybridattn.cost.profile import load_profile
from hybridattn.cost.stages_cost import ModelCost

T4 = ("t4", "xeon-8259cl-8c", "pcie3-x16")
A100 = ("a100-80g", "epyc-7r32-32c", "pcie4-x16")


def test_the_textbook_check_of_a_70b_model():
    found = plan(*A100, shape("llama3.1-70b"), "fp16", context=131_072, concurrency=1)
    assert found.weight_bytes == pytest.approx(140e9, rel=0.01)
    assert found.kv_bytes_per_request == 40 * 2**30
    assert found.kv_bytes_per_token == 327_680
    text = found.describe()
    assert "weights            141.1 GB" in text and "KV per request     42.9 GB (40.0 GiB)" in text
    assert (found.verdict.bottleneck, found.verdict.winner) == ("capacity", "none")
    assert "weights alone exceed the GPU's memory" in text


def test_when_all_fits_gpu_only_wins_and_the_bound_is_told():
    found = plan(*A100, shape("llama3.1-8b"), "fp16", context=1000, concurrency=64)
    assert (found.gpu_requests, found.cpu_requests, found.waiting_requests) == (64, 0, 0)
    assert found.verdict.winner == "gpu_only" and not found.verdict.gains
    assert 1 < found.verdict.capacity_bound < 1.05
    assert found.verdict.bottleneck == "memory bandwidth"


def test_a_small_gpu_beside_a_big_host_gains():
    found = plan(*T4, shape("llama2-7b"), "fp16", context=420, concurrency=64)
    assert found.verdict.bottleneck == "capacity" and found.gpu_requests == 4
    assert found.gpu_requests + found.cpu_requests + found.waiting_requests == 64
    assert found.verdict.winner == "asymmetric" and found.verdict.gains["asymmetric"].nominal > 2
    assert (
        found.verdict.gains["asymmetric"].low
        <= found.verdict.gains["asymmetric"].nominal
        <= found.verdict.gains["asymmetric"].high
    )


def test_offload_that_will_not_pay_is_said_so():
    # A tenth of the CPU's memory bandwidth: its attention is worth nothing beside an A10G.
    found = plan("a10g", slow("epyc-7r32-4c", 0.1), "pcie4-x16", shape("llama3.1-8b"), "fp16", 4000, 20)
    assert found.verdict.winner == "gpu_only"
    assert max(g.nominal for n, g in found.verdict.gains.items() if n != "bound") < WORTH_IT
    assert "offload will not pay here" in found.describe()


def slow(name, factor):
    profile = load_profile(name)
    bandwidth = dataclasses.replace(profile.quantities["bandwidth"], value=profile.value("bandwidth") * factor)
    return dataclasses.replace(profile, quantities={**profile.quantities, "bandwidth": bandwidth})


def test_a_context_that_only_the_cpu_tier_can_hold():
    found = plan(*T4, shape("llama2-7b"), "fp16", context=4096, concurrency=8)
    assert (found.gpu_requests, found.cpu_requests) == (0, 8)
    assert found.verdict.throughput["asymmetric"] > 0 and "gpu_only" not in found.verdict.throughput
    assert "only the CPU tier can hold one" in found.describe()


def test_many_short_requests_are_bound_by_compute_and_a_thin_link_by_copies():
    assert plan(*A100, shape("llama3.1-8b"), "fp16", 100, 2000).verdict.bottleneck == "compute"
    thin = slow("pcie3-x16", 0.001)
    assert plan("t4", "xeon-8259cl-8c", thin, shape("llama2-7b"), "fp16", 420, 64).verdict.bottleneck == "copy"


def ideal(linear_ns, gpu_attention_ns, cpu_attention_ns):
    """A machine with constant prices: the assumptions of the closed forms."""
    prices = {"linear": linear_ns, "head": 0, "other": 0, "decode_attention": gpu_attention_ns}
    models = {("gpu.compute", kind): Constant(p) for kind, p in prices.items()}
    models |= {("cpu.attention", "decode_attention"): Constant(cpu_attention_ns)}
    models |= {(lane, "copy"): Constant(0) for lane in ("gpu.d2h", "gpu.h2d")}
    return Pricing("ideal", "ideal", models)


class NoCopies(PricedLoad):
    """A load whose copies take (almost) no time: the ideal machine."""

    copy_token_ns = 1e-9


def test_predictions_become_the_closed_forms_on_an_ideal_machine():
    # 32 layers; constants per op. first() and last() each cost a GEMM, so that T_l is 33 ops instead of 32.
    x, rows, cost = 0.5, 64, ModelCost(shape("llama3.1-8b"), "fp16")
    t_l, t_a = 33 * 1_000_000, 32 * round(33 / 32 * x * 1_000_000)
    calm = Outlook("calm", 1.0, 0)
    for r in (eq6_threshold(x) * 0.8, eq6_threshold(x) * 1.25):
        n_g = rows / t_a
        cpu_op_ns = round(64 / (n_g / r) / 32)  # the CPU's time for a micro-batch of 64 at one layer
        load = NoCopies(Costs(cost, ideal(1_000_000, t_a // 32, cpu_op_ns)), rows, 10_000, 1000)
        found = predict(load, calm)
        assert (found["asymmetric"] > found["gpu_only"]) == (r < eq6_threshold(x))
        assert found["gpu_only"] == pytest.approx(rows / (t_l + t_a) * 1e9)
    # One-layer overlap while the CPU keeps up: d = 0.25 exposed, eight and nine times as many CPU rows.
    d_ns = round(0.25 * (t_l + t_a) / 32)
    for ratio in (6, 8, 9, 12):
        load = NoCopies(Costs(cost, ideal(1_000_000, t_a // 32, 1000)), rows, rows * ratio, 1000)
        found = predict(load, Outlook("exposed", 1.0, d_ns))
        gain = found["async_overlap"] / found["gpu_only"]
        assert gain == pytest.approx(overlap_gain(ratio, 0.25, 32), rel=1e-3)
        assert (gain > 1) == (ratio > 8.25)


@settings(deadline=None, max_examples=60)
@given(
    parts=st.sampled_from([T4, A100, ("gh200", "grace-72c", "nvlink-c2c"), ("a10g", "epyc-7r32-4c", "pcie4-x16")]),
    gpu_rows=st.integers(0, 200),
    cpu_rows=st.integers(0, 400),
    context=st.integers(1, 8000),
)
def test_no_prediction_exceeds_the_bound_and_better_machines_are_not_slower(parts, gpu_rows, cpu_rows, context):
    load = PricedLoad(Costs(ModelCost(shape("llama3.1-8b"), "fp16"), machine(*parts)), gpu_rows, cpu_rows, context)
    low, nominal, high = (predict(load, v) for v in OUTLOOKS)
    for name in STRATEGIES:
        assert 0 <= nominal[name] <= nominal["bound"] * (1 + 1e-9)
        assert nominal[name] <= high[name] * (1 + 1e-9)
    assert low["gpu_only"] == nominal["gpu_only"] == high["gpu_only"]
    if not cpu_rows and gpu_rows:
        assert nominal["async_overlap"] == nominal["sync_offload"] == nominal["gpu_only"]


@pytest.mark.parametrize(
    ("context", "concurrency", "message"),
    [
        (0, 1, "context and concurrency of at least 1, got 0 and 1"),
        (1, 0, "context and concurrency of at least 1, got 1 and 0"),
        (200_000, 1, "context 200000 exceeds max_model_len 131072 of llama3.1-8b"),
    ],
)
def test_bad_plans_are_refused(context, concurrency, message):
    with pytest.raises(InputError, match=message):
        plan(*T4, shape("llama3.1-8b"), "fp16", context, concurrency)
