"""Measure a machine's profile, or hold one against the machine again."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import count, product

from hybridattn.calibration.bench import CHUNKS, CONTEXTS, ROWS, TIMEOUT_NS, Bench
from hybridattn.calibration.samples import AXES, Timed, handovers, samples_of, thinned
from hybridattn.core.op import CPU, GPU, Op, Work
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import late_name, measured_machine
from hybridattn.cost.profile import Profile, Quantity, measured_profile
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.cost.table import Sample
from hybridattn.policies.asymmetric import Asymmetric
from hybridattn.policies.fixed import SyncOffload

CHECK_POINTS = ((3, 3, 128), (6, 12, 384))  # GPU rows, CPU rows, keys: none of them is in the tables
STEPS, ROUNDS = 3, 2  # of steps at each point, at two moments: others may have used the machine at one of them
# Linear stages may have the rows of both tiers, and their time has steps between powers of two.
LINEAR_ROWS = (6, 10, 12, 24, 2 * max(ROWS))
MIXED, MIXED_ROWS = (SyncOffload, Asymmetric), ((2, 6), (8, 8), (4, 12))  # GPU rows, CPU rows


def driver_costs(bench: Bench) -> dict[str, Quantity]:
    """What the driver costs: a submission, a poll, an empty op and back."""
    device, count = bench.device, 300
    op = Op("empty", GPU, Work("other", 0.0, 0, 1), lambda: None)
    start = time.perf_counter_ns()
    futures = [device.submit(op) for _ in range(count)]
    submit = (time.perf_counter_ns() - start) / count
    start = time.perf_counter_ns()
    for _ in range(count):
        futures[0].done()
    poll = (time.perf_counter_ns() - start) / count
    hops = []
    for _ in range(50):
        start = time.perf_counter_ns()
        device.submit(op).wait(TIMEOUT_NS)
        hops.append(time.perf_counter_ns() - start)
    device.drain(TIMEOUT_NS)
    values = {"submit": submit, "poll": poll, "launch": statistics.median(hops)}
    return {name: _quantity(v, "median or mean over empty ops") for name, v in values.items()}


def handover_costs(timed: Sequence[Timed]) -> dict[str, Quantity]:
    """How late ops begin on each lane, and how late a waiting driver goes on, in steps of blocking offload."""
    return {
        late_name(name, part): _quantity(ns, f"mean of ninth {part} of the times in decode steps")
        for name, values in handovers(timed).items()
        for part, ns in enumerate(values, start=1)
    }


def micro_batch_op_cost(steps: Sequence[Sequence[Timed]], price: Callable[[Work], int]) -> Quantity:
    """What each op of a micro-batch takes from the GPU lane, with whose thread it shares a core.

    By how much longer the GPU's ops of a layer take with micro-batches beside them than by ``price``, measured without
    any.
    """
    taken = []
    for timed in steps:
        of_micro_batches = sum([t.lane != GPU for t in timed])
        layers = [t for t in timed if t.lane == GPU and t.work.kind in ("linear", "decode_attention")]
        taken.append(sum([t.took_ns - price(t.work) for t in layers]) / of_micro_batches)
    return _quantity(statistics.median(taken), "median over decode steps with CPU rows")


def _quantity(ns: float, source: str) -> Quantity:
    return Quantity(max(1.0, ns), "ns", "measured", source)


def _measure_tables(bench: Bench, samples: list[Sample], decodes: list[Timed], show: Callable[[str], None]) -> None:
    """Add the samples of every point, and the decode steps with rows on both tiers."""
    for context, rows in product(CONTEXTS, ROWS):
        show(f"{rows} rows of {context} keys on each tier")
        beside = bench.steps(rows, rows, context, STEPS)
        samples += samples_of(bench.steps(rows, 0, context, STEPS))
        samples += [s for s in samples_of(beside) if s.lane != GPU]
        decodes += beside
    for rows in LINEAR_ROWS:
        samples += [s for s in samples_of(bench.steps(rows, 0, CONTEXTS[0], STEPS)) if s.kind != "decode_attention"]
    for chunk in CHUNKS:
        show(f"a prompt of {chunk} tokens")
        samples += samples_of(bench.prompts(chunk, STEPS))


def calibrate(bench: Bench, show: Callable[[str], None]) -> Profile:
    """Measure every table of the profile: ops of the GPU lane in steps without CPU rows, the others beside it."""
    samples: list[Sample] = []
    decodes: list[Timed] = []
    number, total = count(1), ROUNDS * (len(CONTEXTS) * len(ROWS) + len(CHUNKS))
    for _ in range(ROUNDS):
        _measure_tables(bench, samples, decodes, lambda what: show(f"{next(number)}/{total} {what}"))
    build = {name: importlib.import_module(name).__version__ for name in ("torch", "llvmlite")}
    costs = driver_costs(bench) | handover_costs(decodes)

    def profile() -> Profile:
        return measured_profile(
            "this-machine", bench.device.profile, bench.shape.name, bench.dtype, thinned(samples), AXES, build, costs
        )

    tables = costs_of(bench, profile(), bench.device.profile).pricing
    mixed = [bench.steps(*rows, c, STEPS, policy()) for policy in MIXED for rows in MIXED_ROWS for c in CONTEXTS[1:]]
    costs["micro_batch_op"] = micro_batch_op_cost(mixed, lambda work: tables.work_ns(GPU, work))
    return profile()


def check(bench: Bench, profile: Profile, fingerprint: str) -> list[tuple[str, float, float]]:
    """(op, measured ns, predicted ns) at points that are in no table."""
    costs = costs_of(bench, profile, fingerprint)
    found = []
    for gpu_rows, cpu_rows, context in CHECK_POINTS:
        alone, beside = (bench.steps(gpu_rows, rows, context, STEPS) for rows in (0, cpu_rows))
        for timed, lane, kind in (
            (alone, GPU, "linear"),
            (alone, GPU, "decode_attention"),
            (beside, CPU, "decode_attention"),
        ):
            ops = [t for t in timed if t.lane == lane and t.work.kind == kind]
            name = f"{lane} {kind}, {ops[0].work.rows} rows of {context} keys"
            measured = statistics.median(t.took_ns for t in ops)
            found.append((name, measured, float(costs.pricing.work_ns(lane, ops[0].work))))
    return found


def costs_of(bench: Bench, profile: Profile, fingerprint: str) -> Costs:
    """The cost model of this machine for the bench's model."""
    pricing = measured_machine(profile, bench.shape.name, bench.dtype, fingerprint)
    return Costs(ModelCost(bench.shape, bench.dtype), pricing)
