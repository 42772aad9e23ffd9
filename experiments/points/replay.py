"""A request trace replayed on a simulated machine: the point of ``azure``, with every metric of the run as a column.

The whole Azure conversation trace of November 2023 (19,366 requests) takes a few seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.build import costs_of, policy_of, sim_device
from experiments.points.serve import ServeSettings, engine_for, metrics_of, workload_for
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown
from hybridattn.core.errors import InputError
from hybridattn.core.records import RunRecords
from hybridattn.engine.replay import Replay

TIMES = ("ttft", "tpot", "itl", "e2el", "queue")
PARTS = ("mean", "median", "p90", "p99")


@experiment(ServeSettings)
def point(app: App, settings: ServeSettings) -> dict[str, Any]:
    """One row: all metrics of the run."""
    costs, workload = costs_of(app), workload_for(app, settings)
    engine = engine_for(app, settings, policy_of(app, costs), sim_device(app, costs.pricing))
    served = Replay(engine, workload).run()
    if not served.requests:
        raise InputError(f"workload {workload.name}: no request was served, {served.refused} could never fit")
    found = metrics_of(engine, RunRecords(costs.num_layers, served.requests)).as_row()
    counts = {"ended": served.ended, "refused": served.refused, "empty": served.empty, "end_s": served.end_ns / 1e9}
    return {**found, **counts, "trace": workload.describe()}


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Latencies of each run as a table, and what was served."""
    lines = list(dict.fromkeys(row["trace"] for row in rows))
    shown = [
        {"policy": row["policy"], "time": name, **{part: _ms(row[f"{name}_{part}_ns"]) for part in PARTS}}
        for row in rows
        for name in TIMES
    ]
    columns = {"policy": "{policy}", "": "{time} [ms]"}
    lines += markdown(shown, columns | {part: f"{{{part}}}" for part in PARTS})
    return lines + [
        f"{row['policy']}: {row['ended']} requests served, {row['refused']} refused, {row['empty']} without output; "
        f"{row['requests_per_s']:.2f} requests/s, {row['output_tokens_per_s']:.1f} output tokens/s, "
        f"{row['total_tokens_per_s']:.0f} tokens/s in all; {row['end_s']:.0f} s of serving in {row['took_s']:.1f} s"
        for row in rows
    ]


def _ms(time_ns: float | None) -> str:
    return "-" if time_ns is None else f"{time_ns / 1e6:.1f}"
