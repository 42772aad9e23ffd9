"""What requests over both tiers add to the layouts of ``adaptive``, under limits: the point of ``split_grid``.

The chooser answers twice for each setting, without and with them among its layouts, under a limit of ``limit`` times
the GPU-only time per token for every row, and for the rows of the GPU tier alone. Rates are those of its simulations.
Beside them stand the closed forms (``hybridattn.cost.split``): what hides, and both together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.cells import Cell, CellSettings
from experiments.schema import App
from experiments.settings import experiment
from experiments.tables import markdown, share, simulated
from hybridattn.cost.split import split_layer
from hybridattn.planning.predict import by_simulation
from hybridattn.policies.layouts import Layout
from hybridattn.policies.load import Limits
from hybridattn.policies.planning import choose

WORTH = 1.05


@dataclass
class SplitGridSettings(CellSettings):
    """``limit``: longest time per token, in multiples of the GPU-only one."""

    limit: float = 1.1


@experiment(SplitGridSettings)
def point(app: App, settings: SplitGridSettings) -> dict[str, Any]:
    """One row: a setting with both answers under both limits."""
    cell, predict = Cell.of(settings), by_simulation()
    load, costs = cell.load, cell.costs
    hot = load.gpu_rows * load.context
    layer = split_layer(costs, load.gpu_rows, hot)
    row: dict[str, Any] = {**simulated(costs.pricing.fingerprint), **cell.columns(settings.ratio)}
    row |= {
        "gpu_rows": load.gpu_rows, "cpu_rows": load.cpu_rows,
        "attention_over_tau": hot * layer.gpu_token_ns / max(layer.tau_ns, 1.0),
        "hidden_requests": layer.hidden(hot) / load.context,
        "closed_gain": layer.gain(hot), "closed_together": layer.gain_together(hot),
    }  # fmt: skip
    base = predict(load, Layout("gpu_only"), costs, True)
    for name, limits in (("every", Limits(settings.limit, settings.limit)), ("gpu", Limits(settings.limit, None))):
        for split in (False, True):
            layout, found = choose(load, costs, predict, limits, split=split)
            which = f"{name}_{'split' if split else 'today'}"
            row |= {which: str(layout), f"{which}_gain": found.tokens_per_s / base.tokens_per_s}
    return row


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Gains over GPU-only as a table, and in how many settings requests over both tiers make the difference."""
    columns = {
        "setting": "{cell}", "B_G": "{gpu_rows}", "T / tau": "{attention_over_tau:.1f}",
        "requests that hide": "{hidden_requests:.2f}", "closed forms: hides": "{closed_gain:.2f}",
        "together": "{closed_together:.2f}", "every row limited": "{every_today} {every_today_gain:.3f}",
        "with split": "{every_split} {every_split_gain:.3f}", "GPU rows limited": "{gpu_today} {gpu_today_gain:.3f}",
        "with split ": "{gpu_split} {gpu_split_gain:.3f}",
    }  # fmt: skip
    long = [r for r in rows if r["attention_over_tau"] > 2]
    lines = markdown(rows, columns)
    for name, whom in (("every", "every row"), ("gpu", "the rows of the GPU tier")):
        ahead = [r for r in long if r[f"{name}_split_gain"] > WORTH * r[f"{name}_today_gain"]]
        lines.append(
            f"limits for {whom}: more than {WORTH} times the best without them in {share(ahead, long)} of the settings "
            f"with T > 2 tau (goal: a third)"
        )
    return lines
