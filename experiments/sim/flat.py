"""A long run needs no more memory than a short one: ``python -m experiments.sim.flat``.

Small requests, a fixed number at a time, on simulated tiers that hold only part of them; records go to nobody. Memory
is that of the process after a tenth of the requests and at the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import psutil
from rich.progress import track

from experiments.sim.machines import TIMEOUT_NS, Setting
from experiments.sim.output import parser, publish
from hybridattn.core.config import EngineConfig
from hybridattn.core.request import DeclaredTokens
from hybridattn.policies.registry import make_policy

AT_A_TIME, PROMPT, OUTPUT = 64, 40, 4
POLICIES = ("gpu_only", "async_overlap", "asymmetric")
CONFIG = EngineConfig(
    gpu_kv_blocks=96, cpu_kv_blocks=256, page_size=16, max_model_len=256, max_num_seqs=64, max_num_batched_tokens=512,
    op_timeout_ns=TIMEOUT_NS,
)  # fmt: skip


def serve(name: str, count: int, show: bool = False) -> dict[str, Any]:
    """``count`` requests under a policy: memory early and late, and requests per second of process time."""
    setting = Setting.of("t4", "xeon-8259cl-8c", "pcie3-x16", "smollm2-135m")
    engine = setting.engine(make_policy(name, costs=setting.costs), CONFIG)
    ended, added, early = 0, 0, 0
    memory = psutil.Process().memory_info

    def one_ended(record: object) -> None:
        nonlocal ended
        ended += 1

    engine.send_records(one_ended)
    started = time.process_time()
    for part in track(range(100), description=name, disable=not show):
        while ended * 100 < (part + 1) * count:
            while added < count and engine.unfinished < AT_A_TIME:
                engine.add(DeclaredTokens(PROMPT), OUTPUT)
                added += 1
            engine.step()
        if part == 9:
            early = memory().rss
    return {
        "policy": name,
        "requests": ended,
        "early_mib": early / 2**20,
        "late_mib": memory().rss / 2**20,
        "requests_per_s": ended / (time.process_time() - started),
    }


def main(argv: Sequence[str] | None = None) -> None:
    p = parser("flat", __doc__ or "")
    p.add_argument("--requests", type=int, default=1_000_000)
    p.add_argument("--policies", nargs="+", default=POLICIES)
    args = p.parse_args(argv)
    rows = [serve(name, args.requests, show=True) for name in args.policies]
    columns = {
        "policy": "{policy}",
        "requests": "{requests}",
        "memory after a tenth [MiB]": "{early_mib:.1f}",
        "at the end [MiB]": "{late_mib:.1f}",
        "requests per second of process time": "{requests_per_s:.0f}",
    }
    most = max(r["late_mib"] - r["early_mib"] for r in rows)
    publish("flat", rows, columns, [f"largest growth over the last nine tenths: {most:.1f} MiB"], args.results)


if __name__ == "__main__":
    main()
