"""NEO's figure 6c: latency per output token against load on a T4. The point of ``neo_fig6c``.

Llama-2-7B, 864 tokens of K,V on the GPU, 40,960 on the host, 2,000 requests with Poisson arrivals. Their lengths are
those of the OSC trace in NEO's repository (``trace``), or log-normal with its means and spreads (372.5 +- 103.7 tokens
in, 45.3 +- 8.9 out). Latency is completion time over output tokens, the first quarter of the requests left out, as in
the authors' script. Two constants decide the knee of NEO, both fitted by others and taken from the profiles: the T4's
GEMM rate (21 TFLOPS) and the CPU's bandwidth.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.points.neo import Box
from experiments.published import published_rows
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown, simulated
from hybridattn.core.errors import InputError
from hybridattn.metrics.latency import per_token_ns
from hybridattn.metrics.throughput import without_first
from hybridattn.workload.arrivals import AllAtOnce, Poisson, synthetic
from hybridattn.workload.item import WorkItem, Workload
from hybridattn.workload.lengths import LogNormal

PUBLISHED_RATIO = 6.6
POLICY = {"vllm-512": "gpu_only", "neo": "asymmetric"}
# Tokens that a step reads at most: NEO's configuration, and the chunk of the vLLM that it is compared with.
BATCHED = {"vllm-512": 512, "neo": 832}
OVERLOADED_S = 4.0  # beyond the chart: higher rates are left out of the table


@dataclass
class Fig6cSettings:
    """``settings`` of ``neo_fig6c``.

    system : ``vllm-512`` (GPU-only, chunks of 512 tokens) or ``neo``
    rate_per_s : requests per second
    trace : a JSON list of {prompt, max_tokens}, such as NEO's osc-Llama-2-7b-hf.json; null: drawn lengths
    cpu_gb_s : 10^9 bytes of K,V a second in CPU attention
    """

    system: str = "neo"
    rate_per_s: float = 1.0
    requests: int = 2000
    trace: str | None = None
    cpu_gb_s: float = 50.0

    def __post_init__(self) -> None:
        if self.system not in POLICY:
            raise InputError(f"settings.system must be one of {', '.join(POLICY)}, got '{self.system}'")


@experiment(Fig6cSettings)
def point(app: App, settings: Fig6cSettings) -> dict[str, Any]:
    """One row: mean latency per output token of a system at a rate."""
    s, at = settings, box(settings.system)
    latency_ns = latency(s.system, s.rate_per_s, lengths(s.requests, s.trace), s.cpu_gb_s)
    known = dict(published()[s.system]).get(s.rate_per_s)
    return {
        **simulated(at.costs(s.cpu_gb_s).pricing.fingerprint),
        "policy": POLICY[s.system],
        "per_token_ns": latency_ns,
        "published_s": known,
    }


def published() -> dict[str, list[tuple[float, float]]]:
    """Published points: system -> (requests per second, latency [s])."""
    found: dict[str, list[tuple[float, float]]] = {}
    for r in published_rows("neo_fig6c"):
        found.setdefault(r["system"], []).append((float(r["x"]), float(r["y"]) / 1e9))
    return found


def box(system: str) -> Box:
    """An AWS g4dn.4xlarge; NEO keeps one spare layer of its GPU pages for staging."""
    tokens, batched = (832 if system == "neo" else 864), BATCHED[system]
    return Box("g4dn.4xlarge", "t4", "xeon-8259cl-8c", "pcie3-x16", "llama2-7b", tokens, 40_960, 832, batched, 512)


@functools.lru_cache(maxsize=1)
def lengths(count: int, trace: str | None) -> Workload:
    """Requests without arrivals: of the trace, from its beginning, or drawn with its means and spreads."""
    if trace is None:
        lognormal = LogNormal(372.5, 103.7 / 372.5, high=700), LogNormal(45.3, 8.9 / 45.3, high=130)
        return synthetic(count, AllAtOnce(), *lognormal, seed=3)
    path = Path(trace)
    if not path.is_file():
        raise InputError(f"settings.trace: there is no file {path}")
    items = [WorkItem(0, r["prompt"], r["max_tokens"]) for r in json.loads(path.read_text())[:count]]
    return Workload(path.stem, tuple(items))


def latency(system: str, rate: float, requests: Workload, cpu_gb_s: float) -> float:
    """Mean latency per output token [ns]."""
    times = Poisson(rate).draw(np.random.default_rng(3), len(requests.items))
    items = tuple([replace(i, arrival_ns=int(t)) for i, t in zip(requests.items, times, strict=True)])
    options = {"moves_block": True} if system == "neo" else {}
    served = box(system).serve(POLICY[system], replace(requests, items=items), cpu_gb_s, **options)
    values = [per_token_ns(r) for r in without_first(served.requests, 0.25)]
    return sum(v for v in values if v is not None) / len(values)


def sustained(points: Sequence[tuple[float, float]], limit_s: float = 1.0) -> float | None:
    """Rate at which the latency passes ``limit_s``, on a line between two points; None: not passed."""
    for (r0, s0), (r1, s1) in zip(points, points[1:], strict=False):
        if s0 <= limit_s < s1:
            return r0 + (r1 - r0) * (limit_s - s0) / (s1 - s0)
    return None


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The latencies as a table, sustained rates at 1 s per token, and their ratio."""
    rows = sorted(rows, key=lambda row: (list(POLICY).index(row["system"]), row["rate_per_s"]))
    shown: list[dict[str, Any]] = []
    for row in rows:
        last = shown[-1] if shown and shown[-1]["system"] == row["system"] else None
        if last is None or last["s"] <= OVERLOADED_S:
            known = row["published_s"]
            shown.append({**row, "s": row["per_token_ns"] / 1e9, "known": "-" if known is None else f"{known:.2f}"})
    columns = {"system": "{system}", "requests/s": "{rate_per_s:.1f}", "simulated [s]": "{s:.2f}"}
    lines, knees = markdown(shown, {**columns, "published [s]": "{known}"}), {}
    for system in dict.fromkeys(row["system"] for row in rows):
        knee = knees[system] = sustained([(r["rate_per_s"], r["s"]) for r in shown if r["system"] == system])
        points = published()[system]
        known = sustained(points) or points[-1][0]
        text = "not reached" if knee is None else f"{knee:.2f} requests/s ({knee / known - 1:+.0%}; goal: within 25 %)"
        lines.append(f"{system}: 1 s per token at {text}; published about {known:.2f}")
    neo, alone = knees.get("neo"), knees.get("vllm-512")
    if neo and alone:
        off = neo / alone / PUBLISHED_RATIO - 1
        lines.append(f"ratio of sustained rates {neo / alone:.1f} ({off:+.0%} of 6.6; goal: within 25 %)")
    return lines
