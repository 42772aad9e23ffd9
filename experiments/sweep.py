"""A sweep: compose and check every value, project the time, launch what is missing, watch the rows come in.

main process     check -> project -> launcher.launch(points) ------------------------> rows; callbacks.Results ends it
launcher         |point 0: row|point 1: row|point 2: failed, row| ...      (here, in processes, or in a cluster)
watcher thread        reads rows.jsonl, moves the progress bar
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.also import command_line, companions, left_out
from experiments.axes import Axes, expand, is_option
from experiments.begin import begin
from experiments.build import known_options
from experiments.composed import check, check_chosen, check_named, plain_values
from experiments.ended import say
from experiments.projection import duration, seconds_per_point, workers
from experiments.wording import key_of, sentence
from hybridattn.analysis.results import ResultFolder
from hybridattn.core.errors import InputError
from hybridattn.core.interrupts import interrupts_noted
from hybridattn.core.machine_load import others_now

WATCH_S = 0.2


class Sweep:
    """One sweep in one result folder."""

    def __init__(
        self,
        context: HydraContext,
        task: TaskFunction,
        config: DictConfig,
        params: Mapping[str, Any],
        max_batch_size: int | None,
    ) -> None:
        self.context = context
        self.task = task
        self.config = config
        self.params = params
        self.max_batch_size = max_batch_size

    def run(self, arguments: Sequence[str]) -> list[Any]:
        """Every point without a good row; what hydra's launcher returned."""
        config = self.config
        check_chosen(config)  # its settings alone need not fit: the axes say the rest
        check_named(config, arguments)
        axes = self._fitting(config, expand(self.params, arguments, config.repeats))
        composed = self._composed(config, axes)
        announced = self._announced()
        ids = [" ".join(point) for point in axes.points]
        folder = begin(config, ids, composed)
        say(*announced) if announced else None
        done = {r["point_id"] for r in folder.rows() if r.get("status") == "ok"}
        left = [point for point, key in zip(axes.points, ids, strict=True) if key not in done]
        self._project(folder, len(left), len(done))
        if left and config.device.name != "sim":
            say(f"before it, {others_now()}")
        if not left:
            return []
        with _progress(folder, str(config.name), len(ids), len(done)):
            return self._launch(folder, [[*axes.fixed, *point] for point in left])

    # -- before anything runs ----------------------------------------------------------------------------------------

    def _fitting(self, config: DictConfig, axes: Axes) -> Axes:
        """``axes`` with the options that some policies of the sweep have and others lack. Those of the experiment file
        are meant for its own policies: where the command line chose others, they go."""
        options, policies = [key for key in axes.values if is_option(key)], axes.values.get("policy", ())
        if not options:
            return axes
        one_by_one = {p: [*axes.fixed, p] for p in policies} or {"": list(axes.fixed)}
        known = {p: known_options(self._compose_point(config, words).policy) for p, words in one_by_one.items()}
        lack = {(p, key) for p in known for key in options if key_of(key).split(".")[2] not in known[p]}
        nobody = [key for key in options if all((p, key) in lack for p in known)]
        asked = [key for key in nobody if key not in self.params]
        if asked and policies:
            have = "; ".join(f"{p} has {', '.join(names) or 'none'}" for p, names in known.items())
            raise InputError(f"no policy of this sweep has what {key_of(asked[0])} says: {have}")
        values = {key: of for key, of in axes.values.items() if key not in nobody or key in asked}
        return replace(axes, values=values, foreign=frozenset(pair for pair in lack if pair[0]))

    def _composed(self, config: DictConfig, axes: Axes) -> dict[str, Any]:
        """Plain values of the points among which every value occurs, each composed and checked."""
        found = {}
        for own in axes.probes:
            point = self._compose_point(config, [*axes.fixed, *own])
            asked, used = (c.hydra.runtime.choices["hydra/launcher"] for c in (point, config))
            if asked != used:
                raise InputError(
                    f"{' '.join(own)} chooses the launcher {asked} inside a sweep that {used} launches: choose it with "
                    f"hydra/launcher={asked} on the command line"
                )
            check(point)
            found[" ".join(own)] = plain_values(point)
        return found

    def _compose_point(self, config: DictConfig, overrides: list[str]) -> DictConfig:
        try:
            return self.context.config_loader.load_sweep_config(config, overrides)
        except Exception as error:  # hydra and omegaconf answer some wrong kinds with Python's own errors
            where = "" if isinstance(error, HydraException) else f"{' '.join(overrides)} cannot be composed: "
            raise InputError(where + sentence(error)) from error

    def _announced(self) -> list[str]:
        """What will be run after this sweep, all of it composed and checked, or that it will not be."""
        parts = []
        for name in companions(self.config):
            other, points = self._companion(name)
            per_point, source = seconds_per_point(other)
            time = duration(points * per_point / workers(other))
            parts.append(f"{other.name} on {other.device.name}: {points} points, projected {time} ({source})")
        if not parts:
            return left_out(self.config)
        return [f"after {self.config.name} comes {'; '.join(parts)} (leave it out with also=[])"]

    def _companion(self, name: str) -> tuple[DictConfig, int]:
        """The master configuration of a companion, and how many points it has."""
        words = command_line(self.config, name)
        try:
            other = self.context.config_loader.load_configuration("config", words, run_mode=RunMode.RUN)
        except HydraException as error:
            raise InputError(sentence(error)) from error
        if name == self.config.name:
            raise InputError(f"experiment {name} names itself under also")
        axes = expand(other.hydra.sweeper.params or {}, list(other.hydra.overrides.task), other.repeats)
        self._composed(other, axes)
        return other, len(axes.points)

    def _project(self, folder: ResultFolder, left: int, done: int) -> None:
        per_point, source = seconds_per_point(self.config, folder)
        at_once = min(workers(self.config), max(1, left))
        skipped = f", {done} done before" if done else ""
        launcher = self.config.hydra.runtime.choices["hydra/launcher"]
        say(
            f"{self.config.name}: {left} points{skipped}, launcher {launcher} ({at_once} at a time), projected "
            f"{duration(left * per_point / at_once)} ({per_point:.2g} s a point, {source})"
        )

    # -- running -----------------------------------------------------------------------------------------------------

    def _launch(self, folder: ResultFolder, jobs: Sequence[list[str]]) -> list[Any]:
        """Jobs through the launcher; why it stopped early, if it did, goes to ``sweep.json``."""
        launcher = Plugins.instance().instantiate_launcher(self.context, self.task, self.config)
        document = {k: v for k, v in folder.read_json("sweep.json").items() if k != "stopped"}
        folder.write_json("sweep.json", document)
        returns: list[Any] = []
        size = self._batch(len(jobs))
        try:
            for at in range(0, len(jobs), size):
                returns += launcher.launch(jobs[at : at + size], initial_job_idx=at)
                failed = next((r for r in returns if r.status != JobStatus.COMPLETED), None)
                if failed is not None and self.config.fail_fast:
                    return returns
                if failed is not None:
                    _ = failed.return_value  # nothing but the app itself can fail here: let it be seen
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, InputError) and not interrupts_noted:
                raise
            with suppress(OSError):  # a full disk
                folder.write_json("sweep.json", {**document, "stopped": self._why_stopped(error)})
        return returns

    def _why_stopped(self, error: BaseException) -> str:
        """The rows that came are kept in any case."""
        if interrupts_noted or isinstance(error, KeyboardInterrupt):
            return "interrupted"
        if isinstance(error, OSError):
            return f"reading or writing failed: {error}"
        name = self.config.hydra.runtime.choices["hydra/launcher"]  # a worker was killed, a cluster went away
        return f"the launcher {name} failed ({type(error).__name__}: {error})"

    def _batch(self, jobs: int) -> int:
        """Jobs that the launcher gets at a time: with ``fail_fast`` as many as run at once. submitit's local executor
        would start all of them at once."""
        if self.max_batch_size:
            return self.max_batch_size
        name = self.config.hydra.runtime.choices["hydra/launcher"]
        return workers(self.config) if self.config.fail_fast or name == "submitit_local" else jobs


@contextmanager
def _progress(folder: ResultFolder, name: str, total: int, done: int) -> Iterator[None]:
    """A bar that follows the rows for the time of a with block."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console()) as progress:
        task = progress.add_task(name, total=total, completed=done)
        stop = threading.Event()

        def watch() -> None:
            tenths = 10 * done // max(1, total)
            while not stop.wait(WATCH_S):
                ran = len(folder.rows())
                progress.update(task, completed=ran)
                if (
                    not progress.console.is_terminal or progress.console.is_dumb_terminal
                ) and 10 * ran // total > tenths:  # a notebook, a log
                    tenths = 10 * ran // total
                    say(f"{name}: {ran} of {total} points")
            progress.update(task, completed=len(folder.rows()))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join()
