"""Trackers: a second sink, filled after the rows are safe, by a process of its own that cannot block or lose anything.

sweep  |point|point|point|rows, figures, summary|           exit
sink                                            |--wandb--| at most timeout_s, then it is ended
"""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
import signal
import subprocess
import sys
from typing import Any

from rich.console import Console

from experiments.ended import say
from hybridattn.analysis.results import ResultFolder
from hybridattn.core.errors import InputError

NAMES = ("none", "wandb")
MODES = ("offline", "online")
RUN_S = 2.0  # more time for each point, which is a run of its own


def check(tracker: Any) -> None:
    """Refuse a tracker that is not known, before anything runs."""
    if tracker.name not in NAMES or tracker.mode not in MODES:
        raise InputError(
            f"tracker '{tracker.name}' in mode '{tracker.mode}': trackers are {', '.join(NAMES)}, "
            f"modes {', '.join(MODES)}"
        )
    if not 0 < tracker.timeout_s < math.inf:
        raise InputError(f"tracker.timeout_s must be a positive number of seconds, got {tracker.timeout_s}")


def track(folder: ResultFolder, tracker: Any, console: Console) -> bool:
    """Give the folder to its tracker; whatever happens is a warning. True when the tracker has everything."""
    check(tracker)
    if tracker.name == "none":
        return True
    if importlib.util.find_spec("wandb") is None:
        _warn(console, folder, "wandb is not installed (pip install wandb)")
        return False
    argv = [sys.executable, "-m", "experiments.wandb_sink", str(folder.path), "--project", tracker.project,
            "--mode", tracker.mode, *(word for tag in tracker.tags for word in ("--tag", tag))]  # fmt: skip
    home = os.path.expanduser("~")
    process = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "HOME": str(folder.path) if home == "~" else home},  # wandb does not begin without one
    )  # fmt: skip
    limit_s = tracker.timeout_s + RUN_S * len(folder.rows())
    try:
        _, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _warn(console, folder, f"wandb did not end within {limit_s:g} s")
        return False
    finally:
        _end(process)
    if process.returncode:
        last = next((line for line in reversed(err.splitlines()) if line.strip()), "no message")
        _warn(console, folder, f"wandb ended with code {process.returncode}: {last.strip()}")
    elif tracker.mode == "offline":
        runs = shlex.quote(str(folder.path / "wandb")) + "/offline-run-*"
        say(f"wandb: a run per point in {runs}; send them with: wandb sync {runs}")
    return process.returncode == 0


def _end(process: subprocess.Popen[str]) -> None:
    """End what is left of the sink and of its own children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def _warn(console: Console, folder: ResultFolder, reason: str) -> None:
    again = f"python -m experiments.wandb_sink {folder.path}"
    console.print(f"warning: {reason}; all rows are in {folder.path}, try again with: {again}", highlight=False)
