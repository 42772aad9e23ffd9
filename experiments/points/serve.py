"""A workload served on a simulated machine: the point of ``load`` and ``output_length``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.build import cost_of, costs_of, kv_room, policy_of, sim_device, workload_of
from experiments.machines import TIMEOUT_NS
from experiments.schema import App
from experiments.settings import experiment
from hybridattn.core.config import PAGE_SIZES, EngineConfig
from hybridattn.core.errors import InputError
from hybridattn.core.records import RequestRecord, RunRecords
from hybridattn.core.trace import Trace
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.engine.replay import Replay, Served
from hybridattn.metrics.report import RunMetrics, run_metrics
from hybridattn.metrics.throughput import without_first
from hybridattn.policies.base import Policy
from hybridattn.workload.item import Workload

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
    "recomputed_tokens",
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

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            sizes = ", ".join(map(str, PAGE_SIZES))
            raise InputError(f"settings.page_size must be one of {sizes}, got {self.page_size}")


@experiment(ServeSettings)
def point(app: App, settings: ServeSettings) -> dict[str, Any]:
    """One row: latency and throughput of the workload under a policy."""
    workload = workload_for(app, settings)
    costs = costs_of(app)
    engine = engine_for(app, settings, policy_of(app, costs), sim_device(app, costs.pricing))
    served = Replay(engine, workload).run()
    return row(app, settings, workload, engine, served, served.requests)


def workload_for(app: App, settings: ServeSettings) -> Workload:
    """The workload of the configuration, scaled and cut."""
    if app.device.name != "sim":
        raise InputError(f"this experiment serves declared lengths on the device sim, not on {app.device.name}")
    workload = workload_of(app).scaled(settings.time_scale)
    return workload.take(settings.limit) if settings.limit else workload


def engine_for(app: App, settings: ServeSettings, policy: Policy, device: SimDevice, **options: Any) -> Engine:
    """An engine with the room for K,V that the machine has; ``options`` are further ones of ``EngineConfig``."""
    cost, room = cost_of(app), kv_room(app)
    config = EngineConfig(
        gpu_kv_blocks=room.gpu_tokens // settings.page_size,
        cpu_kv_blocks=room.cpu_tokens // settings.page_size,
        page_size=settings.page_size,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        op_timeout_ns=TIMEOUT_NS,
        **options,
    )
    stages = PricedStages(cost.shape, cost.dtype, exposed=app.device.exposed_us > 0)
    return Engine(stages, device, policy, config)


def metrics_of(engine: Engine, records: RunRecords) -> RunMetrics:
    """Metrics of what a simulated engine did, of which no spans were kept."""
    device = engine.device
    return run_metrics(records, Trace(device.name, device.kind, device.profile, ""))


def row(
    app: App,
    settings: ServeSettings,
    workload: Workload,
    engine: Engine,
    served: Served,
    requests: Sequence[RequestRecord],
) -> dict[str, Any]:
    """What was served, as columns. ``requests`` may count from earlier arrivals than the engine saw."""
    if not requests:
        raise InputError(f"workload {workload.name}: no request was served, {served.refused} could never fit")
    layers = cost_of(app).shape.num_layers
    found, room = metrics_of(engine, RunRecords(layers, without_first(requests, settings.drop_first))), kv_room(app)
    return {
        **found.as_row(KEPT),
        "requests": len(workload),
        "refused": served.refused,
        "arrival_rate_per_s": workload.rate_per_s,
        "gpu_kv_tokens": room.gpu_tokens,
        "cpu_kv_tokens": room.cpu_tokens,
    }
