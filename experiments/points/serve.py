"""A workload served on a simulated machine: the point of ``load`` and ``output_length``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.build import cost_of, kv_room, policy_of, pricing_of, sim_device, with_exposed, workload_of
from experiments.schema import App
from experiments.settings import experiment
from experiments.sim.machines import TIMEOUT_NS
from hybridattn.core.errors import InputError
from hybridattn.core.records import RunRecords
from hybridattn.core.stages import CPU_TIER
from hybridattn.core.trace import Trace
from hybridattn.cost.costs import Costs
from hybridattn.metrics.report import run_metrics
from hybridattn.metrics.throughput import without_first
from hybridattn.runtime.config import EngineConfig
from hybridattn.runtime.engine import Engine
from hybridattn.runtime.priced_stages import PricedStages
from hybridattn.runtime.replay import Replay

KEPT = (
    "output_tokens_per_s",
    "requests_per_s",
    "steady_output_tokens_per_s",
    "steady_total_tokens_per_s",
    "steady_requests_per_s",
    "ttft_mean_ns",
    "ttft_median_ns",
    "ttft_p99_ns",
    "tpot_mean_ns",
    "tpot_p99_ns",
    "e2el_mean_ns",
    "queue_mean_ns",
    "per_token_mean_ns",
    "per_token_p99_ns",
    "completed",
    "failed",
    "completed_gpu_tier",
    "completed_cpu_tier",
    "preemptions",
    "duration_ns",
)


@dataclass
class ServeSettings:
    """``settings`` of the experiments above.

    drop_first : share of the earliest requests that latencies leave out (a warm-up)
    limit : serve only the first so many requests of the workload; null: all
    """

    page_size: int = 16
    max_model_len: int = 4096
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    drop_first: float = 0.0
    limit: int | None = None
    time_scale: float = 1.0


@experiment(ServeSettings)
def point(app: App, settings: ServeSettings) -> dict[str, Any]:
    """One row: latency and throughput of the workload under a policy."""
    if app.device.name != "sim":
        raise InputError(f"this experiment serves declared lengths on the device sim, not on {app.device.name}")
    workload = workload_of(app).scaled(settings.time_scale)
    workload = workload.take(settings.limit) if settings.limit else workload
    cost, pricing = cost_of(app), pricing_of(app)
    on_gpu, on_cpu = kv_room(app)
    config = EngineConfig(
        gpu_kv_blocks=on_gpu // settings.page_size,
        cpu_kv_blocks=on_cpu // settings.page_size,
        page_size=settings.page_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        op_timeout_ns=TIMEOUT_NS,
    )
    policy = policy_of(app, Costs(cost, pricing))
    exposed_ns = round(app.device.exposed_us * 1e3) if CPU_TIER in policy.tiers else 0
    device = sim_device(app, with_exposed(pricing, exposed_ns))
    engine = Engine(PricedStages(cost.shape, cost.dtype), device, policy, config)
    served = Replay(engine, workload).run()
    if not served.requests:
        raise InputError(f"workload {workload.name}: no request was served, {served.refused} could never fit")
    records = without_first(served.requests, settings.drop_first)
    found = run_metrics(RunRecords(cost.shape.num_layers, records), Trace(device.name, device.kind, device.profile, ""))
    return {
        "kind": found.kind,
        "device": found.device,
        "profile": found.profile,
        "requests": len(workload),
        "refused": served.refused,
        "arrival_rate_per_s": workload.rate_per_s,
        "gpu_kv_tokens": on_gpu,
        "cpu_kv_tokens": on_cpu,
        **{name: found[name] for name in KEPT},
    }
