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
    """A wandb run per point, grouped by sweep, and one for the table and the files; returns how many points were new.

    Ids of runs begin with a text drawn once per folder and kept in ``wandb.json``, so that two sweeps of one second
    never share one, and a point that ran again replaces its run.
    """
    state: dict[str, Any] = folder.json(STATE, {"id": uuid.uuid4().hex, "copied": {}})
    sweep = folder.read_json("sweep.json")
    group = f"{sweep['name']}-{folder.path.name}"
    about = {k: sweep[k] for k in ("overrides", "commit", "launcher")}
    new = [r for r in folder.rows() if state["copied"].get(r["point_id"]) != r["status"]]

    def begin(name: str, config: dict[str, Any], suffix: str) -> Any:
        return wandb.init(
            project=project, mode=mode, id=f"{state['id']}-{suffix}", group=group, job_type=sweep["name"], name=name,
            resume="allow" if mode == "online" else None, tags=[sweep["name"], *tags], dir=str(folder.path),
            config=config, settings={"silent": True, "x_disable_stats": True, "console": "off"},
        )  # fmt: skip

    for row in new:
        run = begin(
            str(row["point_id"]), about | {k: v for k, v in row.items() if not _is_number(v)}, str(row["point"])
        )
        run.log({k: v for k, v in row.items() if _is_number(v)})
        run.finish()
        state["copied"][row["point_id"]] = row["status"]
        folder.write_json(STATE, state)
    run = begin(group, about, "all")
    rows = folder.rows()
    names = sorted({name for row in rows for name in row if name != "traceback"})
    columns = [_column([row.get(name) for row in rows]) for name in names]
    run.log({"rows": wandb.Table(columns=list(names), data=list(map(list, zip(*columns, strict=True))))})
    _add_files(run, folder, sweep["name"])
    run.finish()
    return len(new)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _column(values: Sequence[Any]) -> list[Any]:
    """A column of one type, which is what wandb's tables take: numbers as they are, all others as text."""
    numbers = all(value is None or _is_number(value) for value in values)
    return [None if value is None else float(value) if numbers else str(value) for value in values]


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
