"""The grid of settings on which policies are compared: GPU x model x context x output x CPU bandwidth x load."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.sim.machines import Setting, kv_tokens
from experiments.sim.neo import pricing_at
from hybridattn.cost.catalog import shape
from hybridattn.policies.load import Load


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU with a host, and the share of its K,V memory that is used (less than 1: a GPU shared or capped)."""

    gpu: str
    cpu: str
    link: str
    kv_share: float = 1.0


MACHINES = {
    "t4": Machine("t4", "xeon-8259cl-8c", "pcie3-x16"),
    "a10": Machine("a10", "epyc-7r32-16c", "pcie4-x16"),
    "a100": Machine("a100-80g", "epyc-7r32-32c", "pcie4-x16", 0.25),
    "h200": Machine("h200", "epyc-7r32-32c", "pcie5-x16", 0.15),
}

MOST_GPU_ROWS, MOST_CPU_ROWS = 40, 320


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting. ``output`` None: no prefill in the steady state (very long outputs)."""

    machine: str
    model: str
    context: int
    output: int | None
    cpu_gb_s: float
    ratio: float

    @property
    def load(self) -> Load:
        """Rows: what the GPU's K,V memory holds, capped, and ``ratio`` times as many on the CPU."""
        m = MACHINES[self.machine]
        tokens, _ = kv_tokens(m.gpu, m.cpu, self.model)
        rows = max(2, min(MOST_GPU_ROWS, int(tokens * m.kv_share) // self.context))
        cpu_rows = min(MOST_CPU_ROWS, round(rows * self.ratio))
        per_token = 0.0 if self.output is None else (self.context - self.output / 2) / self.output
        return Load(rows, cpu_rows, self.context, per_token)

    @property
    def setting(self) -> Setting:
        m = MACHINES[self.machine]
        return Setting(shape(self.model), "fp16", pricing_at(m.gpu, m.cpu, m.link, self.cpu_gb_s))

    @property
    def name(self) -> str:
        out = "-" if self.output is None else str(self.output)
        return f"{self.machine} {self.model} ctx {self.context} out {out} {self.cpu_gb_s:g} GB/s {self.ratio:g}:1"


def grid() -> list[Cell]:
    """64 settings: T4 7B and A10, A100, H200 8B; two contexts, with prefill or without, three CPUs, three loads."""
    cells = []
    contexts = {"t4": (400, 800), "a10": (1000, 4000), "a100": (1000, 8000), "h200": (2000, 16000)}
    for name in MACHINES:
        model = "llama2-7b" if name == "t4" else "llama3.1-8b"
        for context in contexts[name]:
            for ratio, cpu_gb_s, output in (
                (1.0, 60.0, None),
                (1.0, 150.0, None),
                (1.0, 300.0, 200),
                (4.0, 60.0, None),
                (4.0, 150.0, None),
                (4.0, 300.0, 200),
                (4.0, 60.0, 200),
                (8.0, 60.0, None),
            ):
                cells.append(Cell(name, model, context, output, cpu_gb_s, ratio))
    return cells
