"""Copies a result folder into wandb: ``python -m experiments.wandb_sink FOLDER``. Rows copied before are left out."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import wandb

from hybridattn.analysis.results import ResultFolder

STATE = "wandb.json"


def copy(folder: ResultFolder, project: str, mode: Literal["offline", "online"], tags: Sequence[str]) -> int:
    """One wandb run per sweep, grouped by experiment; returns how many rows were new.

    The run's id is drawn once per folder and kept in ``wandb.json``, so that two sweeps of one second never share one,
    and a resumed sweep adds its new rows to the same run.
    """
    file = folder.path / STATE
    state: dict[str, Any] = folder.read_json(STATE) if file.is_file() else {"id": uuid.uuid4().hex, "copied": {}}
    sweep = folder.read_json("sweep.json")
    new = [r for r in folder.rows() if state["copied"].get(r["point_id"]) != r["status"]]
    run = wandb.init(
        project=project,
        mode=mode,
        id=state["id"],
        resume="allow" if state["copied"] and mode == "online" else None,
        group=sweep["name"],
        name=f"{sweep['name']}-{folder.path.name}",
        tags=[sweep["name"], *tags],
        dir=str(folder.path),
        config={k: sweep[k] for k in ("overrides", "commit", "launcher")},
    )
    run.define_metric("point")
    run.define_metric("*", step_metric="point")  # never wandb's own step, which drops rows that come out of order
    for row in new:
        run.log({"point": row["point"], **_numbers(row)})
    rows = folder.rows()
    names = sorted({name for row in rows for name in row if name != "traceback"})
    run.log({"rows": wandb.Table(columns=list(names), data=[[_cell(row.get(name)) for name in names] for row in rows])})
    _add_files(run, folder, sweep["name"])
    run.finish()
    state["copied"] |= {r["point_id"]: r["status"] for r in new}
    folder.write_json(STATE, state)
    return len(new)


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """A policy's metrics under its own name, so that curves of policies are told apart."""
    numbers = {k: v for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool) and k != "point"}
    return {f"{row['policy']}/{name}": value for name, value in numbers.items()}


def _cell(value: Any) -> str | None:
    """Columns of one type: wandb tables refuse mixed ones."""
    return None if value is None else str(value)


def _add_files(run: Any, folder: ResultFolder, name: str) -> None:
    artifact = wandb.Artifact(name, type="sweep")
    for pattern in ("*.jsonl", "*.parquet", "*.json", "*.png", "*.svg", "*.html"):
        for path in sorted(folder.path.glob(pattern)):
            if path.name != STATE:
                artifact.add_file(str(path))
    run.log_artifact(artifact)


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m experiments.wandb_sink", description=__doc__)
    p.add_argument("folder", type=Path)
    p.add_argument("--project", default="hybridattn")
    p.add_argument("--mode", default="offline", choices=("offline", "online"))
    p.add_argument("--tag", action="append", default=[], dest="tags")
    args = p.parse_args(argv)
    print(f"{copy(ResultFolder.open(args.folder), args.project, args.mode, args.tags)} rows copied")


if __name__ == "__main__":
    main()
