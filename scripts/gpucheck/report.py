"""What a part found so far, on disk at all times; and how long it may still take."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from hybridattn.core.provenance import git_commit


class Budget:
    """Seconds that are left to a part."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


class Report:
    """A JSON object that is rewritten, as a whole, with every entry. Two parts may share a file: each has a key."""

    def __init__(self, path: Path, part: str, dry_run: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.part = part
        self._found: dict[str, Any] = {"provenance": provenance(dry_run), "complete": False}

    def put(self, **entries: Any) -> None:
        self._found.update(entries)
        self._write()

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Append to the list ``name``, and say so."""
        self._found.setdefault(name, []).append(row)
        self._write()
        print(
            f"   {name}: "
            + ", ".join(f"{k} {_short(v)}" for k, v in row.items() if not isinstance(v, dict | list | tuple))
        )

    def done(self, ok: bool = True) -> int:
        """The part came to its end; returns the exit status."""
        self.put(complete=True, ok=ok)
        return 0 if ok else 1

    def _write(self) -> None:
        whole = json.loads(self.path.read_text()) if self.path.exists() else {}
        whole[f"part_{self.part}"] = self._found
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps(whole, indent=1))
        os.replace(beside, self.path)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def provenance(dry_run: bool) -> dict[str, Any]:
    """Where numbers come from; a dry run says so, its sizes mean nothing."""
    cuda = torch.cuda.is_available() and not dry_run
    return {
        "dry_run": dry_run,
        "device": "cuda" if cuda else "host",
        "kind": "measured",
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "commit": git_commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
