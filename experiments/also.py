"""Experiments that an experiment names beside its own: the same question answered on another device.

    +experiment=ratio      |ratio: simulated points| figures, what was found |
    also: [ratio_host]                                                       |ratio_host: measured points| ...

Each is a run of the app of its own, with its own rows, figures, summary and folder, so simulated and measured numbers
never meet in one table or figure. The companion is run as it stands in its file, without those that it names itself. Of
the command line it takes what says where and how to run, nothing that says what to sweep; when the command line says
that of the first sweep, somebody explores, and the companion is left out unless ``also=[...]`` asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from experiments.wording import among, key_of, literal
from hybridattn.analysis.results import ResultFolder

FILE = "also.json"  # name of a companion -> its folder, relative to that of the first sweep
SHARED = ("results_root", "paths", "tracker", "fail_fast", "debug", "local", "hydra.searchpath")
OWN = ("experiment", "resume", "also", "hydra/launcher", "hydra/sweeper", "hydra")  # of the first sweep alone


def companions(config: DictConfig) -> list[str]:
    """Names of the experiments to run after this one."""
    return [] if exploring(config) and not _asked_for(config) else list(dict.fromkeys(config.also))


def command_line(config: DictConfig, name: str) -> list[str]:
    """What the experiment ``name`` takes from the command line of this one."""
    return [f"+experiment={name}", *(o for o in _given(config) if among(o, SHARED)), "also=[]"]


def follow_ups(config: DictConfig, first: ResultFolder) -> list[list[str]]:
    """Command lines of the experiments to run now; one that an earlier call began for this very sweep is resumed."""
    begun = folders(first)
    found = []
    for name in companions(config):
        words = [*command_line(config, name), literal("beside", str(first.path))]
        found.append([*words, literal("resume", str(begun[name]))] if name in begun else words)
    return found


def left_out(config: DictConfig) -> list[str]:
    """That the companions will not be run, and how to change that."""
    if companions(config) or not config.also:
        return []
    names = list(config.also)
    return [f"{', '.join(names)}: left out, as the command line says what to sweep ({exploring(config)[0]}); add "
            f"also=[{','.join(names)}] to run it as well"]  # fmt: skip


def exploring(config: DictConfig) -> list[str]:
    """What the command line says of what is swept."""
    return [o for o in config.hydra.overrides.task if not among(o, SHARED + OWN)]


def _asked_for(config: DictConfig) -> bool:
    return any(key_of(o) == "also" for o in config.hydra.overrides.task)


def _given(config: DictConfig) -> list[str]:
    return [*config.hydra.overrides.task, *config.hydra.overrides.hydra]


def folders(first: ResultFolder) -> dict[str, Path]:
    """Folders of the companions of a sweep, by name."""
    return {name: (first.path / where).resolve() for name, where in first.json(FILE, {}).items()}


def remember(first: ResultFolder, other: ResultFolder, name: str) -> None:
    """Note the companion's folder, for ``resume`` and for the report."""
    first.write_json(FILE, {**first.json(FILE, {}), name: f"../../{name}/{other.path.name}"})


def closing(paths: Sequence[Path]) -> list[str]:
    """Where everything is."""
    lines = [f"{path.parent.name} ({_kinds(ResultFolder.open(path))}): {path}" for path in paths]
    return [*lines, f"one page of all: python -m experiments.report {paths[0]}"]


def _kinds(folder: ResultFolder) -> str:
    kinds = dict.fromkeys(str(r["kind"]) for r in folder.rows() if r["status"] == "ok")
    return ", ".join(kinds) or "no point ran"
