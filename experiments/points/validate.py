"""Our own error: steady decode on this machine against the simulator with this machine's profile.

measured     real stages, real lanes, the policy's own decisions, step by step
simulated    the same rows, policy and executor on `sim`, priced by what `hybridattn calibrate` wrote
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.build import import_path, policy_of, policy_options
from experiments.schema import App
from experiments.settings import experiment
from hybridattn.calibration.bench import TIMEOUT_NS, Bench
from hybridattn.core.errors import InputError
from hybridattn.core.stages import CPU_TIER, CpuRow
from hybridattn.cost.costs import Costs
from hybridattn.cost.here import costs_here, default_path
from hybridattn.cost.machine import driver_of
from hybridattn.cost.profile import Profile, load_profile
from hybridattn.devices.fingerprint import fingerprint
from hybridattn.devices.sim import SimDevice
from hybridattn.executor.executor import Executor
from hybridattn.planning.choice import PolicyChoice
from hybridattn.planning.steady import SteadyRun
from hybridattn.policies.adaptive import Adaptive
from hybridattn.policies.base import Policy, StepView
from hybridattn.policies.load import Load


@dataclass
class ValidateSettings:
    """``settings`` of ``validate``; an empty ``profile`` is where ``hybridattn calibrate`` writes."""

    profile: str = ""
    gpu_rows: int = 2
    cpu_rows: int = 2
    context: int = 256
    warmup: int = 4
    steps: int = 12


@experiment(ValidateSettings)
def point(app: App, settings: ValidateSettings) -> dict[str, Any]:
    """One row: measured and simulated tokens per second, and the simulator's relative error."""
    s, path = settings, Path(settings.profile) if settings.profile else default_path()
    if app.device.name != "host":
        raise InputError(f"validate measures on the device host, not on {app.device.name}")
    if not path.is_file():
        raise InputError(f"there is no profile of this machine at {path}: run `hybridattn calibrate` first")
    profile = load_profile(path, "machine")
    with Bench(app.model.load, app.model.dtype, max(s.gpu_rows, s.cpu_rows, 16)) as bench:
        costs = costs_here(profile, bench.shape, app.model.dtype, app.model.dtype, fingerprint())
        policy, planner = policy_of(app, costs), None
        if isinstance(policy, Adaptive):  # as an LLM makes it
            choice = PolicyChoice(import_path(app.policy._target_), policy_options(app), profile)
            policy, planner = choice.make(bench.shape, app.model.dtype, app.model.dtype, fingerprint())
        cpu_rows = s.cpu_rows if CPU_TIER in policy.tiers else 0
        try:
            measured = measure(bench, policy, s, cpu_rows)
        finally:
            if planner is not None:
                planner.close()
    simulated = simulate(costs, profile, policy_of(app, costs), s, cpu_rows)
    return {
        "kind": "measured",
        "device": "host",
        "profile": profile.fingerprint,
        "decoding_cpu_rows": cpu_rows,
        "measured_tokens_per_s": measured,
        "simulated_tokens_per_s": simulated,
        "simulated_over_measured": simulated / measured,
    }


def measure(bench: Bench, policy: Policy, s: ValidateSettings, cpu_rows: int) -> float:
    """Tokens per second; a CPU row that advanced one layer counts 1 / L, as in the simulation."""
    executor, batch = bench.executor(policy), bench.batch(s.gpu_rows, s.context)
    requests = bench.rows(CPU_TIER, cpu_rows, s.context)
    start_ns, tokens = 0, 0.0
    for number in range(s.warmup + s.steps):
        if number == s.warmup:
            start_ns, tokens = bench.device.now_ns(), executor.tokens
        idle = tuple(CpuRow(r, s.context - 1) for r in requests if not r.in_flight)
        executor.run(batch, idle, _view(executor, s, cpu_rows) if "begin" in policy.hooks else None)
    took_ns = bench.device.now_ns() - start_ns
    made = executor.tokens - tokens
    bench.device.drain(TIMEOUT_NS)
    return made / took_ns * 1e9


def _view(executor: Executor, s: ValidateSettings, cpu_rows: int) -> StepView:
    """What a policy that plans sees before a step."""
    rows = s.gpu_rows, s.gpu_rows * s.context, cpu_rows, cpu_rows * s.context
    forecast = executor.forecast
    return StepView(
        executor.step_number, executor.device.now_ns(), *rows, 0, executor.tokens, forecast.cpu_factor,
        gpu_factor=forecast.gpu_factor,
    )  # fmt: skip


def simulate(costs: Costs, profile: Profile, policy: Policy, s: ValidateSettings, cpu_rows: int) -> float:
    """The same by the simulator, with the measured costs of the driver and of the lanes' threads."""
    driver = driver_of(profile)
    run = SteadyRun(
        costs,
        costs.pricing,
        policy,
        Load(s.gpu_rows, cpu_rows, s.context),
        lambda pricing: SimDevice(pricing, record=False, **driver),
    )
    return run.measure(s.warmup, s.steps).tokens_per_s


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Predicted against measured for each setting (medians of its runs), and the errors over all of them.

    The spread is the interquartile range of the measured runs over their median.
    """
    settings: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in rows:
        settings.setdefault((r["policy"], r["gpu_rows"], r["decoding_cpu_rows"], r["context"]), []).append(r)
    lines = [f"{'policy':<14} GPU rows  CPU rows  keys  measured [tokens/s]  simulated   error  spread  runs"]
    errors, beyond = [], 0
    for (policy, gpu_rows, cpu_rows, context), runs in settings.items():
        measured = [r["measured_tokens_per_s"] for r in runs]
        middle, simulated = statistics.median(measured), statistics.median(r["simulated_tokens_per_s"] for r in runs)
        low, _, high = statistics.quantiles(measured, n=4) if len(measured) > 1 else (middle,) * 3
        error, spread = simulated / middle - 1, (high - low) / middle
        errors.append(abs(error))
        beyond += abs(error) > max(0.2, 2 * spread)
        lines.append(
            f"{policy:<14} {gpu_rows:8}  {cpu_rows:8}  {context:4}  {middle:19.1f}  {simulated:9.1f}  {error:+6.1%}  "
            f"{spread:6.1%}  {len(runs):4}"
        )
    return [
        *lines,
        f"{len(errors)} settings: mean error {statistics.fmean(errors):.1%} (goal: 10 %), worst {max(errors):.1%} "
        f"(goal: 20 %, or twice the spread); {beyond} beyond both",
    ]
