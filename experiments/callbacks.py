"""What Hydra calls around the jobs of a run: the folder before them, what was found and the exit code after them."""

from __future__ import annotations

import sys
from typing import Any

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from experiments.also import follow_ups
from experiments.begin import begin, folder_of
from experiments.composed import check, check_chosen
from experiments.ended import INTERRUPTED, Ended, say
from experiments.findings import failure_lines
from experiments.finish import finish
from experiments.track import track
from hybridattn.analysis.results import ResultFolder
from hybridattn.core.errors import InputError
from hybridattn.core.interrupts import interrupts_noted
from hybridattn.core.machine_load import others_now

POINTS = "hydra_plugins.hybridattn_points.PointSweeper"  # the sweeper that knows all points before it runs one


class Results(Callback):
    """``hydra.callbacks.results`` of the root configuration. It ends a run by :class:`Ended`, with the exit code."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._begin(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if config.hydra.sweeper._target_ != POINTS:  # which begins once it has checked every value
            self._begin(config)

    def on_run_end(self, config: DictConfig, **kwargs: Any) -> None:
        self._end(config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        self._end(config)

    @staticmethod
    def _begin(config: DictConfig) -> None:
        try:
            check(config) if config.hydra.mode == RunMode.RUN else check_chosen(config)
            if config.resume:
                raise InputError("resume is for a sweep of hydra/sweeper=points, which knows its points beforehand")
            begin(config)
        except InputError as error:  # Hydra would turn it into a warning
            print(f"experiments.run: {error}", file=sys.stderr)
            raise Ended(2) from error

    @staticmethod
    def _end(config: DictConfig) -> None:
        folder, trouble = folder_of(config), ""
        try:
            finish(folder, config, Console())
        except InputError as error:
            trouble = str(error)
        except OSError as error:  # a full disk, most likely: the rows that were written stay
            trouble = f"what follows from the rows could not be written: {error}"
        except Exception as error:  # Hydra would make a warning of it
            trouble = f"what follows from the rows could not be made: {type(error).__name__}: {error}"
        track(folder, config.tracker, Console())
        code = report(folder, trouble)
        stops = code == INTERRUPTED or (code and config.fail_fast)
        raise Ended(code, folder.path, [] if stops else follow_ups(config, folder))


def report(folder: ResultFolder, trouble: str = "") -> int:
    """What failed, what is missing and where the results are; the exit code."""
    document = folder.read_json("sweep.json")
    rows = {r["point_id"]: r["status"] for r in folder.rows()}
    states = [rows.get(key) for key in document["points"] or rows]
    failed, missing, stopped = states.count("failed"), states.count(None), document.get("stopped", "")
    lines = failure_lines(folder.rows())
    if missing:
        lines.append(f"{stopped or 'stopped'}: {missing} points have not run; go on with resume=true")
    lines += [trouble] if trouble else []
    if any(r.get("kind") == "measured" for r in folder.rows()):
        lines.append(f"after it, {others_now()}")
    say(*lines, f"{states.count('ok')} points ran, {failed} failed; results: {folder.path}")
    code = 1 if failed or missing or trouble else 0
    return INTERRUPTED if stopped == "interrupted" or (code and interrupts_noted) else code
