"""Predicted throughput of the fixed strategies for one load of requests, by closed forms over a priced machine.

The forms of ``crossover`` with the machine's own times in place of the ideal ones: rows cost what the roofline says,
the head is counted, copies limit the rate of CPU rows, and each strategy pays for the work it exposes at every layer.
Still steady decode: no prefill, no queueing, equal contexts. The simulator is the judge; this is what fits into a
sentence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybridattn.core.errors import InputError
from hybridattn.cost.costs import Costs
from hybridattn.cost.crossover import overlap_advance

STRATEGIES = ("gpu_only", "sync_offload", "asymmetric", "async_overlap")


@dataclass(frozen=True, slots=True)
class Outlook:
    """How well things go: a factor on the CPU's attention rate, and work exposed per layer and sub-batch [ns]."""

    name: str
    cpu_factor: float
    exposed_ns: int

    def __post_init__(self) -> None:
        if not self.cpu_factor > 0 or self.exposed_ns < 0:
            raise InputError(f"outlook {self.name}: cpu_factor {self.cpu_factor}, exposed_ns {self.exposed_ns}")


# A CPU misjudged by a quarter either way; launches from well hidden to one eager relaunch per layer.
OUTLOOKS = (Outlook("low", 0.75, 150_000), Outlook("nominal", 1.0, 20_000), Outlook("high", 1.25, 2_000))


@dataclass(frozen=True, slots=True)
class PricedLoad:
    """Requests of equal context on each tier, on a machine.

    Parameters
    ----------
    gpu_rows, cpu_rows : int
        Decoding requests whose KV is on the GPU and on the CPU tier.
    context : int
        K,V tokens that each attends to.
    """

    costs: Costs
    gpu_rows: int
    cpu_rows: int
    context: int

    def __post_init__(self) -> None:
        if self.gpu_rows < 0 or self.cpu_rows < 0 or self.context < 1:
            raise InputError(f"load of {self.gpu_rows} GPU rows, {self.cpu_rows} CPU rows, context {self.context}")

    @property
    def attention_ns(self) -> int:
        """Attention of the GPU rows in all layers."""
        return self.costs.num_layers * self.costs.attention_ns(self.gpu_rows, self.gpu_rows * self.context)

    @property
    def step_ns(self) -> int:
        """A step without CPU rows (P)."""
        return self.costs.step_ns(self.gpu_rows, self.gpu_rows * self.context)

    @property
    def together(self) -> int:
        """Rows of a micro-batch of all CPU rows, at most 64."""
        return min(max(self.cpu_rows, 1), 64)

    @property
    def cpu_token_ns(self) -> float:
        """CPU time for one token of one request, all layers (1 / N_C)."""
        return self.costs.num_layers * self.costs.cpu_ns(self.together, self.together * self.context) / self.together

    @property
    def copy_token_ns(self) -> float:
        """Time of the busier copy lane for one token of one request, all layers."""
        slower = max(self.costs.down_ns(self.together), self.costs.up_ns(self.together))
        return self.costs.num_layers * slower / self.together


def predict(load: PricedLoad, outlook: Outlook) -> dict[str, float]:
    """Decode tokens per second of each of ``STRATEGIES``, and ``bound``, which none of them can exceed.

    A strategy that would be slower with CPU rows still runs them: nothing here falls back. ``gpu_only`` is 0 when no
    request fits on the GPU.
    """
    rate = _cpu_rate(load, outlook)
    gpu_only = load.gpu_rows / load.step_ns if load.gpu_rows else 0.0
    whole = (load.gpu_rows + load.cpu_rows) / (load.step_ns or load.costs.step_linear_ns(1))
    per_ns = {
        "gpu_only": gpu_only,
        "sync_offload": _sync_offload(load, outlook, rate),
        "asymmetric": _asymmetric(load, outlook, rate),
        "async_overlap": _async_overlap(load, outlook, rate),
        "bound": min(gpu_only + rate, whole) if load.cpu_rows else gpu_only,
    }
    return {name: value * 1e9 for name, value in per_ns.items()}


def _cpu_rate(load: PricedLoad, outlook: Outlook) -> float:
    """Tokens per ns that the CPU can serve: its attention, or the copies that feed it."""
    return min(outlook.cpu_factor / load.cpu_token_ns, 1 / load.copy_token_ns)


def _sync_offload(load: PricedLoad, outlook: Outlook, rate: float) -> float:
    """Waits at every layer: rows that return within the GPU's attention of the layer, or all of them."""
    best = 0.0
    for rows in {min(load.cpu_rows, math.floor(load.attention_ns * rate)), load.cpu_rows}:
        exposed = load.costs.num_layers * outlook.exposed_ns if rows else 0
        linear = load.costs.step_linear_ns(load.gpu_rows + rows)
        took = linear + max(load.attention_ns, rows / rate) + exposed
        best = max(best, (load.gpu_rows + rows) / took if took else 0.0)
    return best


def _asymmetric(load: PricedLoad, outlook: Outlook, rate: float) -> float:
    """Two sub-batches, with as many CPU rows as the CPU serves while the GPU works, or all of them."""
    exposed = 2 * load.costs.num_layers * outlook.exposed_ns

    def gpu_ns(rows: int) -> float:
        halves = sum(load.costs.step_linear_ns(math.ceil(n)) for n in (load.gpu_rows + rows / 2, rows / 2))
        return halves + load.attention_ns + exposed

    served = load.cpu_rows
    for _ in range(8):  # fewer rows take less time, in which fewer are served: a few rounds settle it
        served = min(served, math.floor(rate * gpu_ns(served)))
    per_ns = ((load.gpu_rows + r) / max(gpu_ns(r), r / rate) for r in {served, load.cpu_rows} if load.gpu_rows + r)
    return max(per_ns, default=0.0)


def _async_overlap(load: PricedLoad, outlook: Outlook, rate: float) -> float:
    """One layer per step for every CPU row, spread over the layers, up to what the CPU serves."""
    if not load.gpu_rows:
        return _sync_offload(load, outlook, rate)
    tokens = overlap_advance(load.costs.num_layers) * load.cpu_rows / load.costs.num_layers
    exposed = load.costs.num_layers * outlook.exposed_ns if load.cpu_rows else 0
    took = load.costs.step_linear_ns(math.ceil(load.gpu_rows + tokens)) + load.attention_ns + exposed
    return load.gpu_rows / took + min(tokens / took, rate)
