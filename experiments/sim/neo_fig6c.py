"""NEO Fig. 6c: latency per output token against load on a T4. ``python -m experiments.sim.neo_fig6c``.

Llama-2-7B, 864 tokens of K,V on the GPU, 40,960 on the host, 2,000 requests with Poisson arrivals. Their lengths are
those of the OSC trace in NEO's repository (``--trace``), or log-normal with its means and spreads (372.5 +- 103.7
tokens in, 45.3 +- 8.9 out). Latency is completion time over output tokens, the first quarter of the requests left out,
as in the authors' script. Two constants decide the knee of NEO, both fitted by others and taken from the profiles: the
T4's GEMM rate (21 TFLOPS) and the CPU's bandwidth.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.sim.neo import Box
from experiments.sim.output import parser, publish
from hybridattn.metrics.latency import per_token_ns
from hybridattn.metrics.throughput import without_first
from hybridattn.workload.arrivals import AllAtOnce, Poisson, synthetic
from hybridattn.workload.item import WorkItem, Workload
from hybridattn.workload.lengths import LogNormal

CPU_GB_S = 50.0
PUBLISHED_RATIO = 6.6
RATES = {"vllm-512": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8), "neo": (0.5, 1.5, 2.5, 3.1, 3.5, 3.7, 4.0, 4.5, 5.0)}
POLICY = {"vllm-512": "gpu_only", "neo": "asymmetric"}


# Tokens that a step reads at most: NEO's configuration, and the chunk of the vLLM that it is compared with.
BATCHED = {"vllm-512": 512, "neo": 832}


def box(system: str) -> Box:
    """An AWS g4dn.4xlarge; NEO keeps one spare layer of its GPU pages for staging."""
    tokens, batched = (832 if system == "neo" else 864), BATCHED[system]
    return Box("g4dn.4xlarge", "t4", "xeon-8259cl-8c", "pcie3-x16", "llama2-7b", tokens, 40_960, 832, batched, 512)


def lengths(count: int, trace: Path | None) -> Workload:
    """Requests without arrivals: of the trace, from its beginning, or drawn with its means and spreads."""
    if trace is None:
        lognormal = LogNormal(372.5, 103.7 / 372.5, high=700), LogNormal(45.3, 8.9 / 45.3, high=130)
        return synthetic(count, AllAtOnce(), *lognormal, seed=3)
    items = [WorkItem(0, r["prompt"], r["max_tokens"]) for r in json.loads(trace.read_text())[:count]]
    return Workload(trace.stem, tuple(items))


def latency_s(system: str, rate: float, requests: Workload, cpu_gb_s: float) -> float:
    """Mean latency per output token [s]."""
    times = Poisson(rate).draw(np.random.default_rng(3), len(requests.items))
    items = tuple([replace(i, arrival_ns=int(t)) for i, t in zip(requests.items, times, strict=True)])
    options = {"moves_block": True} if system == "neo" else {}
    served = box(system).serve(POLICY[system], replace(requests, items=items), cpu_gb_s, **options)
    values = [per_token_ns(r) for r in without_first(served.requests, 0.25)]
    return sum(v for v in values if v is not None) / len(values) / 1e9


def sustained(points: Sequence[tuple[float, float]], limit_s: float = 1.0) -> float | None:
    """Rate at which the latency passes ``limit_s``, on a line between two points; None: not passed."""
    for (r0, s0), (r1, s1) in zip(points, points[1:], strict=False):
        if s0 <= limit_s < s1:
            return r0 + (r1 - r0) * (limit_s - s0) / (s1 - s0)
    return None


def main(argv: Sequence[str] | None = None) -> None:
    p = parser("neo_fig6c", __doc__ or "")
    p.add_argument("--data", type=Path, default=Path("../shared/data/neo_fig6c.csv"))
    p.add_argument("--requests", type=int, default=2000)
    p.add_argument("--trace", type=Path, help="JSON list of {prompt, max_tokens}, such as NEO's osc-Llama-2-7b-hf.json")
    p.add_argument("--cpu-gb-s", type=float, default=CPU_GB_S)
    args = p.parse_args(argv)
    published: dict[str, list[tuple[float, float]]] = {}
    for r in csv.DictReader(args.data.open()):
        point = float(r["request_rate_per_s"]), float(r["per_token_latency_s"])
        published.setdefault(r["system"], []).append(point)
    requests = lengths(args.requests, args.trace)
    rows: list[dict[str, Any]] = []
    knees: dict[str, float | None] = {}
    for system, rates in RATES.items():
        points: list[tuple[float, float]] = []
        for rate in sorted({*rates, *(r for r, _ in published[system])}):
            points.append((rate, latency_s(system, rate, requests, args.cpu_gb_s)))
            known = dict(published[system]).get(rate)
            rows.append({"system": system, "rate": rate, "simulated_s": points[-1][1], "published_s": known})
            rows[-1]["published"] = "-" if known is None else f"{known:.2f}"
            if points[-1][1] > 4:
                break
        knees[system] = sustained(points)
    columns = {"system": "{system}", "requests/s": "{rate:.1f}", "simulated [s]": "{simulated_s:.2f}"}
    columns["published [s]"] = "{published}"
    publish("neo_fig6c", rows, columns, verdicts(knees, published), args.results)


def verdicts(knees: dict[str, float | None], published: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Sustained rates at 1 s per token and their ratio."""
    lines = []
    for system, knee in knees.items():
        known = sustained(published[system]) or published[system][-1][0]
        text = "not reached" if knee is None else f"{knee:.2f} requests/s ({knee / known - 1:+.0%}; asked within 25 %)"
        lines.append(f"{system}: 1 s per token at {text}; published about {known:.2f}")
    neo, alone = knees["neo"], knees["vllm-512"]
    if neo and alone:
        ratio = neo / alone
        lines.append(f"ratio of sustained rates {ratio:.1f} ({ratio / PUBLISHED_RATIO - 1:+.0%} of 6.6; asked 25 %)")
    return lines


if __name__ == "__main__":
    main()
