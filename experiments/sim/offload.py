"""Full offload against GPU-only by output length: ``python -m experiments.sim.offload``.

All decode attention on the CPU (``cpu_only``, two micro-batches in turn), as many requests as 32 GB of K,V in host
memory, on an A10G with an 8B model; inputs of 1,000 tokens, steady state with the prefill that every output length
brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.sim.ideal import open_sim
from experiments.sim.machines import Setting
from experiments.sim.neo import pricing_at
from experiments.sim.output import parser, publish
from hybridattn.cost.catalog import shape
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.fixed import CpuOnly, GpuOnly
from hybridattn.policies.load import Load

MODEL, INPUT = "llama3.1-8b", 1000
GPU_TOKENS, CPU_TOKENS = 25_600, 245_760
CPUS = (15.0, 27.0, 60.0, 150.0)
OUTPUTS = (50, 100, 200, 400, 800)


def gain(cpu_gb_s: float, output: int) -> dict[str, Any]:
    """Full offload over GPU-only in output tokens per second."""
    setting = Setting(shape(MODEL), "fp16", pricing_at("a10g", "epyc-7r32-16c", "pcie4-x16", cpu_gb_s))
    costs, context = setting.costs, INPUT + output // 2
    per_token = INPUT / output
    on_gpu = Load(GPU_TOKENS // (INPUT + output), 0, context, per_token)
    on_cpu = Load(0, CPU_TOKENS // (INPUT + output), context, per_token)
    alone = SteadyRun(costs, costs.pricing, GpuOnly(), on_gpu, open_sim).measure(20, 200).tokens_per_s
    full = SteadyRun(costs, costs.pricing, CpuOnly(), on_cpu, open_sim).measure(400, 1600).tokens_per_s
    cpu_rate = 64e9 / (costs.num_layers * costs.cpu_ns(64, 64 * context))
    return {"cpu_gb_s": cpu_gb_s, "output": output, "gain": full / alone, "rate": cpu_rate / alone}


def main(argv: Sequence[str] | None = None) -> None:
    args = parser("offload", __doc__ or "").parse_args(argv)
    rows = [gain(cpu, output) for cpu in CPUS for output in OUTPUTS]
    columns = {
        "CPU [GB/s]": "{cpu_gb_s:.0f}",
        "output": "{output}",
        "N_C over the GPU-only rate": "{rate:.2f}",
        "full offload over GPU-only": "{gain:.2f}",
    }
    weak = [f"{r['cpu_gb_s']:.0f} GB/s at output {r['output']}" for r in rows if r["gain"] < 0.6]
    verdict = [f"below 0.6: {'; '.join(weak) or 'none'}"]
    publish("offload", rows, columns, verdict, args.results)


if __name__ == "__main__":
    main()
