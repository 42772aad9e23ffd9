"""What fits where, what limits, and which strategy should win: the content of ``hybridattn plan``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridattn.core.errors import InputError
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.costs import Costs
from hybridattn.cost.crossover import capacity_gain_bound
from hybridattn.cost.gains import OUTLOOKS, STRATEGIES, PricedLoad, predict
from hybridattn.cost.machine import machine
from hybridattn.cost.profile import Profile, load_profile
from hybridattn.cost.stages_cost import ModelCost

GPU_FRACTION = 0.9  # of the GPU's memory for weights and KV; the rest is activations, staging and the context
CPU_FRACTION = 0.8  # of the host's memory for KV; the rest is the system's
WORTH_IT = 1.02  # a predicted gain below this does not pay for its own complexity

GB, GIB = 10**9, 2**30


@dataclass(frozen=True, slots=True)
class Range:
    """A predicted gain over GPU-only: with things going badly, as stated, and well (``gains.OUTLOOKS``)."""

    low: float
    nominal: float
    high: float

    def __str__(self) -> str:
        return f"{self.nominal:.2f}x ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits, and what to run. Rates are decode tokens per second.

    ``gains`` over GPU-only are there when both tiers hold requests, ``capacity_bound`` when the CPU tier holds none.
    """

    bottleneck: str
    reason: str
    winner: str
    throughput: Mapping[str, float] = field(default_factory=dict)
    gains: Mapping[str, Range] = field(default_factory=dict)
    capacity_bound: float | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What fits where, for one machine, model, context and concurrency, and the verdict."""

    machine: str
    model: str
    dtype: str
    context: int
    concurrency: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_request: int
    gpu_kv_bytes: int
    cpu_kv_bytes: int
    gpu_requests: int
    cpu_requests: int
    waiting_requests: int
    verdict: Verdict

    def describe(self) -> str:
        """The plan as lines of text."""
        found = self.verdict
        lines = [
            f"{self.model} {self.dtype} on {self.machine} (computed from profiles)",
            f"  asked              {self.concurrency} at a time, {self.context:,} tokens each",
            f"  weights            {_size(self.weight_bytes)}",
            f"  KV per token       {self.kv_bytes_per_token:,} B",
            f"  KV per request     {_size(self.kv_bytes_per_request)}",
            f"  room for KV        GPU {_size(self.gpu_kv_bytes)}, CPU {_size(self.cpu_kv_bytes)}",
            f"  requests           {self.gpu_requests} on the GPU tier, {self.cpu_requests} on the CPU tier, "
            f"{self.waiting_requests} wait",
            f"  bottleneck         {found.bottleneck}: {found.reason}",
        ]
        for name, rate in found.throughput.items():
            gain = f"  {found.gains[name]} of GPU-only" if name in found.gains else ""
            lines.append(f"  {name:18} {rate:9,.1f} tokens/s{gain}")
        if found.capacity_bound is not None:
            lines.append(f"  CPU help could gain at most {found.capacity_bound:.2f}x, before copies and launches")
        lines.append(f"  predicted winner   {found.winner}")
        return "\n".join(lines + [f"  warning: {w}" for w in found.warnings])


def plan(
    gpu: str | Profile,
    cpu: str | Profile,
    link: str | Profile,
    shape: ModelShape,
    dtype: str,
    context: int,
    concurrency: int,
    kv_dtype: str = "",
) -> Plan:
    """Plan ``concurrency`` requests, each holding ``context`` tokens (prompt and output), of a model on a machine.

    Parameters
    ----------
    gpu, cpu, link
        Shipped names, files, or profiles.
    """
    if context < 1 or concurrency < 1:
        raise InputError(f"a plan needs context and concurrency of at least 1, got {context} and {concurrency}")
    if context > shape.max_model_len:
        raise InputError(f"context {context} exceeds max_model_len {shape.max_model_len} of {shape.name}")
    gpu_part, cpu_part, link_part = (p if isinstance(p, Profile) else load_profile(p) for p in (gpu, cpu, link))
    pricing, cost = machine(gpu_part, cpu_part, link_part), ModelCost(shape, dtype, kv_dtype)
    per_request = context * cost.kv_token_layer_bytes * shape.num_layers
    gpu_kv = int(GPU_FRACTION * gpu_part.value("memory")) - cost.weight_bytes
    cpu_kv = int(CPU_FRACTION * cpu_part.value("memory"))
    fits = gpu_kv >= 0
    gpu_rows = min(concurrency, gpu_kv // per_request) if fits else 0
    cpu_rows = min(concurrency - gpu_rows, cpu_kv // per_request) if fits else 0
    load = PricedLoad(Costs(cost, pricing), gpu_rows, cpu_rows, context)
    return Plan(
        machine=pricing.name,
        model=shape.name,
        dtype=dtype,
        context=context,
        concurrency=concurrency,
        weight_bytes=cost.weight_bytes,
        kv_bytes_per_token=cost.kv_token_layer_bytes * shape.num_layers,
        kv_bytes_per_request=per_request,
        gpu_kv_bytes=max(0, gpu_kv),
        cpu_kv_bytes=cpu_kv,
        gpu_requests=gpu_rows,
        cpu_requests=cpu_rows,
        waiting_requests=concurrency - gpu_rows - cpu_rows,
        verdict=judge(load, fits, concurrency),
    )


def judge(load: PricedLoad, weights_fit: bool, concurrency: int) -> Verdict:
    """What follows from a load."""
    if not weights_fit:
        reason = "the weights alone exceed the GPU's memory: use more GPUs, a smaller dtype, or a smaller model"
        return Verdict("capacity", reason, "none", warnings=("this machine cannot run the model",))
    if not load.gpu_rows and not load.cpu_rows:
        reason = "no request of this context fits on either tier"
        return Verdict("capacity", reason, "none", warnings=("shorten the context or add memory",))
    bottleneck, reason = _bottleneck(load, concurrency)
    by_outlook = {v.name: predict(load, v) for v in OUTLOOKS}
    nominal = by_outlook["nominal"]
    if not load.cpu_rows:
        rates = {"gpu_only": nominal["gpu_only"]}
        warnings = () if load.gpu_rows == concurrency else ("no room on the CPU tier: requests will wait",)
        return Verdict(bottleneck, reason, "gpu_only", rates, {}, _capacity_bound(load), warnings)
    names = STRATEGIES if load.gpu_rows else ("sync_offload", "asymmetric")
    best = max(names, key=lambda n: nominal[n])
    rates = {n: nominal[n] for n in (*names, "bound")}
    if not load.gpu_rows:
        text = "no request fits on the GPU tier: only the CPU tier can hold one"
        return Verdict(bottleneck, reason, best, rates, warnings=(text,))
    gains = {
        n: Range(*(found[n] / nominal["gpu_only"] for found in by_outlook.values())) for n in rates if n != "gpu_only"
    }
    winner = best if best != "gpu_only" and gains[best].nominal >= WORTH_IT else "gpu_only"
    return Verdict(bottleneck, reason, winner, rates, gains, warnings=_warnings(winner, gains))


def _warnings(winner: str, gains: Mapping[str, Range]) -> tuple[str, ...]:
    if winner == "gpu_only":
        return (f"offload will not pay here: no strategy is predicted to gain {WORTH_IT - 1:.0%}",)
    if gains[winner].low < WORTH_IT:
        text = (
            f"the gain is uncertain: with a slower CPU and exposed launches it is {gains[winner].low:.2f}x; calibrate"
        )
        return (text,)
    return ()


def _capacity_bound(load: PricedLoad) -> float:
    """Section 1 of ``docs/crossover.md``: what CPU help could add at most when all KV fits."""
    gpu_token_ns = load.attention_ns / load.gpu_rows
    x = load.attention_ns / load.costs.step_linear_ns(load.gpu_rows)
    return capacity_gain_bound(x, load.cpu_token_ns / gpu_token_ns)


def _bottleneck(load: PricedLoad, concurrency: int) -> tuple[str, str]:
    """Compute, memory bandwidth, capacity or copy, with the reason in numbers."""
    rows = max(load.gpu_rows, 1)
    one, many = load.costs.linear_ns(1), load.costs.linear_ns(rows)
    if load.cpu_rows and load.copy_token_ns > load.cpu_token_ns:
        return "copy", (
            f"the link needs {load.copy_token_ns / 1e3:.0f} us for a CPU token's q, k, v and output, its attention "
            f"{load.cpu_token_ns / 1e3:.0f} us"
        )
    if many > 1.5 * one:
        return "compute", f"{rows} rows take {many / one:.1f} times the linear time of one"
    if load.gpu_rows < concurrency:
        return "capacity", (
            f"KV of {load.gpu_rows} of {concurrency} requests fits on the GPU, whose linear stages would take hardly "
            f"longer for more"
        )
    share = load.attention_ns / load.step_ns
    return "memory bandwidth", f"weights and KV are read for few rows ({share:.0%} of the step is attention)"


def _size(num_bytes: int) -> str:
    if num_bytes < GB // 10:
        return f"{num_bytes / 10**6:.1f} MB"
    return f"{num_bytes / GB:.1f} GB ({num_bytes / GIB:.1f} GiB)"
