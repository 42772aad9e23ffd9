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

MOST_GPU_ROWS, MOST_CPU_ROWS = 40, 640


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


SHAPES = (  # machine, model, contexts
    ("t4", "llama2-7b", (400, 800)),
    ("a10", "llama3.1-8b", (1000, 4000)),
    ("a10", "llama2-7b", (400, 1000)),
    ("a100", "llama3.1-8b", (1000, 8000)),
    ("a100", "llama2-7b", (1000, 4000)),
    ("h200", "llama3.1-8b", (2000, 16000)),
)
CPU_GB_S, RATIOS, OUTPUT = (40.0, 100.0, 400.0), (1.0, 4.0, 16.0), 200


def grid() -> list[Cell]:
    """108 settings: every GPU, model and context with every CPU bandwidth and load; every second one with prompts."""
    cells: list[Cell] = []
    for machine, model, contexts in SHAPES:
        for context in contexts:
            for cpu_gb_s in CPU_GB_S:
                for ratio in RATIOS:
                    output = OUTPUT if len(cells) % 2 else None
                    cells.append(Cell(machine, model, context, output, cpu_gb_s, ratio))
    return cells
