"""Tables that verdicts print: rows of a sweep as Markdown, and such lines taken apart again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """Lines of a Markdown table. ``columns`` maps a title to a format of the row, as in ``{gain:.2f}``."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(text.format(**row) for text in columns.values()) + " |" for row in rows)]


def simulated(profile: str) -> dict[str, str]:
    """The columns that say where a simulated row comes from."""
    return {"kind": "simulated", "device": "sim", "profile": profile}


def share(some: Sequence[Any], of: Sequence[Any]) -> str:
    """``3 of 8 (38%)``."""
    return f"{len(some)} of {len(of)} ({len(some) / max(1, len(of)):.0%})"


def blocks(lines: Sequence[str]) -> list[tuple[bool, list[str]]]:
    """Lines of a verdict in runs of table lines (True) and other lines."""
    return [(is_table, list(run)) for is_table, run in itertools.groupby(lines, key=lambda line: line.startswith("|"))]


def cells(table: Sequence[str]) -> list[tuple[str, ...]]:
    """The cells of the lines of a Markdown table, its head first."""
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table]
    return [row for row in rows if any(cell.strip("-: ") for cell in row) or not all(row)]
