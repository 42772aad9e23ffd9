"""What fits where, what limits, and what each policy does then: the content of ``hybridattn plan``.

A policy's numbers are those of the simulator for the policy of that name (``steady``), the same call that the
experiments ``ratio`` and ``capacity`` make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridattn.core.errors import InputError
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.costs import Costs, with_cpu_factor
from hybridattn.cost.crossover import capacity_gain_bound
from hybridattn.cost.parallel import parallel_machine
from hybridattn.cost.priced_stages import with_exposed
from hybridattn.cost.profile import Profile, load_profile
from hybridattn.cost.room import GB, Room, check_context, room
from hybridattn.cost.split import SplitOutlook, split_outlook
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.planning.predict import by_simulation, open_priced
from hybridattn.planning.steady import rows_under, steady
from hybridattn.policies.base import Policy
from hybridattn.policies.layouts import Layout, fixed_layouts
from hybridattn.policies.load import Load
from hybridattn.policies.planning import Predict
from hybridattn.policies.registry import make_policy

POLICIES = ("gpu_only", "sync_offload", "asymmetric", "async_overlap", "adaptive", "auto")
WORTH_IT = 1.02  # a predicted gain below this does not pay for its own complexity
LONG = 2.0  # times the GPU-only TPOT, from which on a TPOT is remarked on
# How a gain is tried: CPU attention takes this much of its price, and this is exposed at each layer [ns].
LOW, HIGH = (1 / 0.75, 150_000), (1 / 1.25, 0)
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy does, simulated. TPOT per tier as ``Steady`` has it.

    gpu_rows, cpu_rows : requests that decode on each tier; the others wait
    layout : that an adaptive policy ended with
    gain : over GPU-only
    range : the gain with a CPU 25 % slower and 150 us exposed at each layer, and with a CPU 25 % faster (best one only)
    pays_from : requests at a time from which on it gains 2 % (best one only)
    """

    policy: str
    tokens_per_s: float
    gpu_rows: int
    cpu_rows: int
    gpu_tpot_ms: float | None
    cpu_tpot_ms: float | None
    layout: Layout | None = None
    gain: float | None = None
    range: tuple[float, float] | None = None
    pays_from: int | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """A model on a machine, to simulate policies on."""

    costs: Costs
    room: Room
    context: int
    predict: Predict = field(default_factory=by_simulation, compare=False)

    @staticmethod
    def of(gpu: Profile, cpu: Profile, link: Profile, gpus: int, cost: ModelCost, context: int) -> Site:
        """InputError with the numbers where weights or context do not fit."""
        found = room(gpu, cpu, cost, gpus)
        check_context(found, context)
        return Site(Costs(cost, parallel_machine(gpu, cpu, link, gpus, cost)), found, context)

    @property
    def capacity(self) -> tuple[int, int]:
        """Requests that each tier holds."""
        return self.room.gpu_tokens // self.context, self.room.cpu_tokens // self.context

    def serve(self, policy: str, requests: int, **options: Any) -> Outcome | None:
        """``requests`` at a time under a policy, simulated; None: nobody can run."""
        made = make_policy(policy, self.costs, self.predict, **options)
        gpu, cpu = rows_under(made, requests, *self.capacity)
        if not gpu + cpu:
            return None
        run = steady(self.costs, made, Load(gpu, cpu, self.context), open_priced)
        ms = [None if t is None else t / 1e6 for t in (run.gpu_tpot_ns, run.cpu_tpot_ns)]
        return Outcome(policy, run.tokens_per_s, gpu, run.cpu_rows, ms[0], ms[1], getattr(made, "layout", None))

    def gain(self, of: Outcome, requests: int) -> float:
        """Of that policy over GPU-only, with another number of requests or on another machine.

        Where it chooses layouts: of the best one among its own and the fixed policies, by a quick look.
        """
        if of.layout is None:
            alone, found = (self.serve(name, requests) for name in ("gpu_only", of.policy))
            assert alone is not None and found is not None
            return found.tokens_per_s / alone.tokens_per_s
        load = Load(*rows_under(Policy(), requests, *self.capacity), self.context)
        layouts = {*fixed_layouts(self.costs, load.gpu_rows, load.cpu_rows, self.context), of.layout}
        rates = {layout: self.predict(load, layout, self.costs, False).tokens_per_s for layout in layouts}
        return max(rates.values()) / rates[Layout("gpu_only")]

    def with_cpu(self, factor: float, exposed_ns: int) -> Site:
        """The same with a CPU whose attention takes ``factor`` of its price, and launches exposed at each layer."""
        pricing = with_exposed(with_cpu_factor(self.costs.pricing, factor), exposed_ns)
        return replace(self, costs=replace(self.costs, pricing=pricing))


@dataclass(frozen=True, slots=True)
class Plan:
    """What fits where, for one machine, model, context and concurrency, what limits, and what every policy does.

    split : what requests over both tiers promise (policy ``split``)
    capacity_bound : what CPU help could gain at most, where all fits on the GPU
    """

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
    bottleneck: str
    reason: str
    best: str
    outcomes: Mapping[str, Outcome]
    split: SplitOutlook
    capacity_bound: float | None = None
    warnings: tuple[str, ...] = ()

    def describe(self) -> str:
        """The plan as lines of text, the table of the policies last."""
        lines = [
            f"{self.model} {self.dtype} on {self.machine} (simulated from profiles)",
            f"  asked              {self.concurrency} at a time, {self.context:,} tokens each",
            f"  weights            {_size(self.weight_bytes)}",
            f"  KV per token       {self.kv_bytes_per_token:,} B",
            f"  KV per request     {_size(self.kv_bytes_per_request)}",
            f"  room for KV        GPU {_size(self.gpu_kv_bytes)}, CPU {_size(self.cpu_kv_bytes)}",
            f"  requests           {self.gpu_requests} on the GPU tier, {self.cpu_requests} on the CPU tier, "
            f"{self.waiting_requests} wait",
            f"  bottleneck         {self.bottleneck}: {self.reason}",
        ]
        if self.capacity_bound is not None:
            lines.append(f"  all fits           CPU help could gain at most {self.capacity_bound:.2f}x, before copies")
        lines.append(f"  over both tiers    {self.split}, by closed forms (policy split)")
        lines += [f"  note               {w}" for w in self.warnings]
        lines += ["", f"  {'policy':15}{'tokens/s':>10}{'gain':>7}{'TPOT GPU rows':>16}{'TPOT CPU rows':>16}  remarks"]
        return "\n".join(lines + [self._line(o) for o in self.outcomes.values()])

    def _line(self, o: Outcome) -> str:
        gain = "" if o.gain is None else f"{o.gain:.2f}x"
        line = f"{'>' if o.policy == self.best else ' '} {o.policy:15}{o.tokens_per_s:10,.1f}{gain:>7}"
        line += f"{_ms(o.gpu_tpot_ms):>16}{_ms(o.cpu_tpot_ms):>16}  {'; '.join(self._remarks(o))}"
        return line.rstrip()

    def _remarks(self, o: Outcome) -> list[str]:
        found = ["best"] if o.policy == self.best else []
        if o.layout is not None and o.layout.kind != o.policy:
            found.append(str(o.layout))
        if o.range is not None:
            found.append(f"gain {o.range[0]:.2f} to {o.range[1]:.2f}")
        if o.pays_from is not None:
            found.append(f"pays from {o.pays_from} at a time")
        base = self.outcomes["gpu_only"].gpu_tpot_ms if "gpu_only" in self.outcomes else None
        times = {t: ms / base for t, ms in (("GPU", o.gpu_tpot_ms), ("CPU", o.cpu_tpot_ms)) if ms and base}
        longer = ", ".join(f"{tier} rows {x:.1f}x" for tier, x in times.items() if x >= LONG)
        if longer:
            found.append(f"{longer} the TPOT of GPU-only")
        waiting = self.concurrency - o.gpu_rows - o.cpu_rows
        return found + ([f"{waiting} wait"] if waiting else [])


def plan(
    gpu: str | Profile,
    cpu: str | Profile,
    link: str | Profile,
    shape: ModelShape,
    dtype: str,
    context: int,
    concurrency: int,
    kv_dtype: str = "",
    gpus: int = 1,
) -> Plan:
    """Plan ``concurrency`` requests, each holding ``context`` tokens (prompt and output), of a model on a machine.

    Parameters
    ----------
    gpu, cpu, link
        Shipped names, files, or profiles.
    gpus : int
        As many of that GPU, tensor parallel, beside the one CPU.

    Raises
    ------
    InputError
        Weights or a context that do not fit, with the numbers.
    """
    if context < 1 or concurrency < 1:
        raise InputError(f"a plan needs context and concurrency of at least 1, got {context} and {concurrency}")
    parts = [
        p if isinstance(p, Profile) else load_profile(p, role)
        for p, role in ((gpu, "gpu"), (cpu, "cpu"), (link, "link"))
    ]
    cost = ModelCost(shape, dtype, kv_dtype)
    site = Site.of(parts[0], parts[1], parts[2], gpus, cost, context)
    gpu_rows = min(concurrency, site.capacity[0])
    cpu_rows = min(concurrency - gpu_rows, site.capacity[1])
    outcomes = _outcomes(site, concurrency, bool(cpu_rows))
    best = max(outcomes.values(), key=lambda o: o.tokens_per_s).policy
    if "gpu_only" in outcomes and (outcomes[best].gain or 0) < WORTH_IT:
        best = "gpu_only"
    if best != "gpu_only" and "gpu_only" in outcomes:
        outcomes[best] = _tried(site, outcomes[best], concurrency)
    load = Load(gpu_rows, cpu_rows, context)
    bottleneck, reason = _bottleneck(site.costs, load, concurrency)
    return Plan(
        machine=site.costs.pricing.name,
        model=shape.name,
        dtype=dtype,
        context=context,
        concurrency=concurrency,
        weight_bytes=cost.weight_bytes,
        kv_bytes_per_token=site.room.token_bytes,
        kv_bytes_per_request=context * site.room.token_bytes,
        gpu_kv_bytes=site.room.gpu_bytes,
        cpu_kv_bytes=site.room.cpu_bytes,
        gpu_requests=gpu_rows,
        cpu_requests=cpu_rows,
        waiting_requests=concurrency - gpu_rows - cpu_rows,
        bottleneck=bottleneck,
        reason=reason,
        best=best,
        outcomes=outcomes,
        split=split_outlook(site.costs, concurrency, context, site.room.gpu_tokens),
        capacity_bound=None if cpu_rows else _capacity_bound(site.costs, load),
        warnings=_warnings(load, outcomes[best], concurrency),
    )


def _outcomes(site: Site, concurrency: int, with_cpu: bool) -> dict[str, Outcome]:
    """Every policy simulated; GPU-only alone where no request is on the CPU tier: there all policies do the same."""
    found: dict[str, Outcome] = {}
    for policy in POLICIES if with_cpu else POLICIES[:1]:
        served = site.serve(policy, concurrency)
        if served is not None:
            base = found.get("gpu_only")
            found[policy] = served if base is None else replace(served, gain=served.tokens_per_s / base.tokens_per_s)
    return found


def _tried(site: Site, best: Outcome, concurrency: int) -> Outcome:
    """The best policy with its range, and the number of requests from which on it pays."""
    low, high = (site.with_cpu(*way).gain(best, concurrency) for way in (LOW, HIGH))
    none, pays = site.capacity[0], concurrency  # up to ``none`` all fits on the GPU
    while pays - none > max(1, none // 16):
        middle = (none + pays) // 2 if pays < 2 * none + 2 else round((none * pays) ** 0.5)
        none, pays = (none, middle) if site.gain(best, middle) >= WORTH_IT else (middle, pays)
    return replace(best, range=(low, high), pays_from=pays)


def _warnings(load: Load, best: Outcome, concurrency: int) -> tuple[str, ...]:
    if not load.gpu_rows:
        return ("no request fits on the GPU tier: only the CPU tier can hold one",)
    if not load.cpu_rows:
        return () if load.gpu_rows == concurrency else ("no room on the CPU tier: requests will wait",)
    if best.policy == "gpu_only":
        return (f"offload will not pay here: no policy gains {WORTH_IT - 1:.0%}",)
    if best.range is not None and best.range[0] < WORTH_IT:
        return (f"the gain is uncertain: with a slower CPU and exposed launches {best.range[0]:.2f}x; calibrate",)
    return ()


def _capacity_bound(costs: Costs, load: Load) -> float:
    """Section 1 of ``docs/crossover.md``: what CPU help could add at most when all KV fits."""
    rows, kv_tokens = load.gpu_rows, load.gpu_rows * load.context
    attention = costs.attention_ns(rows, kv_tokens)
    x = costs.num_layers * attention / costs.step_linear_ns(rows)
    return capacity_gain_bound(x, costs.cpu_ns(rows, kv_tokens) / attention)


def _bottleneck(costs: Costs, load: Load, concurrency: int) -> tuple[str, str]:
    """Compute, memory bandwidth, capacity or copy, with the reason in numbers."""
    rows, cpu = max(load.gpu_rows, 1), min(load.cpu_rows, 64)
    one, many = costs.linear_ns(1), costs.linear_ns(rows)
    if cpu:
        copy = costs.num_layers * max(costs.down_ns(cpu), costs.up_ns(cpu)) / cpu
        attention = costs.num_layers * costs.cpu_ns(cpu, cpu * load.context) / cpu
        if copy > attention:
            return "copy", (
                f"the link needs {copy / 1e3:.0f} us for a CPU token's q, k, v and output, its attention "
                f"{attention / 1e3:.0f} us"
            )
    if many > 1.5 * one:
        return "compute", f"{rows} rows take {many / one:.1f} times the linear time of one"
    if load.gpu_rows < concurrency:
        return "capacity", (
            f"KV of {load.gpu_rows} of {concurrency} requests fits on the GPU, whose linear stages would take hardly "
            f"longer for more"
        )
    share = costs.num_layers * costs.attention_ns(rows, rows * load.context) / costs.step_ns(rows, rows * load.context)
    return "memory bandwidth", f"weights and KV are read for few rows ({share:.0%} of the step is attention)"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"


def _size(num_bytes: int) -> str:
    if num_bytes < GB // 10:
        return f"{num_bytes / 10**6:.1f} MB"
    return f"{num_bytes / GB:.1f} GB ({num_bytes / GIB:.1f} GiB)"
