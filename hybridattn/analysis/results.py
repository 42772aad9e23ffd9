"""A result folder: ``<root>/<name>/<stamp>/`` with rows and a summary, never overwritten, and a ``latest`` link."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from hybridattn.core.errors import InputError


class ResultFolder:
    """Files of one run. Rows are on disk as soon as they are added, also from several processes at once."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    @classmethod
    def new(cls, path: Path) -> ResultFolder:
        """A new folder at ``path``, numbered where there is one already."""
        folder = cls(_new_folder(path))
        folder.rows_file.touch()
        _point_latest_at(folder.path)
        return folder

    @classmethod
    def open(cls, path: Path) -> ResultFolder:
        """An existing folder, to add what is missing."""
        if not (path / "rows.jsonl").is_file():
            raise InputError(f"{path} is no result folder: it has no rows.jsonl")
        return cls(path)

    @property
    def rows_file(self) -> Path:
        return self.path / "rows.jsonl"

    def add_row(self, row: dict[str, Any]) -> None:
        """Append one row of plain values, as a single write: rows of other processes never mix with it."""
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        file = os.open(self.rows_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(file, line)
        finally:
            os.close(file)
        if written < len(line):  # as a full disk does; the reader leaves the cut line out
            raise OSError(f"only {written} of {len(line)} bytes of a row could be written to {self.rows_file}")

    def rows(self) -> list[dict[str, Any]]:
        """All rows, the last one of each ``point_id``; a line cut off by a kill is left out."""
        found: dict[Any, dict[str, Any]] = {}
        for number, line in enumerate(self.rows_file.read_text(encoding="utf-8").splitlines()):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[row.get("point_id", number)] = row
        return list(found.values())

    def mend(self) -> None:
        """End a line that a kill has cut off, so that the next row gets a line of its own."""
        text = self.rows_file.read_bytes()
        if text and not text.endswith(b"\n"):
            with self.rows_file.open("ab") as file:
                file.write(b"\n")

    def write_json(self, name: str, document: Any) -> Path:
        path = self.path / name
        path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return path

    def read_json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    def json(self, name: str, otherwise: Any) -> Any:
        """What is in ``name``, or ``otherwise`` where there is no such file."""
        return self.read_json(name) if (self.path / name).is_file() else otherwise


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """``row`` with NaN and infinities as None; ``not_finite`` names them, where there are any."""
    bad = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    return {**row, **dict.fromkeys(bad), "not_finite": ",".join(bad)} if bad else row


def check_name(name: str) -> str:
    """The name of an experiment, which is that of a folder."""
    if not name or Path(name).name != name or name == "..":
        raise InputError(f"name of an experiment must be a plain folder name, got '{name}'")
    return name


def _new_folder(path: Path) -> Path:
    """``path``, named after the second, and numbered when several runs start in the same one."""
    for number in range(1000):
        folder = path if number == 0 else path.with_name(f"{path.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"results cannot be written to {folder}: {error.strerror}") from error
        return folder
    raise InputError(f"1000 runs began within one second under {path.parent}")


def _point_latest_at(folder: Path) -> None:
    """Replace the link in one step, so that it always points somewhere."""
    link = folder.parent / "latest"
    temporary = folder.parent / f".latest-{folder.name}-{os.getpid()}"
    temporary.symlink_to(folder.name)
    os.replace(temporary, link)
