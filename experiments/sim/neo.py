"""Set-ups of NEO's figures (MLSys 2025, arXiv 2411.01142), as the simulator takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from experiments.sim.machines import TIMEOUT_NS, Setting
from hybridattn.core.config import EngineConfig
from hybridattn.cost.catalog import shape
from hybridattn.cost.machine import SUSTAINED_DRAM, machine
from hybridattn.cost.pricing import Pricing
from hybridattn.cost.profile import Quantity, load_profile
from hybridattn.cost.roofline import Efficiency
from hybridattn.engine.replay import Replay, Served
from hybridattn.policies.registry import make_policy
from hybridattn.workload.item import Workload

PAGE = 16
# One thread launches a stage's kernels and then computes attention: 0.8 ms in NEO's public predictor.
LAUNCH_NS = 800_000


def pricing_at(gpu: str, cpu: str, link: str, cpu_gb_s: float, cpu_launch_ns: int | None = None) -> Pricing:
    """The machine with CPU attention at ``cpu_gb_s`` (10^9 bytes of K,V a second), the fitted constant.

    ``cpu_launch_ns`` is what comes before each CPU attention; default the profile's.
    """
    part = load_profile(cpu, "cpu")
    quantities = dict(part.quantities)
    if cpu_launch_ns is not None:
        quantities["launch"] = Quantity(float(cpu_launch_ns), "ns", "assumed", "set by the experiment")
    if cpu_gb_s * 1e9 > SUSTAINED_DRAM * part.value("bandwidth"):  # a faster host than this one
        more = Quantity(cpu_gb_s * 1e9 / SUSTAINED_DRAM, "B/s", "assumed", "set by the experiment")
        quantities["bandwidth"] = more
    memory = cpu_gb_s * 1e9 / quantities["bandwidth"].value
    efficiency = dict(part.efficiency)
    old, _ = efficiency["decode_attention"]
    efficiency["decode_attention"] = Efficiency(old.compute, memory), f"{cpu_gb_s:g} GB/s, set by the experiment"
    name = f"{part.name} at {cpu_gb_s:g} GB/s" + ("" if cpu_launch_ns is None else f", launch {cpu_launch_ns} ns")
    return machine(gpu, replace(part, quantities=quantities, efficiency=efficiency, fingerprint=name), link)


@dataclass(frozen=True, slots=True)
class Box:
    """A cloud instance of the paper: profile names and the K,V that its two memories hold, in tokens."""

    name: str
    gpu: str
    cpu: str
    link: str
    model: str
    gpu_tokens: int
    cpu_tokens: int
    max_model_len: int
    max_batched_tokens: int = 20_000
    max_num_seqs: int = 1024

    def serve(self, policy: str, workload: Workload, cpu_gb_s: float, **options: Any) -> Served:
        """Serve ``workload`` on a simulated box."""
        setting = Setting(shape(self.model), "fp16", pricing_at(self.gpu, self.cpu, self.link, cpu_gb_s, LAUNCH_NS))
        config = EngineConfig(
            gpu_kv_blocks=self.gpu_tokens // PAGE,
            cpu_kv_blocks=self.cpu_tokens // PAGE,
            page_size=PAGE,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_batched_tokens,
            op_timeout_ns=TIMEOUT_NS,
        )
        engine = setting.engine(make_policy(policy, costs=setting.costs, **options), config)
        return Replay(engine, workload).run()
