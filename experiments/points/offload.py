"""Full offload against GPU-only by output length: the point of ``offload``.

All decode attention on the CPU (``cpu_only``, two micro-batches in turn), as many requests as host memory holds,
against as many as the GPU holds; steady state with the prompts that every output length brings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.build import cost_of, profiles_of
from experiments.machines import cpu_at, open_sim
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown, simulated
from hybridattn.cost.costs import Costs
from hybridattn.cost.parallel import parallel_machine
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.fixed import CpuOnly, GpuOnly
from hybridattn.policies.load import Load


@dataclass
class OffloadSettings:
    """``settings`` of ``offload``: the CPU's speed in attention, tokens in and out, and K,V room of both tiers."""

    cpu_gb_s: float = 60.0
    prompt: int = 1000
    output: int = 200
    gpu_tokens: int = 25_600
    cpu_tokens: int = 245_760


@experiment(OffloadSettings)
def point(app: App, settings: OffloadSettings) -> dict[str, Any]:
    """One row: full offload over GPU-only in output tokens per second, and N_C over the GPU-only rate."""
    (gpu, cpu, link), cost = profiles_of(app), cost_of(app)
    pricing = parallel_machine(gpu, cpu_at(cpu, settings.cpu_gb_s), link, app.hardware.gpus, cost)
    return {**simulated(pricing.fingerprint), **gain(Costs(cost, pricing), settings)}


def gain(costs: Costs, s: OffloadSettings) -> dict[str, float]:
    """``gain`` and ``rate``."""
    context, per_token, whole = s.prompt + s.output // 2, s.prompt / s.output, s.prompt + s.output
    on_gpu, on_cpu = (
        Load(s.gpu_tokens // whole, 0, context, per_token), Load(0, s.cpu_tokens // whole, context, per_token)
    )  # fmt: skip
    alone = SteadyRun(costs, costs.pricing, GpuOnly(), on_gpu, open_sim).measure(20, 200).tokens_per_s
    full = SteadyRun(costs, costs.pricing, CpuOnly(), on_cpu, open_sim).measure(400, 1600).tokens_per_s
    cpu_rate = 64e9 / (costs.num_layers * costs.cpu_ns(64, 64 * context))
    return {"gain": full / alone, "rate": cpu_rate / alone}


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The gains as a table, and where full offload falls far behind."""
    columns = {
        "CPU [GB/s]": "{cpu_gb_s:.0f}",
        "output": "{output}",
        "N_C over the GPU-only rate": "{rate:.2f}",
        "full offload over GPU-only": "{gain:.2f}",
    }
    weak = [f"{r['cpu_gb_s']:.0f} GB/s at output {r['output']}" for r in rows if r["gain"] < 0.6]
    return [*markdown(rows, columns), f"below 0.6: {'; '.join(weak) or 'none'}"]
