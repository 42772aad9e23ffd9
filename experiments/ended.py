"""How a run of the app ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

INTERRUPTED = 130


class Ended(SystemExit):
    """Raised by the callback that ends a run: Hydra passes it on, as it does every ``SystemExit``.

    code : exit code of the run
    folder : its result folder
    then : command lines of the experiments to run after it
    """

    def __init__(self, code: int, folder: Path | None = None, then: Sequence[list[str]] = ()) -> None:
        super().__init__(code)
        self.code: int = code
        self.folder = folder
        self.then = list(then)


def say(*lines: str) -> None:
    """Print lines as they are, neither cut nor coloured."""
    Console().print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)
