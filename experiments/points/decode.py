"""Steady decode of requests on both tiers: the point of ``ratio``, ``capacity``, ``context_length`` and ``rate``.

How many rows there are follows from one of two ways of asking:

    ratio    gpu_rows on the GPU, ratio x gpu_rows on the CPU tier
    demand   demand x (what the GPU tier holds) requests in all: first the GPU tier, the rest on the CPU tier
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from experiments.build import cost_of, kv_room, policy_of, pricing_of, profiles_of, sim_device
from experiments.neighbours import busy
from experiments.schema import App
from experiments.settings import at_least, experiment
from hybridattn.core.errors import InputError
from hybridattn.core.stages import CPU_TIER, GPU_TIER
from hybridattn.cost.costs import Costs, with_cpu_factor
from hybridattn.cost.priced_stages import with_exposed
from hybridattn.cost.room import GB, check_context
from hybridattn.planning.steady import rows_under, steady
from hybridattn.policies.base import Policy
from hybridattn.policies.load import Load


@dataclass
class DecodeSettings:
    """``settings`` of the experiments above.

    gpu_rows : requests on the GPU tier; null: as many as it holds
    context : tokens that each simulated request attends to; null: 1,000
    rate_ratio : CPU attention is slowed or sped up until N_G / N_C is this; null: as the profiles say
    exposed_fraction : time exposed at each layer while CPU rows are in flight, as a share of the layer of the GPU rows
        (policies that plan know of it)
    steps, warmup : steps measured and left out; null: two and one per layer
    output_tokens, prompt_tokens : of a measured request (real devices only)
    neighbours : busy processes beside a measured point (real devices only)
    """

    gpu_rows: int | None = None
    context: int | None = None
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
        at_least(self, ratio=0, demand=0, exposed_fraction=0, neighbours=0)


SIMULATED = ("context", "rate_ratio", "exposed_fraction", "steps", "warmup")  # settings that real devices do not have


@experiment(DecodeSettings)
def point(app: App, settings: DecodeSettings) -> dict[str, Any]:
    """One row: decode throughput of a layout under a policy."""
    if app.device.name == "sim":
        return simulate(app, settings)
    asked = [name for name in SIMULATED if getattr(settings, name)]
    if asked:
        raise InputError(
            f"settings.{asked[0]}={getattr(settings, asked[0])} acts in simulations alone; on {app.device.name} "
            f"prompt_tokens and output_tokens say how long requests are"
        )
    gpu_rows = settings.gpu_rows or 2
    times = 1 + settings.ratio if settings.ratio is not None else settings.demand or 0.0
    measure = importlib.import_module("experiments.points.measured").measure  # needs torch, which simulations do not
    with busy(settings.neighbours):
        return measure(app, gpu_rows, max(1, round(gpu_rows * times)), settings.prompt_tokens, settings.output_tokens)


def simulate(app: App, s: DecodeSettings) -> dict[str, Any]:
    cost, pricing, (_, cpu, _) = cost_of(app), pricing_of(app), profiles_of(app)
    context = s.context or 1000
    capacity, cpu_capacity = _capacities(app, s, context)
    alone = Costs(cost, pricing)
    linear_ns = alone.linear_ns(capacity)
    attention_ns = alone.attention_ns(capacity, capacity * context)
    rate = _rate_ratio(alone, capacity, context)
    if s.rate_ratio is not None:
        pricing = with_cpu_factor(pricing, s.rate_ratio / rate)
        rate = s.rate_ratio
    exposed_ns = round(s.exposed_fraction * (linear_ns + attention_ns) + app.device.exposed_us * 1e3)
    priced = with_exposed(pricing, exposed_ns)
    policy = policy_of(app, Costs(cost, priced))
    gpu_rows, cpu_rows = _rows(s, policy, capacity, cpu_capacity, context)
    uses_cpu = CPU_TIER in policy.tiers and cpu_rows > 0
    exposed_ns = exposed_ns if uses_cpu else 0
    load = Load(gpu_rows, cpu_rows, context)
    found = steady(Costs(cost, priced), policy, load, lambda p: sim_device(app, p), s.warmup, s.steps)
    return {
        "kind": "simulated", "device": "sim", "profile": pricing.fingerprint,
        "gpu_rows": gpu_rows, "cpu_rows": cpu_rows, "gpu_capacity_rows": capacity,
        "cpu_capacity_rows": cpu_capacity, "context": context, "num_layers": cost.shape.num_layers,
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


def _capacities(app: App, s: DecodeSettings, context: int) -> tuple[int, int]:
    """Rows on the GPU, which must fit, and the most that the host has room for."""
    room = kv_room(app)
    check_context(room, context)
    most, cpu = room.gpu_tokens // context, room.cpu_tokens // context
    rows = s.gpu_rows or max(1, most)
    if rows > most:
        taken = rows * context * room.token_bytes / GB
        raise InputError(
            f"{rows} x {context:,} tokens of {room.model} on the GPU take {taken:.1f} GB of KV; beside the weights "
            f"there is room for {room.gpu_bytes / GB:.1f} GB, that is {most} x"
        )
    return rows, cpu


def _rows(s: DecodeSettings, policy: Policy, capacity: int, cpu_capacity: int, context: int) -> tuple[int, int]:
    """Rows that decode on each tier; the rest waits."""
    if s.ratio is None:
        return rows_under(policy, max(1, round(capacity * (s.demand or 0))), capacity, cpu_capacity)
    gpu, cpu = capacity if GPU_TIER in policy.tiers else 0, round(capacity * s.ratio)
    cpu += capacity - gpu
    if cpu > cpu_capacity:
        raise InputError(
            f"settings.ratio={s.ratio:g} asks for {cpu} CPU rows of {context:,} tokens, the host has room for "
            f"{cpu_capacity}"
        )
    return gpu, cpu if CPU_TIER in policy.tiers else 0
