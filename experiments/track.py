"""Trackers: a second sink beside the result folder."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from experiments.results import ResultFolder


def track(folder: ResultFolder, tracker: Any, console: Console) -> None:
    pass
