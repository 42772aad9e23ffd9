"""Simulated against measured on this machine: ``python -m experiments.sim.validate``.

The executor with real stages on the `host` device, and the same executor, policies and loads on the simulator with this
machine's calibrated profile (``hybridattn calibrate`` first). Each measured figure is the median of several runs; the
error is held against the spread of the runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.sim.output import parser, publish
from hybridattn.calibration.bench import Bench
from hybridattn.calibration.measure import costs_of, default_path
from hybridattn.core.stages import CPU_TIER, CpuRow
from hybridattn.cost.costs import Costs
from hybridattn.cost.profile import Profile, load_profile
from hybridattn.devices.fingerprint import fingerprint
from hybridattn.devices.sim import SimDevice
from hybridattn.policies.base import Policy
from hybridattn.policies.load import Load
from hybridattn.policies.registry import make_policy
from hybridattn.runtime.steady import SteadyRun

SETTINGS: tuple[tuple[str, dict[str, Any], int, int, int], ...] = (  # policy, options, GPU rows, CPU rows, keys
    ("gpu_only", {}, 4, 0, 128),
    ("gpu_only", {}, 12, 0, 384),
    ("sync_offload", {}, 4, 4, 128),
    ("sync_offload", {}, 4, 12, 128),
    ("sync_offload", {}, 4, 12, 384),
    ("sync_offload", {"max_rows": 4}, 8, 8, 384),
    ("async_overlap", {"max_cohorts": 1}, 4, 4, 128),
    ("async_overlap", {"max_cohorts": 2}, 4, 12, 128),
    ("async_overlap", {"max_cohorts": 4}, 8, 8, 384),
    ("async_overlap", {"max_cohorts": 2, "same_pass": False}, 4, 12, 384),
    ("asymmetric", {}, 4, 12, 128),
    ("asymmetric", {}, 8, 8, 384),
)
WARM, PASSES = 4, 16


def measured(bench: Bench, policy: Policy, load: Load) -> float:
    """Tokens per second of one run on the host device."""
    executor = bench.executor(policy)
    batch = bench.batch(load.gpu_rows, load.context)
    requests = bench.rows(CPU_TIER, load.cpu_rows, load.context)
    rows = [CpuRow(r, load.context - 1) for r in requests]

    def step() -> None:
        executor.run(batch, tuple(row for row, r in zip(rows, requests, strict=True) if not r.in_flight))

    for _ in range(WARM):
        step()
    start, tokens = time.perf_counter_ns(), executor.tokens
    for _ in range(PASSES):
        step()
    took_ns = time.perf_counter_ns() - start
    bench.device.drain(60_000_000_000)
    return (executor.tokens - tokens) / took_ns * 1e9


def simulated(costs: Costs, profile: Profile, policy: Policy, load: Load) -> float:
    """Tokens per second on the simulator, with the driver's submissions and polls at their measured cost."""
    submit_ns, poll_ns = (round(profile.value(name)) for name in ("submit", "poll"))
    run = SteadyRun(
        costs, costs.pricing, policy, load,
        lambda pricing: SimDevice(pricing, record=False, submit_ns=submit_ns, poll_ns=poll_ns),
    )  # fmt: skip
    return run.measure(WARM, PASSES).tokens_per_s


def compare(bench: Bench, profile: Profile, runs: int) -> list[dict[str, Any]]:
    """One row per setting."""
    costs = costs_of(bench, profile, fingerprint())
    rows = []
    for name, options, gpu_rows, cpu_rows, context in SETTINGS:
        load = Load(gpu_rows, cpu_rows, context)
        rates = [measured(bench, make_policy(name, **options), load) for _ in range(runs)]
        middle = statistics.median(rates)
        low, _, high = statistics.quantiles(rates, n=4)
        predicted = simulated(costs, profile, make_policy(name, **options), load)
        rows.append(
            {
                "policy": name + (f" {options}" if options else ""),
                "gpu_rows": gpu_rows,
                "cpu_rows": cpu_rows,
                "context": context,
                "measured": middle,
                "simulated": predicted,
                "error": predicted / middle - 1,
                "spread": (high - low) / middle,
                "runs": runs,
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    p = parser("validate", __doc__ or "")
    p.add_argument("--profile", type=Path, default=default_path())
    p.add_argument("--runs", type=int, default=3)
    args = p.parse_args(argv)
    profile = load_profile(args.profile)
    with Bench(profile.model, profile.dtype) as bench:
        rows = compare(bench, profile, args.runs)
    errors = [abs(r["error"]) for r in rows]
    late = [r for r in rows if abs(r["error"]) > max(0.2, 2 * r["spread"])]
    columns = {
        "policy": "{policy}",
        "GPU rows": "{gpu_rows}",
        "CPU rows": "{cpu_rows}",
        "keys": "{context}",
        "measured [tokens/s]": "{measured:.1f}",
        "simulated [tokens/s]": "{simulated:.1f}",
        "error": "{error:+.0%}",
        "spread of runs": "{spread:.0%}",
    }
    verdict = [
        f"mean error {sum(errors) / len(errors):.1%} (asked 10 %), worst {max(errors):.1%} (asked 20 %, or twice the "
        f"spread); {len(late)} of {len(rows)} settings beyond both"
    ]
    publish("validate", rows, columns, verdict, args.results)


if __name__ == "__main__":
    main()
