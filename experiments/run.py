"""The one app: ``python -m experiments.run +experiment=NAME [key=value ...] [key=a,b,c ...]``.

A value with commas is swept. At the end it prints what was found. Exit codes: 0 all points ran, 1 some failed, 2 what
was asked for is not possible, 130 interrupted. ``resume=true`` goes on with the latest sweep of the experiment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.also import announced, begun_before, closing, companions, remember
from experiments.compose import Composed, Composer, configs
from experiments.findings import failure_lines, verdict_of
from experiments.finish import finish
from experiments.results import ResultFolder
from experiments.settings import find
from experiments.sweep import Outcome, Sweep
from experiments.track import check as check_tracker
from experiments.track import track
from hybridattn.core.errors import HybridAttnError, InputError

INTERRUPTED = "interrupted"
CODE_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="experiments.run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("overrides", nargs="*", help="+experiment=NAME and hydra overrides")
    p.add_argument("-m", "--multirun", action="store_true", help="accepted; a value with commas is swept in any case")
    p.add_argument("-c", "--cfg", action="store_true", help="print the composed configuration and end")
    args = p.parse_args(argv)
    try:
        with configs() as composer:
            composed = composer.sweep(args.overrides, _check)
            if args.cfg:
                print(OmegaConf.to_yaml(OmegaConf.masked_copy(composed.master, _own_keys(composed.master))), end="")
                return 0
            if not composed.master.name:
                raise InputError("no experiment was chosen: add +experiment=NAME, for example +experiment=demo")
            if composed.master.runner:
                return _run_whole(composed)
            return _run_sweeps(composer, composed, Console())
    except InputError as error:
        print(f"experiments.run: {error}", file=sys.stderr)
        return 2
    except HybridAttnError as error:
        print(f"experiments.run: {error}", file=sys.stderr)
        return 1


def _own_keys(config: DictConfig) -> list[str]:
    return [str(key) for key in config if key != "hydra"]


def _check(config: DictConfig) -> None:
    """The settings of a composed point fit the schema of what runs them, and its tracker is known."""
    check_tracker(config.tracker)
    for what in ("runner", "point"):
        if config[what]:
            find(config[what], what).settings(config.settings)
    if config.point:
        verdict_of(config)


def _run_whole(composed: Composed) -> int:
    """An experiment that is not a sweep."""
    config = composed.master
    if len(composed.points) > 1:
        raise InputError(f"{config.name} is no sweep: it takes one value per key")
    runner = find(config.runner, "runner")
    runner(runner.settings(config.settings), ResultFolder(Path(config.results_root), config.name))
    return 0


def _run_sweeps(composer: Composer, composed: Composed, console: Console) -> int:
    """The sweep, and those that its experiment names beside it. The worst exit code counts."""
    name = composed.master.name
    if not composed.master.point:
        raise InputError(f"experiment {name} says neither which runner nor which point to run")
    others = companions(composer, composed, _check)
    for line in announced(composed, others):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    first = Sweep(composer, composed, console)
    code, done = _run_sweep(first), [first]
    for other in others:
        if code == CODE_INTERRUPTED or (code and composed.master.fail_fast):
            break
        console.print()
        sweep = Sweep(composer, other, console, begun_before(first.folder, other))
        remember(first.folder, sweep.folder, sweep.name)
        code = max(code, _run_sweep(sweep))
        done.append(sweep)
    if others:
        console.print("\n".join(("", *closing(done))), highlight=False, soft_wrap=True, markup=False)
    return code


def _run_sweep(sweep: Sweep) -> int:
    stopped = ""
    try:
        sweep.run()
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    except InputError:
        raise
    except Exception as error:  # a worker process was killed, a cluster went away: the rows that came are kept
        stopped = f"the launcher {sweep.composed.launcher} failed ({type(error).__name__}: {error})"
    outcome, trouble = sweep.outcome(), ""
    try:
        finish(sweep.folder, sweep.composed.master, sweep.console)
    except InputError as error:
        trouble = str(error)
    track(sweep.folder, sweep.composed.master.tracker, sweep.console)
    return _report(sweep, outcome, stopped, trouble)


def _report(sweep: Sweep, outcome: Outcome, stopped: str, trouble: str) -> int:
    """What failed, what is missing and where the results are; the exit code of the sweep."""
    lines = failure_lines(sweep.folder.rows())
    if outcome.missing:
        lines.append(f"{stopped or 'stopped'}: {outcome.missing} points have not run; go on with resume=true")
    lines += [trouble] if trouble else []
    lines.append(f"{outcome.ok} points ran, {outcome.failed} failed; results: {sweep.folder.path}")
    sweep.console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)
    if stopped == INTERRUPTED:
        return CODE_INTERRUPTED
    return 1 if outcome.failed or outcome.missing or trouble else 0


if __name__ == "__main__":
    sys.exit(main())
