"""One point of a sweep, in whatever process the launcher put it: run it, time it, leave a row and its configuration."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from experiments.also import OWN, SHARED
from experiments.composed import OUTSIDE, app_of
from experiments.schema import App, Hardware, Model
from experiments.settings import find
from experiments.wording import among, key_of
from hybridattn.analysis.results import ResultFolder, finite
from hybridattn.core.errors import InputError
from hybridattn.core.interrupts import interrupts_noted
from hybridattn.core.machine_load import OthersLoad

PLAIN = (bool, int, float, str, type(None))


def run_job(config: DictConfig) -> float | None:
    """What hydra calls for each job: one point.

    Returns the value of ``analysis.y``, for sweepers that look for the best one.
    """
    hydra, folder = HydraConfig.get(), folder_here()
    sweep = folder.read_json("sweep.json")
    overrides = list(hydra.overrides.task)
    point_id = own_id(overrides, sweep["points"]) if sweep["points"] else " ".join(told_apart(overrides))
    number = sweep["points"].index(point_id) if sweep["points"] else 0 if hydra.mode == RunMode.RUN else hydra.job.num
    (folder.path / "points" / f"{number}.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
    launcher = hydra.runtime.choices["hydra/launcher"]
    if launcher != sweep["launcher"]:
        raise InputError(f"point {point_id} says launcher {launcher}, but {sweep['launcher']} launched it")
    swept = [*(hydra.sweeper.get("params") or {}), *(key_of(o) for o in overrides)]
    app = app_of(config)
    for what in (app.hardware, app.model):
        what.label += changed(what, overrides)
    row, error = run(app, coordinates(config, swept))
    commit = sweep["commit"]  # of the code that the sweep began with, which is the code that runs
    folder.add_row({"point_id": point_id, "point": number, "launcher": launcher, **row, "commit": commit})
    if error is not None and config.fail_fast:
        raise error
    found = row.get(config.analysis.y)
    return float(found) if isinstance(found, int | float) else None


def folder_here() -> ResultFolder:
    """The result folder of the run that this job belongs to."""
    hydra = HydraConfig.get()
    return ResultFolder.open(Path(hydra.run.dir if hydra.mode == RunMode.RUN else hydra.sweep.dir))


def own_id(overrides: Sequence[str], points: Sequence[str]) -> str:
    """The id among ``points`` that a job's overrides end with, the longest one: what is the point's own comes last."""
    return next(own for i in range(len(overrides) + 1) if (own := " ".join(overrides[i:])) in points)


def told_apart(overrides: Iterable[str]) -> list[str]:
    """Overrides that say what a job of another sweeper runs, not where or how."""
    return [o for o in overrides if not among(o, SHARED + OWN)]


def coordinates(config: DictConfig, keys: Iterable[str]) -> dict[str, Any]:
    """Values of swept keys as columns, as they were composed: ``workload.options.arrivals.rate_per_s`` is
    ``rate_per_s`` (``arrivals.rate_per_s`` where another key has that name). Lists and mappings are text.

    A choice of a group (``hardware=t4``) is none: its label is a column already.
    """
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key.lstrip("+") for key in keys):
        value = OmegaConf.select(config, key) if "." in key and not among(key, OUTSIDE + ("paths", "hydra")) else None
        if value is not None:
            parts = key.split(".")
            found[".".join(parts[-2:]) if parts[-1] in found else parts[-1]] = (
                value if isinstance(value, PLAIN) else str(OmegaConf.to_container(value))
            )
    return found


def changed(what: Hardware | Model, overrides: Iterable[str]) -> str:
    """What to put behind a label whose file says another machine or model: ``T4 (gpu=l4)``."""
    group, parts = ("hardware", ("gpu", "cpu", "link")) if isinstance(what, Hardware) else ("model", ("shape", "load"))
    keys = [key_of(o) for o in overrides]
    own = [f"{part}={getattr(what, part)}" for part in parts if f"{group}.{part}" in keys]
    return f" ({', '.join(own)})" if own and f"{group}.label" not in keys else ""


def run(app: App, at: dict[str, Any]) -> tuple[dict[str, Any], Exception | None]:
    """The row of a point; a failed one has ``status`` failed, the error and its traceback."""
    started = time.perf_counter()
    origin = {
        "experiment": app.name, "policy": app.policy.label, "hardware": app.hardware.name, "model": app.model.label,
        "workload": app.workload.label, "repeat": app.repeat, "seed": app.seed + app.repeat,
    }  # fmt: skip
    plain = {k: v for k, v in app.settings.items() if isinstance(v, PLAIN)} | at
    error: Exception | None = None
    others = OthersLoad()
    try:
        point = find(app.point, "point")
        result = {"status": "ok", "error": None, "traceback": None, **plain, **point(app, point.settings(app.settings))}
        if result.get("kind") == "measured":
            result["others_cpu_fraction"] = others.share()
    except Exception as caught:  # a failed point is a row: the sweep goes on and ends with a non-zero exit code
        if interrupts_noted:
            raise KeyboardInterrupt from caught
        error = caught
        text = f"{type(caught).__name__}: {caught}"
        result = {"device": app.device.name, "kind": None, "profile": None, **plain}
        result |= {"status": "failed", "error": text, "traceback": traceback.format_exc()}
    return finite({**origin, **result, "took_s": round(time.perf_counter() - started, 4)}), error
