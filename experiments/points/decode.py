"""Steady decode of requests on both tiers: the point of ``ratio``, ``capacity``, ``context_length`` and ``rate``.

How many rows there are follows from one of two ways of asking:

    ratio    gpu_rows on the GPU, ratio x gpu_rows on the CPU tier
    demand   demand x (what the GPU tier holds) requests in all: first the GPU tier, the rest on the CPU tier
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from experiments.build import cost_of, kv_room, policy_of, pricing_of, profile_name, sim_device, with_exposed
from experiments.neighbours import busy
from experiments.schema import App
from experiments.settings import experiment
from hybridattn.core.errors import InputError
from hybridattn.core.stages import CPU_TIER, GPU_TIER
from hybridattn.cost.costs import Costs, with_cpu_factor
from hybridattn.cost.profile import load_profile
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.base import Policy
from hybridattn.policies.load import Load


@dataclass
class DecodeSettings:
    """``settings`` of the experiments above.

    gpu_rows : requests on the GPU tier; null: as many as it holds
    context : tokens that each request attends to
    rate_ratio : CPU attention is slowed or sped up until N_G / N_C is this; null: as the profiles say
    exposed_fraction : time exposed at each layer while CPU rows are in flight, as a share of the layer of the GPU rows
        (policies that plan know of it)
    steps, warmup : steps measured and left out; null: two and one per layer
    output_tokens, prompt_tokens : of a measured request (real devices only)
    neighbours : busy processes beside a measured point (real devices only)
    """

    gpu_rows: int | None = None
    context: int = 1000
    ratio: float | None = None
    demand: float | None = None
    rate_ratio: float | None = None
    exposed_fraction: float = 0.0
    steps: int | None = None
    warmup: int | None = None
    prompt_tokens: int = 16
    output_tokens: int = 16
    neighbours: int = 0

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.demand is None):
            raise InputError(f"settings need one of ratio and demand, got {self.ratio} and {self.demand}")
        for name in ("ratio", "demand", "exposed_fraction", "neighbours"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise InputError(f"settings.{name} must not be negative, got {value}")


@experiment(DecodeSettings)
def point(app: App, settings: DecodeSettings) -> dict[str, Any]:
    """One row: decode throughput of a layout under a policy."""
    if app.device.name == "sim":
        return simulate(app, settings)
    gpu_rows = settings.gpu_rows or 2
    times = 1 + settings.ratio if settings.ratio is not None else settings.demand or 0.0
    measure = importlib.import_module("experiments.points.measured").measure  # needs torch, which simulations do not
    with busy(settings.neighbours):
        return measure(app, gpu_rows, max(1, round(gpu_rows * times)), settings.prompt_tokens, settings.output_tokens)


def simulate(app: App, s: DecodeSettings) -> dict[str, Any]:
    cost, pricing, cpu = cost_of(app), pricing_of(app), load_profile(profile_name(app.hardware.cpu), "cpu")
    on_gpu, on_cpu = kv_room(app)
    capacity = s.gpu_rows or max(1, on_gpu // s.context)
    alone = Costs(cost, pricing)
    linear_ns = alone.linear_ns(capacity)
    attention_ns = alone.attention_ns(capacity, capacity * s.context)
    rate = _rate_ratio(alone, capacity, s.context)
    if s.rate_ratio is not None:
        pricing = with_cpu_factor(pricing, s.rate_ratio / rate)
        rate = s.rate_ratio
    exposed_ns = round(s.exposed_fraction * (linear_ns + attention_ns) + app.device.exposed_us * 1e3)
    priced = with_exposed(pricing, exposed_ns)
    policy = policy_of(app, Costs(cost, priced))
    gpu_rows, cpu_rows = _rows(s, policy, capacity, on_cpu // s.context)
    uses_cpu = CPU_TIER in policy.tiers and cpu_rows > 0
    exposed_ns = exposed_ns if uses_cpu else 0
    run = SteadyRun(
        Costs(cost, priced), priced, policy, Load(gpu_rows, cpu_rows, s.context), lambda p: sim_device(app, p)
    )
    layers = cost.shape.num_layers
    found = run.measure(layers + 1 if s.warmup is None else s.warmup, 2 * (layers + 1) if s.steps is None else s.steps)
    return {
        "kind": "simulated", "device": "sim", "profile": pricing.fingerprint,
        "gpu_rows": gpu_rows, "cpu_rows": cpu_rows, "gpu_capacity_rows": capacity,
        "cpu_capacity_rows": on_cpu // s.context, "num_layers": layers,
        "cpu_cores": int(cpu.value("cores")), "cores_are": cpu.note,
        "tokens_per_s": found.tokens_per_s, "gpu_tokens_per_s": found.gpu_tokens_per_s,
        "cpu_tokens_per_s": found.cpu_tokens_per_s, "gpu_tpot_ns": found.gpu_tpot_ns,
        "cpu_tpot_ns": found.cpu_tpot_ns, "steps": found.steps, "duration_ns": found.duration_ns,
        "linear_layer_ns": linear_ns, "attention_layer_ns": attention_ns,
        "attention_over_linear": attention_ns / linear_ns, "rate_ratio": rate, "cpu_over_gpu_rate": 1 / rate,
        "exposed_layer_ns": exposed_ns,
        "stretch": exposed_ns / (linear_ns + attention_ns) if uses_cpu else None,
    }  # fmt: skip


def _rate_ratio(costs: Costs, rows: int, context: int) -> float:
    """N_G / N_C: attention rate of the GPU with its rows over that of the CPU with as many."""
    return costs.cpu_ns(rows, rows * context) / costs.attention_ns(rows, rows * context)


def _rows(s: DecodeSettings, policy: Policy, capacity: int, cpu_capacity: int) -> tuple[int, int]:
    """Rows that decode on each tier; the rest waits."""
    if s.ratio is not None:
        gpu, cpu = capacity, round(capacity * s.ratio)
    else:
        total = max(1, round(capacity * (s.demand or 0)))
        gpu = min(total, capacity)
        if policy.cpu_fraction is not None:  # a forced share, whatever fits
            gpu = min(capacity, round(total * (1 - policy.cpu_fraction)))
        cpu = min(total - gpu, cpu_capacity)
    if GPU_TIER not in policy.tiers:
        gpu, cpu = 0, min(gpu + cpu, cpu_capacity)
    return gpu, cpu if CPU_TIER in policy.tiers else 0
