"""Set-ups of NEO's figures (MLSys 2025, arXiv 2411.01142), as the simulator takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.machines import TIMEOUT_NS, engine_on, priced, pricing_at
from hybridattn.core.config import EngineConfig
from hybridattn.cost.costs import Costs
from hybridattn.engine.replay import Replay, Served
from hybridattn.policies.registry import make_policy
from hybridattn.workload.item import Workload

PAGE = 16
# One thread launches a stage's kernels and then computes attention: 0.8 ms in NEO's public predictor.
LAUNCH_NS = 800_000


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

    def costs(self, cpu_gb_s: float) -> Costs:
        """The box with its CPU's attention at a bandwidth."""
        return priced(self.model, pricing_at(self.gpu, self.cpu, self.link, cpu_gb_s, LAUNCH_NS))

    def serve(self, policy: str, workload: Workload, cpu_gb_s: float, **options: Any) -> Served:
        """Serve ``workload`` on a simulated box."""
        costs = self.costs(cpu_gb_s)
        config = EngineConfig(
            gpu_kv_blocks=self.gpu_tokens // PAGE,
            cpu_kv_blocks=self.cpu_tokens // PAGE,
            page_size=PAGE,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_batched_tokens,
            op_timeout_ns=TIMEOUT_NS,
        )
        engine = engine_on(costs, make_policy(policy, costs=costs, **options), config)
        return Replay(engine, workload).run()
