"""Layouts: how CPU rows may be grouped and served. What a planner chooses from."""

from __future__ import annotations

from dataclasses import dataclass

from hybridattn.core.errors import InputError
from hybridattn.cost.costs import Costs
from hybridattn.cost.split import split_layer
from hybridattn.policies.asymmetric import Asymmetric
from hybridattn.policies.base import Policy
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly, SyncOffload
from hybridattn.policies.rule import Rule
from hybridattn.policies.split import Split

KINDS = ("gpu_only", "asymmetric", "async_overlap", "sync_offload", "rule", "split", "split_overlap")


@dataclass(frozen=True, slots=True)
class Layout:
    """A strategy with its numbers; those that its kind does not use stay at their defaults.

    Parameters
    ----------
    max_rows : int, optional
        CPU rows that take part at most. The others are not admitted to the CPU tier: they wait in the queue. For
        ``split``, requests beyond those that the GPU tier holds; for ``split_overlap``, rows of the micro-batches.
    """

    kind: str
    micro_batches: int = 1
    omega: float = 0.0
    stretch: float | None = None
    waited_rows: int = 0
    max_rows: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"layout kind '{self.kind}' is none of {', '.join(KINDS)}")

    def __str__(self) -> str:
        parts = [f"k={self.micro_batches}"] if self.kind in ("async_overlap", "rule", "split_overlap") else []
        parts += [f"omega={self.omega:g}"] if self.kind == "rule" else []
        parts += [f"stretch={self.stretch:g}"] if self.stretch is not None else []
        parts += [f"waited={self.waited_rows}"] if self.waited_rows else []
        parts += [f"rows<={self.max_rows}"] if self.max_rows is not None else []
        return f"{self.kind}({', '.join(parts)})" if parts else self.kind


def policy_of(layout: Layout, costs: Costs, context: int = 0, gpu_limit: float | None = None) -> Policy:
    """The policy that serves a layout of requests of ``context`` tokens, whose ``gpu_limit`` bounds what policies find
    out for themselves (``Split``)."""
    if layout.kind == "gpu_only":
        return GpuOnly()
    if layout.kind == "split":
        if layout.max_rows is not None and context:
            return Split(costs, max_cold_tokens=layout.max_rows * context)
        return Split(costs, gpu_limit=gpu_limit)
    if layout.kind == "split_overlap":
        return Split(costs, gpu_limit=gpu_limit, micro_batches=layout.micro_batches, max_rows=layout.max_rows)
    if layout.kind == "asymmetric":
        return Asymmetric(costs, choice="always", max_rows=layout.max_rows)
    if layout.kind == "sync_offload":
        return SyncOffload(max_rows=layout.max_rows)
    if layout.kind == "async_overlap":
        return AsyncOverlap(max_micro_batches=layout.micro_batches, equal=True, max_rows=layout.max_rows)
    return Rule(costs, layout.micro_batches, layout.omega, layout.stretch, layout.waited_rows, layout.max_rows)


def hidden_rows(costs: Costs, gpu_rows: int, context: int) -> tuple[int, int]:
    """CPU rows that are back within the GPU's attention of a layer, and within that and half of its linear stage."""
    attention = costs.attention_ns(gpu_rows, gpu_rows * context)
    copies = costs.down_ns(1) + costs.up_ns(1)
    one, many = costs.cpu_ns(1, context), costs.cpu_ns(33, 33 * context)
    per_row, start = (many - one) / 32, one - (many - one) / 32
    found = [
        int((window - copies - start) / per_row) for window in (attention, attention + costs.linear_ns(gpu_rows) // 2)
    ]
    return max(0, found[0]), max(0, found[1])


def fixed_layouts(costs: Costs, gpu_rows: int, cpu_rows: int, context: int) -> list[Layout]:
    """The fixed policies with their numbers tuned: GPU-only, NEO's pipeline, overlap by micro-batches, bounded
    offload."""
    found = [Layout("gpu_only"), Layout("asymmetric")]
    found += [Layout("async_overlap", k) for k in (1, 2, 4, 8) if k <= cpu_rows]
    bounds = {n for n in hidden_rows(costs, gpu_rows, context) if 0 < n < cpu_rows}
    found += [Layout("sync_offload", max_rows=n) for n in sorted(bounds)]
    return [*found, Layout("sync_offload")] if cpu_rows else found  # all: those that come next take part at once


def split_layouts(
    costs: Costs, gpu_rows: int, cpu_rows: int, context: int, gpu_limit: float | None = None
) -> list[Layout]:
    """Requests over both tiers; as many as a limit allows, or as hide where more are said to pay; and as many as hide
    beside micro-batches of whole requests that the CPU gets done in what is left of a layer."""
    hot = gpu_rows * context
    layer = split_layer(costs, gpu_rows, hot)
    hidden = min(cpu_rows, int(layer.hidden(hot)) // context)
    bound = hidden if gpu_limit is None else min(cpu_rows, int(layer.within(hot, gpu_limit)) // context)
    found = [Layout("split")]
    if bound and (gpu_limit is not None or layer.more_pays(hot)):
        found.append(Layout("split", max_rows=bound))
    each, rest = int(layer.left(hot, hidden * context)) // context, cpu_rows - hidden
    if each and rest:
        count = min(costs.num_layers + 1, -(-rest // each))
        found.append(Layout("split_overlap", count, max_rows=count * each if count * each < rest else None))
    return found


def rule_layouts(
    costs: Costs,
    gpu_rows: int,
    cpu_rows: int,
    context: int,
    stretches: tuple[float | None, ...] = (None,),
    omegas: tuple[float, ...] = (0.0, 0.5, 1.0),
) -> list[Layout]:
    """The local rule over few micro-batches, and over slow micro-batches beside one that is always waited for."""
    found = [
        Layout("rule", k, omega, stretch)
        for k in (1, 2, 3, 4, 8)
        if k <= cpu_rows
        for omega in omegas
        for stretch in stretches
    ]
    for waited in sorted({n for n in hidden_rows(costs, gpu_rows, context) if 0 < n < cpu_rows}):
        found += [Layout("rule", k, 0.5, s, waited) for k in (1, 2, 4) for s in stretches]
    return found


def bounded(layouts: list[Layout], rows: int) -> list[Layout]:
    """The same layouts with at most ``rows`` CPU rows."""
    return [
        Layout(a.kind, a.micro_batches, a.omega, a.stretch, min(a.waited_rows, rows), min(a.max_rows or rows, rows))
        for a in layouts
        if a.kind != "gpu_only"
    ]
