"""One layer whose attention is shared between GPU and CPU: the point of ``overlap``.

gpu.compute    |linear|attention of (1 - f) B rows|wait|linear
gpu.d2h               |q,k,v|
cpu.attention               |attention of f B rows|
gpu.h2d                                           |out|
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.build import cost_of, pricing_of, sim_device
from experiments.schema import App
from experiments.settings import experiment
from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D, Op, Work
from hybridattn.cost.priced_stages import EXPOSED, with_exposed
from hybridattn.cost.pricing import Together

TIMEOUT_NS = 10**13


@dataclass
class OverlapSettings:
    """``settings`` of ``overlap``: ``fraction`` of ``rows`` requests of ``context`` tokens attend on the CPU."""

    rows: int = 64
    context: int = 1000
    fraction: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise InputError(f"settings.fraction must lie in 0..1, got {self.fraction}")
        if self.rows < 1 or self.context < 1:
            raise InputError(
                f"settings.rows and settings.context must be at least 1, got {self.rows} and {self.context}"
            )


@experiment(OverlapSettings)
def point(app: App, settings: OverlapSettings) -> dict[str, Any]:
    """One row: time of the layer, tokens per second of such layers, and how much of the CPU's time is hidden."""
    s, cost = settings, cost_of(app)
    on_cpu = round(s.rows * s.fraction)
    pricing = with_exposed(pricing_of(app), round(app.device.exposed_us * 1e3) if on_cpu else 0)
    device = sim_device(app, pricing, record=True)
    on_gpu = s.rows - on_cpu
    linear: Work = cost.linear(s.rows)
    if (GPU, EXPOSED) in pricing.models:
        linear = Together(linear, Work(EXPOSED, 0.0, 0, 1))
    before = device.submit(Op("linear", GPU, linear))
    gpu = before
    if on_gpu:
        gpu = device.submit(Op("attention", GPU, cost.decode_attention(on_gpu, on_gpu * s.context)))
    if on_cpu:
        down = device.submit(Op("send q,k,v", D2H, cost.send_qkv(on_cpu)), (before,))
        cpu = device.submit(Op("attention", CPU, cost.decode_attention(on_cpu, on_cpu * s.context)), (down,))
        cpu.wait(TIMEOUT_NS)
        up = device.submit(Op("fetch output", H2D, cost.fetch_output(on_cpu)), (cpu,))
        exposed_ns = max(0, up.end_ns - gpu.end_ns)
        cpu_ns = cpu.end_ns - cpu.start_ns
    else:
        exposed_ns = cpu_ns = 0
    layer_ns = gpu.end_ns + exposed_ns
    return {
        "kind": "simulated",
        "device": "sim",
        "profile": pricing.fingerprint,
        "cpu_rows": on_cpu,
        "gpu_rows": on_gpu,
        "layer_ns": layer_ns,
        "rows_per_s": s.rows / layer_ns * 1e9,
        "cpu_attention_ns": cpu_ns,
        "exposed_ns": exposed_ns,
        "hidden_fraction": None if not cpu_ns else max(0.0, 1 - exposed_ns / cpu_ns),
    }
