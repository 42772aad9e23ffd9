"""``hybridattn calibrate``: measure this machine and write its profile; ``--check`` measures a few points again.

A real model runs real passes on the `host` device with chosen numbers of rows and keys: no prompts are read, the pages
hold zeros, which take as long to attend to as anything else. Every op says what work it was (the same works that the
simulator prices), so each becomes a sample of the profile's tables.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridattn.core.op import CPU, D2H, GPU, H2D, Op, Work
from hybridattn.core.stages import CPU_TIER, GPU_TIER, Batch, CpuRow, Segment
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import measured_machine
from hybridattn.cost.profile import Profile, Quantity, load_profile, measured_profile, save_profile
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.cost.table import Sample
from hybridattn.policies.base import Policy
from hybridattn.policies.fixed import SyncOffload
from hybridattn.runtime.config import EngineConfig
from hybridattn.runtime.executor import Executor
from hybridattn.runtime.params import SamplingParams
from hybridattn.runtime.request import Request, State

ROWS, CONTEXTS, CHUNKS = (1, 2, 4, 8, 16), (64, 256, 512), (32, 128, 256)
CHECK_POINTS = ((3, 3, 128), (6, 12, 384))  # GPU rows, CPU rows, keys: none of them is in the tables
WARM, PASSES = 1, 3
PAGE, MODEL, DTYPE = 32, "smollm2-135m", "fp32"
TIMEOUT_NS = 60_000_000_000
AXES = {
    f"{GPU}/linear": ("rows",),
    f"{GPU}/head": ("rows",),
    f"{GPU}/other": ("rows",),
    f"{GPU}/decode_attention": ("rows", "kv_per_row"),
    f"{GPU}/prefill_attention": ("flops",),
    f"{CPU}/decode_attention": ("rows", "kv_per_row"),
    f"{D2H}/copy": ("num_bytes",),
    f"{H2D}/copy": ("num_bytes",),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """An op that ran: its lane, its work, and how long it took."""

    lane: str
    layer: int
    work: Work
    took_ns: int


class Bench:
    """Real stages on the host device, driven by the executor with rows of a stated number of keys."""

    def __init__(self, model: str = MODEL, dtype: str = DTYPE, most_rows: int = 2 * max(ROWS)) -> None:
        self.device = importlib.import_module("hybridattn.devices.host").HostDevice(record=False)
        loaded = importlib.import_module("hybridattn.models.load").load(model, dtype=dtype)
        blocks = most_rows * (max(CONTEXTS) // PAGE + 1)
        self.config = EngineConfig(
            blocks, blocks, PAGE, max_model_len=1024, max_num_seqs=2 * most_rows, max_num_batched_tokens=1024
        )
        stages = importlib.import_module("hybridattn.models.torch_stages").TorchStages
        self.stages = stages(loaded, self.device, self.config, dtype, "native")
        self.shape, self.dtype = loaded.config.shape, dtype
        self._submit = self.device.submit
        self._seen: list[tuple[Op, Any]] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *args: object) -> None:
        self.device.close()

    def executor(self, policy: Policy) -> Executor:
        return Executor(
            self.stages, self.device, policy, max_rows=self.config.max_num_seqs, run_ahead=1, op_timeout_ns=TIMEOUT_NS,
            on_release=lambda request: None, any_leaving=lambda: False,
        )  # fmt: skip

    def rows(self, tier: str, count: int, context: int) -> list[Request]:
        """Requests that attend to ``context`` keys each, with pages of their own."""
        pages = -(-context // PAGE)
        made = []
        for i in range(count):
            request = Request(f"{tier}{i}", i, [1] * context, 1 << 20, SamplingParams(max_tokens=1 << 20), 0)
            request.tier, request.state = tier, State.DECODE
            request.blocks = list(range(i * pages, (i + 1) * pages))
            made.append(request)
        return made

    def batch(self, count: int, context: int) -> Batch | None:
        rows = self.rows(GPU_TIER, count, context)
        segments = tuple(Segment(r, GPU_TIER, context - 1, 1, samples=True, prefill=False) for r in rows)
        return Batch(segments) if segments else None

    def passes(self, gpu_rows: int, cpu_rows: int, context: int, count: int) -> list[Timed]:
        """The ops of ``count`` passes of blocking offload, after a warm-up."""
        batch = self.batch(gpu_rows, context)
        idle = tuple(CpuRow(r, context - 1) for r in self.rows(CPU_TIER, cpu_rows, context))
        return self._timed(lambda executor: executor.run(batch, idle), count)

    def prompts(self, chunk: int, count: int) -> list[Timed]:
        """The ops of ``count`` passes that prefill a chunk of a prompt."""
        (request,) = self.rows(GPU_TIER, 1, chunk)
        batch = Batch((Segment(request, GPU_TIER, 0, chunk, samples=True, prefill=True),))
        return self._timed(lambda executor: executor.run(batch, ()), count)

    def _timed(self, run: Callable[[Executor], Any], count: int) -> list[Timed]:
        executor = self.executor(SyncOffload())
        for _ in range(WARM):
            run(executor)
        self._seen = []
        self.device.submit = self._spy
        try:
            for _ in range(count):
                run(executor)
            self.device.drain(TIMEOUT_NS)
        finally:
            self.device.submit = self._submit
        return [Timed(op.lane, op.layer, op.work, max(1, t.end_ns - t.start_ns)) for op, t in self._seen]

    def _spy(self, op: Op, after: tuple[Any, ...] = ()) -> Any:
        ticket = self._submit(op, after)
        self._seen.append((op, ticket))
        return ticket


def samples_of(timed: Sequence[Timed]) -> list[Sample]:
    """Samples of the ops whose work is of one kind, and of the head: what the last layer takes beyond a middle one."""
    found: list[Sample] = []
    linear: dict[int, list[int]] = {}
    for t in timed:
        if t.work.kind == "linear":
            linear.setdefault(t.work.rows, []).append(t.took_ns)
    for t in timed:
        work = t.work
        if f"{t.lane}/{work.kind}" in AXES:
            found.append(Sample(t.lane, work.kind, work.rows, work.kv_tokens, work.flops, work.num_bytes, t.took_ns))
        elif work.kind == "together" and t.lane == GPU and work.kv_tokens == 0 and work.rows in linear:
            rest = max(1, t.took_ns - round(statistics.median(linear[work.rows])))
            kind = "head" if t.layer >= 0 else "other"
            part = next(p for p in work.parts if p.kind == kind)  # type: ignore[attr-defined]
            found.append(Sample(GPU, kind, part.rows, 0, part.flops, part.num_bytes, rest))
    return found


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    """One sample for each point: the median of what was measured there."""
    groups: dict[tuple[Any, ...], list[Sample]] = {}
    for s in samples:
        groups.setdefault((s.lane, s.kind, s.rows, s.kv_tokens, s.flops, s.num_bytes), []).append(s)
    return [replace(g[0], took_ns=round(statistics.median(s.took_ns for s in g))) for g in groups.values()]


def driver_costs(bench: Bench) -> dict[str, Quantity]:
    """What a submission, a poll and an empty op cost the driver."""
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
    return {
        name: Quantity(max(1.0, v), "ns", "measured", "median or mean over empty ops") for name, v in values.items()
    }


def calibrate(bench: Bench, show: Callable[[str], None]) -> Profile:
    """Measure every table of the profile."""
    samples: list[Sample] = []
    steps = [(rows, context) for context in CONTEXTS for rows in ROWS]
    for i, (rows, context) in enumerate(steps, start=1):
        show(f"{i}/{len(steps) + len(CHUNKS)} {rows} rows of {context} keys on each tier")
        samples += samples_of(bench.passes(rows, rows, context, PASSES))
    for i, chunk in enumerate(CHUNKS, start=len(steps) + 1):
        show(f"{i}/{len(steps) + len(CHUNKS)} a prompt of {chunk} tokens")
        samples += samples_of(bench.prompts(chunk, PASSES))
    fingerprint = importlib.import_module("hybridattn.devices.fingerprint").fingerprint()
    build = {name: importlib.import_module(name).__version__ for name in ("torch", "llvmlite")}
    return measured_profile(
        "this-machine", fingerprint, bench.shape.name, bench.dtype, thinned(samples), AXES, build, driver_costs(bench)
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


def default_path() -> Path:
    """Where the profile of this machine lies unless told otherwise."""
    return Path.home() / ".cache" / "hybridattn" / "this-machine.json"


def add_parser(commands: Any) -> None:
    """Add the subcommand to an ``argparse`` subparsers object."""
    p = commands.add_parser("calibrate", help="measure this machine and write its profile", description=__doc__)
    p.add_argument("--check", action="store_true", help="measure a few points again and print the error")
    p.add_argument("--model", default=MODEL)
    p.add_argument("--dtype", default=DTYPE, help="fp32 or bf16 (default %(default)s)")
    p.add_argument("--profile", type=Path, default=default_path(), help="file (default %(default)s)")
    p.set_defaults(command=run_calibrate)


def run_calibrate(args: argparse.Namespace) -> int:
    """The command; 0 when it worked."""
    started = time.perf_counter()
    with Bench(args.model, args.dtype) as bench:
        if args.check:
            profile = load_profile(args.profile)
            here = importlib.import_module("hybridattn.devices.fingerprint").fingerprint()
            for name, measured, predicted in check(bench, profile, here):
                error = predicted / measured - 1
                print(f"{name:60} measured {measured / 1e3:9.1f} us, profile {predicted / 1e3:9.1f} us ({error:+.0%})")
            return 0
        profile = calibrate(bench, lambda text: print(f"calibrate: {text}", file=sys.stderr))
    save_profile(profile, args.profile)
    for key, error in profile.held_out_error.items():
        print(f"{key:34} held-out error {error:.0%}")
    print(f"wrote {args.profile} after {time.perf_counter() - started:.0f} s ({profile.fingerprint})")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="hybridattn")
    add_parser(parser.add_subparsers(required=True))
    given = parser.parse_args()
    sys.exit(given.command(given))
