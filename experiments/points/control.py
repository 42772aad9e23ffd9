"""A workload served behind a control path that shares its cores: the simulated point of ``control_path``.

The model and its formulas are in ``experiments/control.py``. A request counts from its own arrival: what it waits for
its tokenizer is part of its time to first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from experiments.build import cost_of, costs_of, kv_room, policy_of, pricing_of, profiles_of
from experiments.control import LAYOUTS, ControlPath, Cores
from experiments.points.serve import ServeSettings, engine_for, row, workload_for
from experiments.schema import App
from experiments.settings import experiment
from hybridattn.core.errors import InputError
from hybridattn.core.records import RequestRecord
from hybridattn.core.stages import CPU_TIER
from hybridattn.cost.costs import Costs, with_cpu_factor
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.replay import Replay
from hybridattn.workload.item import Workload


@dataclass
class ControlSettings(ServeSettings):
    """``settings`` of ``control_path``, beside those of every served workload.

    sharing : own, shared or busy (see ``Cores.laid_out``)
    busy_processes : of others, under ``busy``
    load : arrival rate as a share of what the GPU could serve if it held all; null: as the workload says
    request_us, token_us, schedule_us, op_us, poll_us : costs of the control path on a core of its own
    tokenizers : tokenizer threads; the driver is one thread more
    """

    sharing: str = "own"
    busy_processes: int = 32
    load: float | None = None
    request_us: float = 0.0
    token_us: float = 0.0
    schedule_us: float = 0.0
    op_us: float = 0.0
    poll_us: float = 0.0
    tokenizers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sharing not in LAYOUTS:
            raise InputError(f"settings.sharing must be one of {', '.join(LAYOUTS)}, got '{self.sharing}'")
        if self.load is not None and self.load <= 0:
            raise InputError(f"settings.load must be positive, got {self.load}")

    def path(self) -> ControlPath:
        return ControlPath(
            request_ns=self.request_us * 1e3,
            token_ns=self.token_us * 1e3,
            schedule_ns=self.schedule_us * 1e3,
            op_ns=self.op_us * 1e3,
            poll_ns=self.poll_us * 1e3,
            tokenizers=self.tokenizers,
        )


@experiment(ControlSettings)
def point(app: App, settings: ControlSettings) -> dict[str, Any]:
    """One row: latency and throughput with cores shared as ``sharing`` says."""
    s, path = settings, settings.path()
    workload = _loaded(app, s, workload_for(app, s))
    pricing = pricing_of(app)
    attends = CPU_TIER in policy_of(app, Costs(cost_of(app), pricing)).tiers
    _, cpu, _ = profiles_of(app)
    cores = Cores.laid_out(s.sharing, int(cpu.value("cores")), path.tokenizers + 1, attends, s.busy_processes)
    if attends:
        pricing = with_cpu_factor(pricing, 1 / cores.attention_share)
    policy = policy_of(app, Costs(cost_of(app), pricing))
    op_ns, poll_ns, schedule_ns = (round(ns / cores.speed) for ns in (path.op_ns, path.poll_ns, path.schedule_ns))
    device = SimDevice(pricing, record=False, submit_ns=max(1, op_ns), poll_ns=poll_ns)  # 0 would skip whole steps
    arrivals, prompts = ([getattr(i, name) for i in workload.items] for name in ("arrival_ns", "prompt_tokens"))
    ready = path.ready_ns(arrivals, prompts, cores.speed)
    engine = engine_for(app, s, policy, device)
    served = Replay(
        engine,
        _ready_at(workload, ready),
        on_progress=lambda ended: device.sleep_until_ns(device.now_ns() + schedule_ns),
    ).run()
    waited = [r - a for r, a in zip(ready, arrivals, strict=True)]
    return {
        **row(app, s, workload, engine, served, counted_from(workload, ready, served.requests)),
        "gpu": app.hardware.gpu, "cpu_cores": cores.cores, "cores_are": cpu.note,
        "layout": LAYOUTS[s.sharing], "attention_workers": cores.workers, "control_threads": cores.control,
        "busy_processes": cores.busy, "control_speed": cores.speed,
        "attention_share": cores.attention_share if attends else None,
        "tokenise_mean_ns": fmean(waited), "schedule_step_ns": schedule_ns,
    }  # fmt: skip


def _loaded(app: App, s: ControlSettings, workload: Workload) -> Workload:
    """``workload`` with arrivals so dense that the GPU would be busy for ``load`` of the time.

    A request keeps it busy for its prefill and for its share of the steps that decode it in a full batch.
    """
    if any(item.after is not None for item in workload.items) or workload.concurrency is not None:
        raise InputError(f"workload {workload.name}: control_path serves open arrivals, no sessions, no closed loops")
    if s.load is None or workload.rate_per_s is None:
        return workload
    costs = costs_of(app)
    prompt, output = (round(fmean(getattr(i, n) for i in workload.items)) for n in ("prompt_tokens", "output_tokens"))
    batch = max(1, min(s.max_num_seqs, kv_room(app).gpu_tokens // (prompt + output)))
    prefill_ns = costs.step_linear_ns(prompt) + costs.num_layers * costs.attention_ns(0, 0, [(prompt, prompt)])
    busy_ns = prefill_ns + output * costs.step_ns(batch, batch * (prompt + output // 2)) / batch
    return workload.scaled(workload.rate_per_s * busy_ns / 1e9 / s.load)


def _ready_at(workload: Workload, ready: Sequence[int]) -> Workload:
    """What reaches the engine: items in the order in which they were tokenised."""
    items = [replace(i, arrival_ns=at) for i, at in zip(workload.items, ready, strict=True)]
    return replace(workload, items=tuple(sorted(items, key=lambda i: i.arrival_ns)))


def counted_from(workload: Workload, ready: Sequence[int], records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The engine's records with the arrivals that the requests really had."""
    order = sorted(range(len(ready)), key=ready.__getitem__)  # item of the engine -> item of the workload
    return [replace(r, arrival_ns=workload.items[order[int(r.request_id)]].arrival_ns) for r in records]
