"""All metrics of a run as one flat record, ready to be a row of ``rows.jsonl``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridattn.core.errors import InputError
from hybridattn.core.records import RequestRecord, RunRecords
from hybridattn.core.stages import TIERS
from hybridattn.core.trace import Trace
from hybridattn.metrics.latency import Distribution, Slo, completed, distribution, e2el_ns, summarize, tpot_ns, ttft_ns
from hybridattn.metrics.memory import TierMemory
from hybridattn.metrics.overlap import OverlapSummary, summarize_overlap
from hybridattn.metrics.share import HOST_STAGES, LANE_STAGES, PHASES, STAGES, Shares, phase_shares, shares
from hybridattn.metrics.throughput import Throughput, Window, goodput, inside, steady_window, throughput

KINDS = ("measured", "emulated", "simulated")


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The metrics of one run with where they come from.

    ``values`` maps a name that ends in its unit (``_ns``, ``_per_s``, ``_bytes``, ``_fraction``; counts have none) to a
    number or ``None``. No value is text of a prompt.
    """

    device: str
    kind: str
    profile: str
    commit: str
    values: Mapping[str, int | float | None] = field(repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"kind '{self.kind}' is none of {', '.join(KINDS)}")

    def __getitem__(self, name: str) -> int | float | None:
        return self.values[name]

    def as_row(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Provenance first, then every value or those of ``names``: plain ``str``, ``int``, ``float`` or ``None``."""
        origin = {"device": self.device, "kind": self.kind, "profile": self.profile, "commit": self.commit}
        return {**origin, **(self.values if names is None else {name: self.values[name] for name in names})}


def run_metrics(
    records: RunRecords,
    trace: Trace,
    *,
    slo: Slo | None = None,
    window: Window | None = None,
    alone_ns: int | None = None,
    host_stage_ns: Mapping[str, int] | None = None,
    memory: Sequence[TierMemory] = (),
    compile_ns: int | None = None,
) -> RunMetrics:
    """Compute everything of ``docs/metrics.md`` for a run that has ended.

    Parameters
    ----------
    records, trace
        What the run left behind. Spans may be absent (a simulation without them): what needs them is then missing.
    window : Window, optional
        Restricts latencies to requests inside it and throughput to events inside it (a warm-up left out). Overlap and
        shares always cover the whole trace given.
    alone_ns : int, optional
        Duration of a step without CPU rows, for the stretch (see ``overlap.stretch``).
    compile_ns : int, optional
        Time spent compiling kernels, reported apart; it must lie before the window or outside the run.
    """
    requests = records.requests if window is None else inside(records.requests, window)
    values: dict[str, int | float | None] = {"num_layers": records.num_layers, "compile_ns": compile_ns}
    values |= _latency_values(requests)
    values |= _throughput_values("", throughput(records.requests, window))
    steady = steady_window(records.requests)
    values |= _throughput_values("steady_", throughput(records.requests, steady) if steady else None)
    good = goodput(records.requests, slo, window) if slo else None
    values["goodput_requests_per_s"] = good.requests_per_s if good else None
    values["slo_attainment_fraction"] = good.attainment if good else None
    has_spans = bool(trace.spans)
    values |= _overlap_values(summarize_overlap(records.steps, trace.spans, alone_ns), has_spans)
    values |= _share_values("", shares(trace.spans, host_stage_ns), has_spans)
    phases = phase_shares(trace.spans, records.steps, records.requests)
    for phase in PHASES:
        values |= _share_values(f"{phase}_", phases.get(phase, shares(())), phase in phases)
    for tier in memory:
        values |= _memory_values(tier)
    return RunMetrics(trace.device, trace.kind, trace.profile, trace.commit, values)


def _latency_values(requests: Sequence[RequestRecord]) -> dict[str, int | float | None]:
    summary = summarize(requests)
    values: dict[str, int | float | None] = {
        "completed": summary.completed,
        "failed": summary.failed,
        "empty": summary.empty,
        "preemptions": sum(r.preemptions for r in requests),
        "recomputed_tokens": sum(r.recomputed_tokens for r in requests),
        "reused_tokens": sum(r.reused_tokens for r in requests),
    }
    for name in ("ttft", "tpot", "itl", "e2el", "queue", "per_token"):
        values |= _spread(name, getattr(summary, name))
    done = completed(requests)
    for tier in TIERS:
        mine = [r for r in done if r.tier == tier]
        values[f"completed_{tier}_tier"] = len(mine)
        for name, measure in (("ttft", ttft_ns), ("tpot", tpot_ns), ("e2el", e2el_ns)):
            values |= _spread(f"{name}_{tier}_tier", distribution(map(measure, mine)))
    return values


def _spread(name: str, found: Distribution | None) -> dict[str, int | float | None]:
    parts = ("mean", "median", "p90", "p99")
    return {f"{name}_{part}_ns": getattr(found, f"{part}_ns") if found else None for part in parts}


def _throughput_values(prefix: str, found: Throughput | None) -> dict[str, int | float | None]:
    names = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "duration_ns")
    return {f"{prefix}{name}": getattr(found, name) if found else None for name in names}


def _overlap_values(found: OverlapSummary, has_spans: bool) -> dict[str, int | float | None]:
    from_spans = (
        "overlap_fraction", "cpu_busy_ns", "gpu_busy_ns", "gpu_bubble_ns", "gpu_bubble_fraction",
        "d2h_bytes", "h2d_bytes", "d2h_busy_ns", "h2d_busy_ns",
    )  # fmt: skip
    from_steps = (
        "steps", "polls_made", "polls_hit", "polls_missed", "poll_hit_fraction", "joins", "skips", "waits", "detours",
        "layers_per_step",
    )  # fmt: skip
    values = {name: getattr(found, name) if has_spans else None for name in from_spans}
    values |= {name: getattr(found, name) for name in from_steps}
    return values | {"stretch_fraction": found.stretch}


def _share_values(prefix: str, found: Shares, has_spans: bool) -> dict[str, int | float | None]:
    values: dict[str, int | float | None] = {}
    for calibre in ("busy_time", "work", "operator_time"):
        share = getattr(found, calibre)
        values[f"{prefix}cpu_share_{calibre}_fraction"] = share.cpu_fraction if has_spans else None
    took_ns = dict(found.stage_ns)
    for stage in LANE_STAGES if prefix else STAGES:  # the driver's own stages are known for the whole run only
        values[f"{prefix}stage_{stage}_ns"] = took_ns.get(stage) if has_spans or stage in HOST_STAGES else None
    return values


def _memory_values(tier: TierMemory) -> dict[str, int | float | None]:
    values: dict[str, int | float | None] = {
        f"memory_{tier.tier}_total_bytes": tier.total,
        f"memory_{tier.tier}_used_bytes": tier.used,
    }
    return values | {f"memory_{tier.tier}_{name}_bytes": value for name, value in tier.parts}
