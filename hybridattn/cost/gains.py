"""Predicted throughput of the fixed strategies for one layout of requests, by closed forms over a priced machine.

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
class View:
    """How well things go: a factor on the CPU's attention rate, and work exposed per layer and sub-batch [ns]."""

    name: str
    cpu_factor: float
    exposed_ns: int

    def __post_init__(self) -> None:
        if not self.cpu_factor > 0 or self.exposed_ns < 0:
            raise InputError(f"view {self.name}: cpu_factor {self.cpu_factor}, exposed_ns {self.exposed_ns}")


# A CPU misjudged by a quarter either way; launches from well hidden to one eager relaunch per layer.
VIEWS = (View("low", 0.75, 150_000), View("nominal", 1.0, 20_000), View("high", 1.25, 2_000))


@dataclass(frozen=True, slots=True)
class Layout:
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
            raise InputError(f"layout of {self.gpu_rows} GPU rows, {self.cpu_rows} CPU rows, context {self.context}")

    @property
    def num_layers(self) -> int:
        return self.costs.num_layers

    def linear_ns(self, rows: float) -> int:
        """Linear stages of all layers and the head for ``rows`` rows (rounded up)."""
        return self.costs.step_linear_ns(math.ceil(rows))

    @property
    def attention_ns(self) -> int:
        """Attention of the GPU rows in all layers."""
        return self.num_layers * self.costs.attention_ns(self.gpu_rows, self.gpu_rows * self.context)

    @property
    def step_ns(self) -> int:
        """A step without CPU rows (P)."""
        return self.linear_ns(self.gpu_rows) + self.attention_ns

    @property
    def together(self) -> int:
        """Rows of a micro-batch of all CPU rows, at most 64."""
        return min(max(self.cpu_rows, 1), 64)

    @property
    def cpu_token_ns(self) -> float:
        """CPU time for one token of one request, all layers (1 / N_C)."""
        return self.num_layers * self.costs.cpu_ns(self.together, self.together * self.context) / self.together

    @property
    def copy_token_ns(self) -> float:
        """Time of the busier copy lane for one token of one request, all layers."""
        slower = max(self.costs.down_ns(self.together), self.costs.up_ns(self.together))
        return self.num_layers * slower / self.together


def predict(layout: Layout, view: View) -> dict[str, float]:
    """Decode tokens per second of each of ``STRATEGIES``, and ``bound``, which none of them can exceed.

    A strategy that would be slower with CPU rows still runs them: nothing here falls back. ``gpu_only`` is 0 when no
    request fits on the GPU.
    """
    rate = _cpu_rate(layout, view)
    gpu_only = layout.gpu_rows / layout.step_ns if layout.gpu_rows else 0.0
    whole = (layout.gpu_rows + layout.cpu_rows) / (layout.step_ns or layout.linear_ns(1))
    per_ns = {
        "gpu_only": gpu_only,
        "sync_offload": _sync_offload(layout, view, rate),
        "asymmetric": _asymmetric(layout, view, rate),
        "async_overlap": _async_overlap(layout, view, rate),
        "bound": min(gpu_only + rate, whole) if layout.cpu_rows else gpu_only,
    }
    return {name: value * 1e9 for name, value in per_ns.items()}


def _cpu_rate(layout: Layout, view: View) -> float:
    """Tokens per ns that the CPU can serve: its attention, or the copies that feed it."""
    return min(view.cpu_factor / layout.cpu_token_ns, 1 / layout.copy_token_ns)


def _sync_offload(layout: Layout, view: View, rate: float) -> float:
    """Waits at every layer: rows that return within the GPU's attention of the layer, or all of them."""
    best = 0.0
    for rows in {min(layout.cpu_rows, math.floor(layout.attention_ns * rate)), layout.cpu_rows}:
        exposed = layout.num_layers * view.exposed_ns if rows else 0
        linear = layout.linear_ns(layout.gpu_rows + rows)
        took = linear + max(layout.attention_ns, rows / rate) + exposed
        best = max(best, (layout.gpu_rows + rows) / took if took else 0.0)
    return best


def _asymmetric(layout: Layout, view: View, rate: float) -> float:
    """Two sub-batches, with as many CPU rows as the CPU serves while the GPU works, or all of them."""
    exposed = 2 * layout.num_layers * view.exposed_ns

    def gpu_ns(rows: int) -> float:
        halves = layout.linear_ns(layout.gpu_rows + rows / 2) + layout.linear_ns(rows / 2)
        return halves + layout.attention_ns + exposed

    served = layout.cpu_rows
    for _ in range(8):  # fewer rows take less time, in which fewer are served: a few rounds settle it
        served = min(served, math.floor(rate * gpu_ns(served)))
    per_ns = (
        (layout.gpu_rows + r) / max(gpu_ns(r), r / rate) for r in {served, layout.cpu_rows} if layout.gpu_rows + r
    )
    return max(per_ns, default=0.0)


def _async_overlap(layout: Layout, view: View, rate: float) -> float:
    """One layer per step for every CPU row, spread over the layers, up to what the CPU serves."""
    if not layout.gpu_rows:
        return _sync_offload(layout, view, rate)
    tokens = overlap_advance(layout.num_layers) * layout.cpu_rows / layout.num_layers
    exposed = layout.num_layers * view.exposed_ns if layout.cpu_rows else 0
    took = layout.linear_ns(layout.gpu_rows + tokens) + layout.attention_ns + exposed
    return layout.gpu_rows / took + min(tokens / took, rate)
