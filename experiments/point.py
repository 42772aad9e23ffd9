"""One point of a sweep, in whatever process the launcher put it: run it, time it, leave a row and its configuration."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.compose import app_of
from experiments.results import ResultFolder, finite
from experiments.schema import App
from experiments.settings import find
from hybridattn.core.errors import InputError

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Job:
    """What hydra calls for each point. Travels to other processes, so it holds plain values.

    numbers : number of each point by its id (its own overrides, joined)
    own : how many of a job's overrides are the point's own; they come last
    commit : of the code that the sweep began with, which is the code that runs
    """

    folder: str
    launcher: str
    numbers: dict[str, int]
    own: int
    commit: str
    fail_fast: bool

    def __call__(self, config: DictConfig) -> None:
        hydra = HydraConfig.get()
        overrides = list(hydra.overrides.task)
        own = overrides[len(overrides) - self.own :]
        point_id = " ".join(own)
        folder = ResultFolder.open(Path(self.folder))
        number = self.numbers[point_id]
        (folder.path / "points" / f"{number}.yaml").write_text(OmegaConf.to_yaml(config, resolve=True))
        used = hydra.runtime.choices["hydra/launcher"]
        if used != self.launcher:
            raise InputError(f"point {point_id} says launcher {used}, but {self.launcher} launched it")
        row, error = run(app_of(config), coordinates(own))
        folder.add_row({"point_id": point_id, "point": number, "launcher": self.launcher, **row, "commit": self.commit})
        if error is not None and self.fail_fast:
            raise error


def coordinates(own: list[str]) -> dict[str, Any]:
    """Swept values as columns: ``workload.options.arrivals.rate_per_s=0.5`` is ``rate_per_s`` 0.5.

    A choice of a group (``hardware=t4``) is none: its label is a column already.
    """
    pairs = (o.lstrip("+").split("=", 1) for o in own)
    return {key.rsplit(".", 1)[1]: yaml.safe_load(value) for key, value in pairs if "." in key}


def named_axes(app: App) -> dict[str, Any]:
    """Values of the axes that the experiment file names, as columns; the command line may have fixed them."""
    found = {}
    for key in app.sweep:
        value: Any = app
        for part in str(key).split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        if "." in str(key) and isinstance(value, PLAIN):
            found[str(key).rsplit(".", 1)[1]] = value
    return found


def run(app: App, at: dict[str, Any]) -> tuple[dict[str, Any], Exception | None]:
    """The row of a point; a failed one has ``status`` failed, the error and its traceback."""
    started = time.perf_counter()
    origin = {
        "experiment": app.name, "policy": app.policy.label, "hardware": app.hardware.label, "model": app.model.label,
        "workload": app.workload.label, "repeat": app.repeat,
    }  # fmt: skip
    plain = {k: v for k, v in app.settings.items() if isinstance(v, PLAIN)} | named_axes(app) | at
    error: Exception | None = None
    try:
        point = find(app.point, "point")
        result = {"status": "ok", "error": None, "traceback": None, **plain, **point(app, point.settings(app.settings))}
    except Exception as caught:  # a failed point is a row: the sweep goes on and ends with a non-zero exit code
        error = caught
        text = f"{type(caught).__name__}: {caught}"
        result = {"device": app.device.name, "kind": None, "profile": None, **plain}
        result |= {"status": "failed", "error": text, "traceback": traceback.format_exc()}
    return finite({**origin, **result, "took_s": round(time.perf_counter() - started, 4)}), error
