"""A result folder: ``<root>/<name>/<stamp>/`` with rows and a summary, never overwritten, and a ``latest`` link."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hybridattn.core.errors import InputError


class ResultFolder:
    """Files of one run. Rows are on disk as soon as they are added."""

    def __init__(self, root: Path, name: str) -> None:
        if not name or Path(name).name != name:
            raise InputError(f"name of an experiment must be a plain folder name, got '{name}'")
        self.path = _new_folder(root / name)
        self._rows = self.path / "rows.jsonl"
        self._rows.touch()
        _point_latest_at(self.path)

    def add_row(self, row: dict[str, Any]) -> None:
        """Append one row of plain values."""
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def write_json(self, name: str, document: Any) -> Path:
        path = self.path / name
        path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return path


def _new_folder(parent: Path) -> Path:
    """A folder named after the second, numbered when several runs start in the same one."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        folder = parent / (stamp if number == 0 else f"{stamp}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise InputError(f"1000 runs began within one second under {parent}")


def _point_latest_at(folder: Path) -> None:
    """Replace the link in one step, so that it always points somewhere."""
    link = folder.parent / "latest"
    temporary = folder.parent / f".latest-{folder.name}-{os.getpid()}"
    temporary.symlink_to(folder.name)
    os.replace(temporary, link)
