"""Published points, drawn beside ours and held against them. Each file names its source in its first lines."""

from __future__ import annotations

import csv
from pathlib import Path

from hybridattn.core.errors import InputError

FOLDER = Path(__file__).parent


def published_rows(name: str) -> list[dict[str, str]]:
    """Rows of ``name``.csv by its column names, none without a name; ``#`` begins a comment."""
    if not name:
        return []
    path = FOLDER / f"{name}.csv"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.csv")))
        raise InputError(f"published points '{name}' are unknown; known are {known or 'none'}")
    text = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return list(csv.DictReader(text))
