"""Where a run writes: a new result folder at ``hydra.sweep.dir`` (``hydra.run.dir``), or the one that is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from experiments.also import remember
from experiments.composed import difference
from experiments.published import published_rows
from experiments.wording import among, literal
from hybridattn.analysis.results import ResultFolder, check_name
from hybridattn.analysis.series import Question
from hybridattn.analysis.sweep_results import ASKED
from hybridattn.core.errors import InputError
from hybridattn.core.provenance import git_commit


def begin(config: DictConfig, points: Sequence[str] = (), composed: Mapping[str, Any] | None = None) -> ResultFolder:
    """The folder, with ``sweep.json`` in it; hydra's own configuration says from now on where it is.

    points : ids of all points, where the sweeper knows them
    composed : plain values of the points that were composed to check them, by id
    """
    config_name = check_name(str(config.name))
    if config.resume:
        latest = _wanted(config).parent / "latest" if config.resume is True else Path(str(config.resume))
        folder = ResultFolder.open(latest)
        _same_sweep(folder, points, composed or {})
        folder.mend()
    else:
        folder = ResultFolder.new(_wanted(config))
        (folder.path / "points").mkdir()
        if composed is not None:
            folder.write_json("composed.json", composed)
        task = list(config.hydra.overrides.task)
        document = {"name": config_name, "overrides": task, "points": list(points)}
        chosen = {"launcher": config.hydra.runtime.choices["hydra/launcher"], "command": _command(config)}
        folder.write_json("sweep.json", {**document, **chosen, "commit": git_commit(), "began": _now()})
    asked, analysis = [asdict(question) for question in questions_of(config.analysis)], config.analysis
    beside = {"theory": analysis.theory, "published": published_rows(analysis.published)}
    folder.write_json(ASKED, {"title": config.title, "question": config.question, "asked": asked, **beside})
    if config.beside:
        remember(ResultFolder.open(Path(config.beside)), folder, config_name)
    _write_there(config, folder.path)
    return folder


def questions_of(analysis: Any) -> list[Question]:
    """The question of an experiment and those of ``more``, which have the same x, panels and series; empty when it
    asks none."""
    if not analysis.x:
        return []
    names = [f.name for f in fields(Question) if f.name != "panels"]
    first = Question(panels=tuple(analysis.panels), **{n: analysis[n] for n in names})
    names = ["y", "y_label", "relative", "log_y", "lower_is_better"]
    return [first, *(replace(first, candidate="", **{n: more[n] for n in names}) for more in analysis.more)]


def folder_of(config: DictConfig) -> ResultFolder:
    """The folder of a run that has begun."""
    return ResultFolder.open(_wanted(config))


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _key(config: DictConfig) -> str:
    return "hydra.sweep.dir" if config.hydra.mode == RunMode.MULTIRUN else "hydra.run.dir"


def _wanted(config: DictConfig) -> Path:
    return Path(str(OmegaConf.select(config, _key(config))))


def _write_there(config: DictConfig, path: Path) -> None:
    """Hydra makes the configuration of each job from these overrides, wherever a launcher runs it."""
    with read_write(config.hydra), open_dict(config.hydra):
        OmegaConf.update(config, _key(config), str(path))
        config.hydra.overrides.hydra.append(literal(_key(config), str(path)))


def _command(config: DictConfig) -> list[str]:
    """What to type to have this sweep again, in a folder of its own."""
    given = [*config.hydra.overrides.task, *config.hydra.overrides.hydra]
    mode = ["-m"] if "hydra.mode=MULTIRUN" in given else []
    left_out = ("resume", "beside", "hydra.mode", "hydra.sweep.dir", "hydra.run.dir")
    return [*mode, *(o for o in given if not among(o, left_out))]


def _same_sweep(folder: ResultFolder, points: Sequence[str], composed: Mapping[str, Any]) -> None:
    """InputError where the folder holds rows of other points, or of the same ones with other values."""
    if not (folder.path / "composed.json").is_file():
        raise InputError(f"{folder.path} holds no sweep that can be resumed (it has no composed.json)")
    before = folder.read_json("sweep.json")
    if before["points"] != list(points):
        raise InputError(
            f"{folder.path} holds another sweep: it was started with '{' '.join(before['overrides'])}' and has "
            f"{len(before['points'])} points, this one has {len(points)}"
        )
    for point, values in folder.read_json("composed.json").items():
        if changed := difference(values, composed.get(point, {})):
            raise InputError(f"{folder.path} holds another sweep: {changed} (at {point or 'its only point'})")
