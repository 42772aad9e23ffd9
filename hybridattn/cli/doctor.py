"""``hybridattn doctor``: print what this machine has and what would be used of it."""

from __future__ import annotations

import argparse
import importlib
import json
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the subcommand to an ``argparse`` subparsers object."""
    p = commands.add_parser("doctor", help="what this machine has and what would be used")
    p.add_argument("--json", action="store_true", help="as one JSON object")
    p.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """The command; 0 when it worked."""
    doctor = importlib.import_module("hybridattn.doctor")  # it loads torch, which others do without
    found = doctor.examine()
    print(json.dumps(found, indent=2) if args.json else doctor.as_text(found))
    return 0
