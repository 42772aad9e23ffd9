"""A layout at once, by closed forms: what serves until a simulation has had its say.

A step of ``b`` GPU rows and ``n`` CPU rows that are waited for at every layer, over L layers:

    step(n) = linear stages of b + n rows + L * max(GPU attention of b rows, down(n) + CPU attention of n rows + up(n))
    rate(n) = (b + n) / step(n)                                        rate(0): GPU-only

Without GPU rows, ``n`` rows as one micro-batch, or two halves that take turns:

    one    linear stages of n rows + L * back(n)                       back(n) = down(n) + CPU attention(n) + up(n)
    two    max(2 * linear stages of n/2 rows, linear stages of n/2 rows + L * back(n/2))

With requests over both tiers (``hybridattn.cost.split``) the CPU attends to cold parts beside the GPU's attention.
Micro-batches of whole requests beside them advance one layer in a step, and L + 1 steps make a token.
"""

from __future__ import annotations

from hybridattn.cost.costs import Costs
from hybridattn.cost.split import split_layer
from hybridattn.policies.layouts import Layout, hidden_rows, split_layouts
from hybridattn.policies.load import Limits, Load


def at_once(load: Load, costs: Costs, limits: Limits, min_gain: float, split: bool = False) -> Layout:
    """The best of GPU-only, blocking offload of all or of fewer CPU rows, and with ``split`` requests over both tiers;
    without GPU rows one or two micro-batches.

    Takes well below a millisecond: a handful of prices, which the cost model remembers.
    """
    if not load.gpu_rows:
        return alone_on_cpu(load, costs)
    alone_ns = waited_step_ns(load, 0, costs)
    best, highest = Layout("gpu_only"), load.gpu_rows / alone_ns * min_gain
    for rows in _worth_trying(load, costs):
        step_ns = waited_step_ns(load, rows, costs)
        found = (load.gpu_rows + rows) / step_ns
        if found > highest and _keeps(limits, step_ns / alone_ns, load.cpu_rows / rows):
            bound = rows if rows < load.cpu_rows else None  # all: those that come next take part at once
            best, highest = Layout("sync_offload", max_rows=bound), found
    sizes = load.gpu_rows, load.cpu_rows, load.context
    for layout in split_layouts(costs, *sizes, limits.gpu) if split else ():
        tokens, took_ns = split_step(load, layout, costs)
        turns = costs.num_layers + 1 if layout.kind == "split_overlap" else 1
        if tokens / took_ns > highest and _keeps(limits, took_ns / alone_ns, turns):
            best, highest = layout, tokens / took_ns
    return best


def over_both(load: Load, layout: Layout, costs: Costs) -> tuple[Load, int]:
    """The load under a layout of requests over both tiers: as many GPU rows as the room of the load's and what is cold
    hold, and how much of each is cold; CPU rows are whole requests beside them."""
    if not load.gpu_rows:
        return load, 0
    hot, beside = load.gpu_rows * load.context, layout.kind == "split_overlap"
    layer = split_layer(costs, load.gpu_rows, hot)
    most = load.cpu_rows if beside or layout.max_rows is None else layout.max_rows
    if beside or (layout.max_rows is None and not layer.more_pays(hot)):
        most = int(layer.hidden(hot)) // load.context
    more = min(load.cpu_rows, most)
    rows, rest = load.gpu_rows + more, load.cpu_rows - more if beside else 0
    if beside and layout.max_rows is not None:
        rest = min(rest, layout.max_rows)
    return Load(rows, rest, load.context, load.prompt_per_token), load.context - hot // rows if more else 0


def split_step(load: Load, layout: Layout, costs: Costs) -> tuple[float, float]:
    """Tokens of a step and its time, of requests over both tiers."""
    split, cold = over_both(load, layout, costs)
    rows, num_layers = split.gpu_rows, costs.num_layers
    layer = split_layer(costs, rows, max(1, load.gpu_rows * load.context))
    cold_ns = layer.tau_ns + rows * cold * layer.cpu_token_ns if cold else 0.0
    attention = costs.attention_ns(rows, rows * (load.context - cold))
    joining = -(-split.cpu_rows // layout.micro_batches) if split.cpu_rows else 0
    step_ns = costs.step_linear_ns(rows + joining) + num_layers * (max(attention, cold_ns) + costs.up_ns(joining))
    return rows + split.cpu_rows / (num_layers + 1), step_ns


def rate(load: Load, costs: Costs, min_gain: float = 1.0) -> float:
    """Tokens per nanosecond of the layout that ``at_once`` takes, without limits."""
    layout = at_once(load, costs, Limits(), min_gain)
    if not load.gpu_rows:
        return load.cpu_rows / _alone_step_ns(load, layout.micro_batches, costs)
    rows = 0 if layout.kind == "gpu_only" else layout.max_rows or load.cpu_rows
    return (load.gpu_rows + rows) / waited_step_ns(load, rows, costs)


def alone_on_cpu(load: Load, costs: Costs) -> Layout:
    """Nothing but CPU rows: all together, or two micro-batches, of which one attends while the other computes.

    All together they are waited for, so that they go on at every layer when GPU rows come.
    """
    one, two = (_alone_step_ns(load, k, costs) for k in (1, 2))
    return Layout("async_overlap", 2) if load.cpu_rows > 1 and two < one else Layout("sync_offload")


def _alone_step_ns(load: Load, micro_batches: int, costs: Costs) -> int:
    """Time in which each of the CPU rows, alone, gets a token."""
    rows = -(-load.cpu_rows // micro_batches)
    linear, back = costs.step_linear_ns(rows), costs.num_layers * back_ns(rows, load.context, costs)
    return linear + back if micro_batches == 1 else max(2 * linear, linear + back)


def waited_step_ns(load: Load, rows: int, costs: Costs) -> int:
    """A step of the load's GPU rows and ``rows`` CPU rows that are waited for at every layer."""
    attention = costs.attention_ns(load.gpu_rows, load.gpu_rows * load.context)
    back = back_ns(rows, load.context, costs)
    return costs.step_linear_ns(load.gpu_rows + rows) + costs.num_layers * max(attention, back)


def back_ns(rows: int, context: int, costs: Costs) -> int:
    """From q, k, v on the GPU to the attention output there, for ``rows`` CPU rows; 0 for none."""
    if not rows:
        return 0
    return costs.round_trip_ns + costs.down_ns(rows) + costs.cpu_ns(rows, rows * context) + costs.up_ns(rows)


def move_ns(load: Load, costs: Costs) -> float:
    """A copy of the K,V of one request, at most: by what q, k, v of the CPU rows take to go down."""
    rows = max(1, load.cpu_rows)
    return costs.cost.move_request(load.context).num_bytes * costs.down_ns(rows) / costs.cost.send_qkv(rows).num_bytes


def _worth_trying(load: Load, costs: Costs) -> list[int]:
    """All CPU rows, half and a quarter of them, and as many as hide behind the GPU's attention."""
    rows = load.cpu_rows
    wanted = {rows, rows // 2, rows // 4, *hidden_rows(costs, load.gpu_rows, load.context)}
    return sorted({min(n, rows) for n in wanted if n > 0}, reverse=True)


def _keeps(limits: Limits, stretch: float, turns: float) -> bool:
    """CPU rows beyond those that take part wait for their turn."""
    gpu = limits.gpu is None or stretch <= limits.gpu
    return gpu and (limits.cpu is None or stretch * turns <= limits.cpu)
