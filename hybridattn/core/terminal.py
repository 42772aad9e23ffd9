"""Output that never ends in an error because of the terminal's encoding, and warnings as sentences."""

from __future__ import annotations

import codecs
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


def escape_unprintable() -> None:
    r"""From here on, what the encoding of stdout or stderr cannot print appears as ``\u4e2d``."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def as_text(word: str) -> str:
    """An argument of the command line whose bytes the locale could not read, read as UTF-8 if they are that."""
    try:
        return os.fsencode(word).decode()
    except UnicodeError:
        return word


def is_unicode(stream: TextIO | None) -> bool:
    """Whether every character can be printed there as itself."""
    encoding = getattr(stream, "encoding", None)
    return encoding is None or codecs.lookup(encoding).name.startswith("utf")


class CountLine:
    """One line on ``stream`` (the error stream) that counts on in place, in a terminal and under a notebook's cell."""

    EVERY_S = 0.2

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._next = 0.0

    def show(self, text: str, last: bool = False) -> None:
        """Replace the line, at most five times a second; ``last`` ends it."""
        now = time.monotonic()
        if last or now >= self._next:
            self._next = now + self.EVERY_S
            print(f"\r{text}", end="\n" if last else "", file=self._stream, flush=True)


@contextmanager
def warnings_as_sentences(name: str) -> Iterator[None]:
    """Within the block a warning for the user is one line, ``name: sentence``, without file and source line."""
    before = warnings.formatwarning

    def line(message: Any, category: type[Warning], *rest: Any, **named: Any) -> str:
        return (
            f"{name}: {message}\n" if issubclass(category, UserWarning) else before(message, category, *rest, **named)
        )

    warnings.formatwarning = line
    try:
        yield
    finally:
        warnings.formatwarning = before
