"""Measure a machine's profile, or hold one against the machine again."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence

from hybridattn.calibration.bench import CHUNKS, CONTEXTS, ROWS, TIMEOUT_NS, Bench
from hybridattn.calibration.samples import AXES, Timed, handovers, samples_of, thinned
from hybridattn.core.op import CPU, GPU, Op, Work
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import decile_name, measured_machine
from hybridattn.cost.profile import Profile, Quantity, measured_profile
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.cost.table import Sample

CHECK_POINTS = ((3, 3, 128), (6, 12, 384))  # GPU rows, CPU rows, keys: none of them is in the tables
PASSES = 3


def driver_costs(bench: Bench) -> dict[str, Quantity]:
    """What the driver costs: a submission, a poll, an empty op and back, and its time per op in the passes so far."""
    device, count = bench.device, 300
    op = Op("empty", GPU, Work("other", 0.0, 0, 1), lambda: None)
    start = time.perf_counter_ns()
    tickets = [device.submit(op) for _ in range(count)]
    submit = (time.perf_counter_ns() - start) / count
    start = time.perf_counter_ns()
    for _ in range(count):
        tickets[0].done()
    poll = (time.perf_counter_ns() - start) / count
    hops = []
    for _ in range(50):
        start = time.perf_counter_ns()
        device.submit(op).wait(TIMEOUT_NS)
        hops.append(time.perf_counter_ns() - start)
    device.drain(TIMEOUT_NS)
    values = {"submit": submit, "poll": poll, "launch": statistics.median(hops)}
    costs = {
        name: Quantity(max(1.0, v), "ns", "measured", "median or mean over empty ops") for name, v in values.items()
    }
    source = "median over the passes so far: the driver's processor time per submission"
    return {**costs, "driver": Quantity(statistics.median(bench.driver_ns), "ns", "measured", source)}


def handover_costs(timed: Sequence[Timed]) -> dict[str, Quantity]:
    """How late ops begin on each lane, and how late a waiting driver goes on, in passes of blocking offload."""
    return {
        decile_name(name, decile): Quantity(max(1.0, ns), "ns", "measured", f"decile {decile} over decode passes")
        for name, values in handovers(timed).items()
        for decile, ns in enumerate(values, start=1)
    }


def calibrate(bench: Bench, show: Callable[[str], None]) -> Profile:
    """Measure every table of the profile."""
    samples: list[Sample] = []
    decodes: list[Timed] = []
    samples += samples_of(bench.passes(1, 0, CONTEXTS[0], PASSES))  # linear stages of a single row
    steps = [(rows, context) for context in CONTEXTS for rows in ROWS]
    for i, (rows, context) in enumerate(steps, start=1):
        show(f"{i}/{len(steps) + len(CHUNKS)} {rows} rows of {context} keys on each tier")
        timed = bench.passes(rows, rows, context, PASSES)
        samples += samples_of(timed)
        decodes += timed
    for i, chunk in enumerate(CHUNKS, start=len(steps) + 1):
        show(f"{i}/{len(steps) + len(CHUNKS)} a prompt of {chunk} tokens")
        samples += samples_of(bench.prompts(chunk, PASSES))
    build = {name: importlib.import_module(name).__version__ for name in ("torch", "llvmlite")}
    costs = driver_costs(bench) | handover_costs(decodes)
    return measured_profile(
        "this-machine", bench.device.profile, bench.shape.name, bench.dtype, thinned(samples), AXES, build, costs
    )


def check(bench: Bench, profile: Profile, fingerprint: str) -> list[tuple[str, float, float]]:
    """(op, measured ns, predicted ns) at points that are in no table."""
    costs = costs_of(bench, profile, fingerprint)
    found = []
    for gpu_rows, cpu_rows, context in CHECK_POINTS:
        timed = bench.passes(gpu_rows, cpu_rows, context, PASSES)
        for lane, kind in ((GPU, "linear"), (GPU, "decode_attention"), (CPU, "decode_attention")):
            ops = [t for t in timed if t.lane == lane and t.work.kind == kind]
            name = f"{lane} {kind}, {ops[0].work.rows} rows of {context} keys"
            measured = statistics.median(t.took_ns for t in ops)
            found.append((name, measured, float(costs.pricing.work_ns(lane, ops[0].work))))
    return found


def costs_of(bench: Bench, profile: Profile, fingerprint: str) -> Costs:
    """The cost model of this machine for the bench's model."""
    pricing = measured_machine(profile, bench.shape.name, bench.dtype, fingerprint)
    return Costs(ModelCost(bench.shape, bench.dtype), pricing)
