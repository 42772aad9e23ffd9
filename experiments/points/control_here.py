"""The control path on this machine beside busy processes, and what the model says of it: the point of
``control_path_host``.

    alone     |prompt|prompt|...            service time of each prompt, of a step's scheduling, of an op's submission
    beside    |  queue |prompt|  ...        arrivals at random times, one real tokenizer, first come, first served
    model     the same arrivals and the service times of "alone", on cores shared evenly (experiments/control.py)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from experiments.control import ControlPath, Cores
from experiments.machines import TIMEOUT_NS
from experiments.neighbours import busy
from experiments.schema import App
from experiments.settings import at_least, experiment
from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import DeviceError, InputError
from hybridattn.core.request import DeclaredTokens
from hybridattn.cost.catalog import shape
from hybridattn.cost.machine import machine
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.devices.fingerprint import fingerprint
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.models.locate import resolve
from hybridattn.models.text import Tokenizer
from hybridattn.policies.registry import make_policy

WORDS = "when a model writes text it looks at the keys and values of all tokens before the one it writes now".split()
LIMIT_S = 300.0  # for the process that measures
SETTLE_S = 0.3  # until processes that have just been started compute


@dataclass
class HereSettings:
    """``settings`` of ``control_path_host``.

    neighbours : busy processes beside it
    prompts, words : how many prompts, and the mean of their words (drawn uniformly within +-50 %)
    utilisation : share of the time that a tokenizer on a core of its own would be busy
    rows, steps : decoding requests in the scheduled steps, and how many steps are timed
    """

    neighbours: int = 0
    prompts: int = 150
    words: int = 1500
    utilisation: float = 0.5
    rows: int = 64
    steps: int = 60

    def __post_init__(self) -> None:
        if not 0 < self.utilisation < 1:
            raise InputError(f"settings.utilisation must lie in (0, 1), got {self.utilisation}")
        at_least(self, neighbours=0, prompts=2, words=2, rows=1, steps=1)


@experiment(HereSettings)
def point(app: App, settings: HereSettings) -> dict[str, Any]:
    """One row: mean time from a prompt's arrival to its token ids, measured and modelled, and what each part costs.

    Measured in a process of its own: a progress bar in this one wants the interpreter, too, and a thread that is
    starved while it holds the interpreter stops the others.
    """
    source = resolve(app.model.load)
    if source.folder is None:
        raise InputError(f"model {app.model.label} has no tokenizer to measure: choose model=smollm2")
    asked = {"folder": str(source.folder), "settings": asdict(settings), "seed": app.seed + app.repeat}
    argv = [sys.executable, "-m", "experiments.points.control_here"]
    done = subprocess.run(argv, input=json.dumps(asked), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise DeviceError(f"the process that measures the control path ended with code {done.returncode}: {last}")
    origin = {"kind": "measured", "device": "host", "profile": fingerprint(), "path": "measured"}
    return {**origin, **json.loads(done.stdout)}


def measure(folder: Path, s: HereSettings, seed: int) -> dict[str, Any]:
    """What this process measures, as plain values."""
    encode, rng = Tokenizer(folder).encode, np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, int(n))) for n in rng.uniform(0.5, 1.5, s.prompts) * s.words]
    alone_ns, tokens = service(encode, texts)
    arrivals = np.rint(np.cumsum(rng.exponential(fmean(alone_ns) / s.utilisation, s.prompts))).astype(int).tolist()
    cores = Cores(len(os.sched_getaffinity(0)), 0, 1, s.neighbours)
    with busy(s.neighbours):
        time.sleep(SETTLE_S if s.neighbours else 0)
        ready, share, used_ns = tokenise(encode, texts, arrivals)
        schedule_ns, op_ns = driver(s.rows, s.steps)
    path = ControlPath(0, 1, 0, 0, 0)  # a "token" is 1 ns of service
    stretch = used_ns / sum(alone_ns)
    even, as_got = (path.ready_ns(arrivals, alone_ns, v) for v in (cores.speed, min(1.0, share / stretch)))
    waits = (fmean(np.subtract(times, arrivals).tolist()) for times in (ready, even, as_got))
    names = ("ready_mean_ns", "modelled_ready_mean_ns", "modelled_at_measured_speed_ns")
    return {
        "cores": cores.cores, "control_speed": cores.speed, "prompt_tokens": fmean(tokens),
        "service_alone_ns": fmean(alone_ns), "token_ns": sum(alone_ns) / sum(tokens),
        **dict(zip(names, waits, strict=True)), "measured_share": share, "cpu_time_stretch": stretch,
        "schedule_step_ns": fmean(schedule_ns), "schedule_step_median_ns": median(schedule_ns), "driver_op_ns": op_ns,
    }  # fmt: skip


def service(encode: Callable[[str], Sequence[int]], texts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Time of each text alone [ns] (the better of two), and its tokens."""
    found, tokens = [], []
    for text in texts:
        times = []
        for _ in range(2):
            start_ns = time.perf_counter_ns()
            ids = encode(text)
            times.append(time.perf_counter_ns() - start_ns)
        found.append(min(times))
        tokens.append(len(ids))
    return found, tokens


def tokenise(
    encode: Callable[[str], Sequence[int]], texts: Sequence[str], arrivals_ns: Sequence[int]
) -> tuple[list[int], float, int]:
    """When each text was through a single tokenizer that takes them as they arrive; the share of a core that it got
    while it had one to do; the CPU time that it used [ns], which grows where neighbours share caches and pipelines."""
    zero, ready, used_ns, wall_ns = time.perf_counter_ns(), [], 0, 0
    for text, arrival_ns in zip(texts, arrivals_ns, strict=True):
        early_ns = zero + arrival_ns - time.perf_counter_ns()
        if early_ns > 0:
            time.sleep(early_ns / 1e9)
        start_ns, used_before = time.perf_counter_ns(), time.thread_time_ns()
        encode(text)
        end_ns = time.perf_counter_ns()
        used_ns += time.thread_time_ns() - used_before
        wall_ns += end_ns - start_ns
        ready.append(end_ns - zero)
    return ready, min(1.0, used_ns / wall_ns), used_ns


def driver(rows: int, steps: int) -> tuple[list[int], float]:
    """Driver's own time [ns] in decode steps of ``rows`` requests: of each step outside of the executor (schedule,
    accept tokens), and of an op inside. The engine is the real one; the device only keeps its books, whose time
    counts as well."""
    shape_ = shape("llama3.1-8b")
    device = SimDevice(machine("a10g", "epyc-7r32-8c", "pcie4-x16"), record=True, submit_ns=1)
    tokens = max(512, rows)
    config = EngineConfig(rows * 32, 0, max_num_seqs=rows, max_num_batched_tokens=tokens, op_timeout_ns=TIMEOUT_NS)
    engine = Engine(PricedStages(shape_, "fp16"), device, make_policy("gpu_only"), config)
    for _ in range(rows):
        engine.add(DeclaredTokens(200), steps + 400)
    while len(engine.scheduler.queues.running) < rows or any(not r.num_output for r in engine.scheduler.queues.running):
        engine.step()
    device.drain(TIMEOUT_NS)
    inside = [0]
    run = engine.executor.run

    def timed(*args: Any) -> Any:
        start_ns = time.perf_counter_ns()
        found = run(*args)
        inside[0] += time.perf_counter_ns() - start_ns
        return found

    engine.executor.run = timed  # type: ignore[assignment, method-assign]
    each = []
    for _ in range(steps):
        before, start_ns = inside[0], time.perf_counter_ns()
        engine.step()
        each.append(time.perf_counter_ns() - start_ns - (inside[0] - before))
    return each, inside[0] / len(device.drain(TIMEOUT_NS))


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """What the control path costs alone, and measured against modelled beside busy processes."""
    alone = [r for r in rows if r["neighbours"] == min(r["neighbours"] for r in rows)]
    token_us, tokens = (median(r[n] for r in alone) for n in ("token_ns", "prompt_tokens"))
    head = f"a prompt of {tokens:.0f} tokens; tokenising costs {token_us / 1e3:.2f} us a token on a core of its own"
    counts = sorted({r["neighbours"] for r in rows})
    return [head, *(_beside([r for r in rows if r["neighbours"] == n]) for n in counts)]


def _beside(rows: list[dict[str, Any]]) -> str:
    waits = ("ready_mean_ns", "modelled_ready_mean_ns", "modelled_at_measured_speed_ns")
    measured, even, got = (fmean(r[n] for r in rows) / 1e6 for n in waits)
    names = ("schedule_step_ns", "schedule_step_median_ns", "driver_op_ns")
    mean, schedule, op = (median(r[n] for r in rows) / 1e3 for n in names)
    share, stretch = (fmean(r[n] for r in rows) for n in ("measured_share", "cpu_time_stretch"))
    return (
        f"{rows[0]['neighbours']} busy processes on {rows[0]['cores']} cores: ready after {measured:.1f} ms; modelled "
        f"{even:.1f} ms at an even share of {rows[0]['control_speed']:.0%} of a core, and {got:.1f} ms at the "
        f"{share:.0%} that it got while a prompt took {stretch:.2f} times the CPU time; scheduling {schedule:.0f} us "
        f"a step (mean {mean:.0f}), driver {op:.1f} us an op"
    )


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(json.dumps(measure(Path(given["folder"]), HereSettings(**given["settings"]), given["seed"])))
