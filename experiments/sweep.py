"""A sweep: count the points, project the time, launch what is missing, watch the rows come in.

main process     count -> project -> launcher.launch(points) ------------------------> rows, figures, summary
launcher         |point 0: row|point 1: row|point 2: failed, row| ...      (here, in processes, or in a cluster)
watcher thread        reads rows.jsonl, moves the progress bar
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.compose import Composed, Composer
from experiments.point import Job
from experiments.projection import duration, seconds_per_point, workers
from experiments.results import ResultFolder
from hybridattn.core.errors import InputError
from hybridattn.core.provenance import git_commit

WATCH_S = 0.2
HERE = "basic"  # the launcher that runs points in this process


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many points have a good row, how many failed, and whether the sweep was cut short."""

    ok: int
    failed: int
    missing: int


class ComposedOnce:
    """Hydra's loader for a launcher of this process: a point that was composed to check it isn't composed again."""

    def __init__(self, loader: ConfigLoader, composed: Composed) -> None:
        self.loader, self.checked, self.own = loader, composed.checked, len(composed.points[0])

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """The configuration of a point; its own overrides are the last ones."""
        kept = self.checked.pop(tuple(sweep_overrides[len(sweep_overrides) - self.own :]), None)
        if kept is None:
            return self.loader.load_sweep_config(master_config, sweep_overrides)
        OmegaConf.copy_cache(from_config=master_config, to_config=kept)  # as hydra does: one time stamp for all points
        return kept


class Sweep:
    """One sweep in one result folder."""

    def __init__(self, composer: Composer, composed: Composed, console: Console, begun: Path | None = None) -> None:
        """``begun`` is a folder to go on with, whatever the configuration says of ``resume``."""
        self.composer = composer
        self.composed = composed
        self.console = console
        config = composed.master
        self.root = Path(config.results_root)
        self.name = str(config.name)
        self.ids = [" ".join(point) for point in composed.points]
        self.folder = self._folder(begun or config.resume)
        self.done = {r["point_id"] for r in self.folder.rows() if r.get("status") == "ok"}

    # -- the folder --------------------------------------------------------------------------------------------------

    def _folder(self, resume: Any) -> ResultFolder:
        fixed = [o for o in self.composed.fixed if not o.startswith(("resume=", "launcher=", "fail_fast=", "also="))]
        if resume:
            folder = ResultFolder.open(self.root / self.name / "latest" if resume is True else Path(str(resume)))
            before = folder.read_json("sweep.json")
            if (before["overrides"], before["points"]) != (fixed, self.ids):
                raise InputError(
                    f"{folder.path} holds another sweep: it was started with '{' '.join(before['overrides'])}' and has "
                    f"{len(before['points'])} points, this one has '{' '.join(fixed)}' and {len(self.ids)}"
                )
            folder.mend()
            return folder
        folder = ResultFolder(self.root, self.name)
        (folder.path / "points").mkdir()
        document = {"name": self.name, "overrides": fixed, "points": self.ids, "launcher": self.composed.launcher}
        folder.write_json("sweep.json", {**document, "command": list(self.composed.given), "commit": git_commit()})
        return folder

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Launch every point without a good row."""
        left = [point for point, key in zip(self.composed.points, self.ids, strict=True) if key not in self.done]
        self._announce(len(left))
        if left:
            self._launch(left)

    def outcome(self) -> Outcome:
        """What the rows say by now."""
        rows = {r["point_id"]: r["status"] for r in self.folder.rows()}
        states = [rows.get(key) for key in self.ids]
        return Outcome(states.count("ok"), states.count("failed"), states.count(None))

    def _announce(self, left: int) -> None:
        per_point, source = seconds_per_point(self.composed.master, self.folder)
        at_once = min(workers(self.composed), max(1, left))
        skipped = f", {len(self.done)} done before" if self.done else ""
        self.console.print(
            f"{self.name}: {left} points{skipped}, launcher {self.composed.launcher} ({at_once} at a time), projected "
            f"{duration(left * per_point / at_once)} ({per_point:.2g} s a point, {source})",
            highlight=False,
            soft_wrap=True,
        )

    def _launch(self, points: Sequence[tuple[str, ...]]) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(self.name, total=len(self.ids), completed=len(self.done))
            stop = threading.Event()
            watcher = threading.Thread(target=self._watch, args=(progress, task, stop), daemon=True)
            watcher.start()
            try:
                self._launch_batches(points)
            finally:
                stop.set()
                watcher.join()

    def _launch_batches(self, points: Sequence[tuple[str, ...]]) -> None:
        config, fail_fast = self.composed.master, bool(self.composed.master.fail_fast)
        assert self.composer.hydra is not None
        with open_dict(config):
            config.hydra.sweep.dir = str(self.folder.path / "points")
        numbers = {key: i for i, key in enumerate(self.ids)}
        own = len(self.composed.points[0])
        job = Job(str(self.folder.path.resolve()), self.composed.launcher, numbers, own, git_commit(), fail_fast)
        loader: Any = self.composer.hydra.config_loader
        if self.composed.launcher == HERE:
            loader = ComposedOnce(loader, self.composed)
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=job, config=config)
        size = workers(self.composed) if fail_fast else len(points)
        fixed = [o for o in self.composed.fixed if not o.lstrip("+~").startswith("hydra")]  # the master's hydra
        for at in range(0, len(points), size):
            batch = [[*fixed, *point] for point in points[at : at + size]]
            returns = launcher.launch(batch, initial_job_idx=at)
            failed = next((r for r in returns if r.status != JobStatus.COMPLETED), None)
            if failed is not None:
                if not fail_fast:
                    _ = failed.return_value  # nothing but the app itself can fail here: let it be seen
                return

    def _watch(self, progress: Progress, task: Any, stop: threading.Event) -> None:
        while not stop.wait(WATCH_S):
            progress.update(task, completed=len(self.folder.rows()))
        progress.update(task, completed=len(self.folder.rows()))
