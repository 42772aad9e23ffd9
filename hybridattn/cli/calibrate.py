"""``hybridattn calibrate``: measure this machine and write its profile; ``--check`` measures a few points again.

First, in at most 20 s, what suits the CPU kernels here (``python -m cpu_kernels.tune``): the profile is that of engines
with the page size found.

A real model runs real steps on the `host` device with chosen numbers of rows and keys: no prompts are read, the pages
hold zeros, which take as long to attend to as anything else. Every op says what work it was (the same works that the
simulator prices), so each becomes a sample of the profile's tables.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpu_kernels.tune import keep as keep_tuning
from hybridattn.calibration.bench import DTYPE, MODEL, Bench
from hybridattn.calibration.measure import calibrate, check
from hybridattn.core.errors import InputError
from hybridattn.core.folders import why_unwritable
from hybridattn.core.machine_load import OthersLoad, others_now, said
from hybridattn.cost.here import default_path
from hybridattn.cost.profile import load_profile, save_profile
from hybridattn.planning.layout_table import LayoutTable, fill, table_path
from hybridattn.planning.messages import Setup

FILL_S = 30.0  # for layouts of likely loads, which no run has to ask for then
TRUSTED = 0.15  # error of a profile from which on predictions by it are worth little


def add_parser(commands: Any) -> None:
    """Add the subcommand to an ``argparse`` subparsers object."""
    p = commands.add_parser("calibrate", help="measure this machine and write its profile", description=__doc__)
    p.add_argument("--check", action="store_true", help="measure a few points again; 1 above 15 %% of error")
    p.add_argument("--model", default=MODEL)
    p.add_argument("--dtype", default=DTYPE, help="fp32 or bf16 (default %(default)s)")
    p.add_argument("--profile", type=Path, help="file (default: this-machine.json in the user's cache folder)")
    p.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """The command; 0 when it worked."""
    started = time.perf_counter()
    path = args.profile or default_path()
    why = None if args.check else why_unwritable(path.parent)
    if why is not None:  # said before minutes of measuring
        raise InputError(f"the profile cannot be written: {why}; name another file with --profile")
    if not args.check:
        keep_tuning(report=_say)
    _say(f"before it, {others_now()}")
    load = OthersLoad()
    with Bench(args.model, args.dtype) as bench:
        if args.check:
            found = check(bench, load_profile(path), bench.device.profile)
        else:
            profile = calibrate(bench, _say)
        shape, dtype = bench.shape, bench.dtype
    _say(f"meanwhile, {said(load.share())}")
    if args.check:
        return _checked(found)
    save_profile(profile, path)
    setup = Setup(load_profile(path), shape, dtype)  # as those who plan by it will read it
    fill(LayoutTable(table_path(setup)), setup, FILL_S, _say)
    for key, error in profile.held_out_error.items():
        print(f"{key:34} held-out error {error:.0%}{_too_far(error)}")
    print(f"wrote {path} after {time.perf_counter() - started:.0f} s ({profile.fingerprint})")
    return 0


def _checked(found: Sequence[tuple[str, float, float]]) -> int:
    """Print measured against predicted; 1 where one of them is too far off."""
    worst = 0.0
    for name, measured, predicted in found:
        error = predicted / measured - 1
        worst = max(worst, abs(error))
        print(f"{name:60} measured {measured / 1e3:9.1f} us, profile {predicted / 1e3:9.1f} us ({error:+.0%})"
              f"{_too_far(error)}")  # fmt: skip
    if worst > TRUSTED:
        _say(f"the profile is off by up to {worst:.0%}: calibrate again on a machine at rest")
    return int(worst > TRUSTED)


def _too_far(error: float) -> str:
    return "" if abs(error) <= TRUSTED else f": above {TRUSTED:.0%}, do not trust what is planned with it"


def _say(text: str) -> None:
    print(f"calibrate: {text}", file=sys.stderr)
