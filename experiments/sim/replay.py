"""Replay a request trace on a simulated machine: ``python -m experiments.sim.replay TRACE --gpu a100-80g``.

The whole Azure conversation trace of November 2023 (19,366 requests) takes a few seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments.results import ResultFolder
from experiments.sim.machines import TIMEOUT_NS, Setting, kv_tokens
from hybridattn.core.config import EngineConfig
from hybridattn.core.provenance import git_commit
from hybridattn.core.records import RunRecords
from hybridattn.core.trace import Trace
from hybridattn.engine.replay import Replay, Served
from hybridattn.metrics.report import RunMetrics, run_metrics
from hybridattn.planning.predict import by_simulation
from hybridattn.policies.registry import make_policy
from hybridattn.workload.item import Workload
from hybridattn.workload.traces import read_azure

PAGE = 16


def replay(
    workload: Workload, setting: Setting, config: EngineConfig, policy: str, show: bool = True
) -> tuple[Served, RunMetrics]:
    """Serve ``workload`` under ``policy``; its metrics, and how many requests were served or refused."""
    chosen = make_policy(policy, costs=setting.costs, predict=by_simulation())
    engine = setting.engine(chosen, config)
    with Progress(disable=not show, transient=True) as progress:
        task = progress.add_task("replay", total=len(workload))
        seen = [0]

        def advance(ended: int) -> None:
            if ended >= seen[0] + 500:
                progress.update(task, completed=ended)
                seen[0] = ended

        served = Replay(engine, workload, on_progress=advance).run()
    trace = Trace(engine.device.name, engine.device.kind, engine.device.profile, git_commit())
    return served, run_metrics(RunRecords(setting.model.num_layers, served.requests), trace)


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m experiments.sim.replay", description=__doc__)
    p.add_argument("trace", type=Path, help="Azure LLM inference trace (CSV)")
    p.add_argument("--gpu", default="a100-80g")
    p.add_argument("--cpu", default="epyc-7r32-32c")
    p.add_argument("--link", default="pcie4-x16")
    p.add_argument("--model", default="llama3.1-8b")
    p.add_argument("--policy", default="gpu_only")
    p.add_argument("--max-num-seqs", type=int, default=512)
    p.add_argument("--max-num-batched-tokens", type=int, default=2048)
    p.add_argument("--time-scale", type=float, default=1.0, help="0.5 replays twice as fast")
    p.add_argument("--limit", type=int, help="only the first N requests")
    p.add_argument("--results", type=Path, default=Path("results"))
    args = p.parse_args(argv)
    console, started = Console(), time.perf_counter()
    workload = read_azure(args.trace).scaled(args.time_scale)
    workload = workload.take(args.limit) if args.limit else workload
    on_gpu, on_cpu = kv_tokens(args.gpu, args.cpu, args.model)
    setting = Setting.of(args.gpu, args.cpu, args.link, args.model)
    config = EngineConfig(
        gpu_kv_blocks=on_gpu // PAGE,
        cpu_kv_blocks=on_cpu // PAGE,
        page_size=PAGE,
        max_model_len=setting.model.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        op_timeout_ns=TIMEOUT_NS,
    )
    console.print(workload.describe())
    served, metrics = replay(workload, setting, config, args.policy)
    took_s = time.perf_counter() - started
    show(console, served, metrics, args.policy)
    console.print(f"simulated {served.end_ns / 1e9:.0f} s of serving in {took_s:.1f} s")
    folder = ResultFolder(args.results, "sim_replay")
    folder.add_row({"experiment": "sim_replay", "policy": args.policy, "took_s": took_s, **metrics.as_row()})
    console.print(f"results: {folder.path}")


def show(console: Console, served: Served, metrics: RunMetrics, policy: str) -> None:
    """Latencies and throughput as a table."""
    table = Table(title=f"{metrics.kind} on {metrics.device}, {policy}, profile {metrics.profile}")
    for column in ("", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    for name in ("ttft", "tpot", "itl", "e2el", "queue"):
        values = [metrics[f"{name}_{part}_ns"] for part in ("mean", "median", "p90", "p99")]
        table.add_row(f"{name} [ms]", *("-" if v is None else f"{v / 1e6:.1f}" for v in values))
    console.print(table)
    console.print(
        f"{served.ended} requests served, {served.refused} refused, {served.empty} without output; "
        f"{metrics['requests_per_s']:.2f} requests/s, {metrics['output_tokens_per_s']:.1f} output tokens/s, "
        f"{metrics['total_tokens_per_s']:.0f} tokens/s in all"
    )


if __name__ == "__main__":
    main()
