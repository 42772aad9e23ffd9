"""How long a sweep will take: from rows of the sweep before it where there are any."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

from hybridattn.analysis.results import ResultFolder

COMPOSE_S = 0.2  # to compose the configuration of a point


def seconds_per_point(config: DictConfig, folder: ResultFolder | None = None) -> tuple[float, str]:
    """From good rows of ``folder`` or of the sweep before it, else what the experiment file expects; and from which."""
    parent = Path(config.results_root) / config.name
    others = sorted(p for p in parent.glob("*/rows.jsonl") if p.parent.name != "latest")
    mine = [folder.rows_file] if folder is not None else []
    for file in (*mine, *reversed(others)):
        took = [r["took_s"] for r in ResultFolder.open(file.parent).rows() if r.get("status") == "ok"]
        if took and file in mine or len(took) >= 3:
            return sum(took) / len(took) + COMPOSE_S, "from earlier points"
    return float(config.point_seconds) + COMPOSE_S, "as the experiment expects"


def workers(config: DictConfig) -> int:
    """Points that the launcher runs at a time: processes of joblib, cores of a local Ray or submitit, jobs of a
    cluster's queue, else one."""
    name, launcher, cores = config.hydra.runtime.choices["hydra/launcher"], config.hydra.launcher, os.cpu_count() or 1
    if name == "ray":  # a point takes one core; of an existing cluster only Ray knows the size
        return launcher.ray.init.get("num_cpus") or cores
    if name == "submitit_local":
        return cores
    if name == "submitit_slurm":
        return launcher.array_parallelism
    jobs = launcher.get("n_jobs", 1)
    return cores + 1 + jobs if jobs < 0 else jobs


def duration(seconds: float) -> str:
    """For people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
