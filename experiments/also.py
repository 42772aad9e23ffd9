"""Sweeps that an experiment names beside its own: the same question answered on another device.

    +experiment=ratio      |ratio: simulated points| figures, what was found |
    also: [ratio_host]                                                       |ratio_host: measured points| ...

Each has its own rows, figures, summary and folder, so simulated and measured numbers never meet in one table or figure.
The companion is run as it stands in its file, without those that it names itself. Of the command line it takes what
says where and how to run, nothing that says what to sweep; when the command line says that of the first sweep, somebody
explores, and the companion is left out unless ``also=[...]`` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig

from experiments.compose import Composed, Composer
from experiments.projection import duration, seconds_per_point, workers
from experiments.results import ResultFolder
from experiments.sweep import Sweep
from hybridattn.core.errors import InputError

FILE = "also.json"  # name of a companion -> its folder, relative to that of the first sweep
SHARED = ("results_root", "paths", "tracker", "fail_fast", "debug", "local", "hydra.searchpath")
OWN = ("experiment", "resume", "also", "launcher", "hydra/launcher", "hydra.launcher")  # of the first sweep alone


def companions(composer: Composer, first: Composed, check: Callable[[DictConfig], None]) -> list[Composed]:
    """The sweeps to run after ``first``, composed and checked before anything runs."""
    names = list(dict.fromkeys(first.master.also))
    if not names or (exploring(first) and not _asked_for(first)):
        return []
    shared = [o for o in first.fixed if _among(o, SHARED)]
    found = [composer.sweep([f"+experiment={name}", *shared], check) for name in names]
    for name, other in zip(names, found, strict=True):
        if name == first.master.name:
            raise InputError(f"experiment {name} names itself under also")
        if other.master.runner or not other.master.point:
            raise InputError(f"experiment {first.master.name} names {name} under also, which is not a sweep")
    return found


def exploring(first: Composed) -> list[str]:
    """What the command line says of what is swept."""
    return [o for o in first.given if not _among(o, SHARED + OWN)]


def _asked_for(first: Composed) -> bool:
    return any(_key(o) == "also" for o in first.given)


def _key(override: str) -> str:
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]


def _among(override: str, keys: Sequence[str]) -> bool:
    return any(_key(override) == key or _key(override).startswith(f"{key}.") for key in keys)


def announced(first: Composed, others: Sequence[Composed]) -> list[str]:
    """What will be run after the first sweep, or that it will not be, and how to change that."""
    left_out = list(first.master.also) if not others else []
    if left_out:
        names = ", ".join(left_out)
        return [f"{names}: left out, as the command line says what to sweep ({exploring(first)[0]}); add "
                f"also=[{','.join(left_out)}] to run it as well"]  # fmt: skip
    parts = []
    for other in others:
        per_point, source = seconds_per_point(other.master)
        seconds = len(other.points) * per_point / workers(other)
        device = other.master.device.name
        parts.append(f"{other.master.name} on {device}: {len(other.points)} points, projected {duration(seconds)} "
                     f"({source})")  # fmt: skip
    return [f"after {first.master.name} comes {'; '.join(parts)} (leave it out with also=[])"] if parts else []


def begun_before(first: ResultFolder, other: Composed) -> Path | None:
    """The folder in which an earlier call began the companion of this very first sweep, if one did."""
    return folders(first).get(str(other.master.name))


def folders(first: ResultFolder) -> dict[str, Path]:
    """Folders of the companions of a sweep, by name."""
    if not (first.path / FILE).is_file():
        return {}
    return {name: (first.path / where).resolve() for name, where in first.read_json(FILE).items()}


def remember(first: ResultFolder, other: ResultFolder, name: str) -> None:
    """Note the companion's folder, for ``resume`` and for the report."""
    known = first.read_json(FILE) if (first.path / FILE).is_file() else {}
    first.write_json(FILE, {**known, name: f"../../{name}/{other.path.name}"})


def closing(sweeps: Sequence[Sweep]) -> list[str]:
    """Where everything is."""
    lines = [f"{s.name} ({_kinds(s)}): {s.folder.path}" for s in sweeps]
    return [*lines, f"one page of all: python -m experiments.report {sweeps[0].folder.path}"]


def _kinds(sweep: Sweep) -> str:
    kinds = dict.fromkeys(str(r["kind"]) for r in sweep.folder.rows() if r["status"] == "ok")
    return ", ".join(kinds) or "no point ran"
