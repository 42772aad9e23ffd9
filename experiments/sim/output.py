"""What the simulated experiments share: rows into a result folder, a table and a verdict on the screen."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.results import ResultFolder
from hybridattn.core.provenance import git_commit


def parser(module: str, text: str) -> argparse.ArgumentParser:
    """The arguments that all have."""
    p = argparse.ArgumentParser(prog=f"python -m experiments.sim.{module}", description=text)
    p.add_argument("--results", type=Path, default=Path("results"), help="where the result folder goes")
    return p


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A Markdown table: ``columns`` maps a title to a format of the row, as in ``{gain:.2f}``."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(text.format(**row) for text in columns.values()) + " |")
    return "\n".join(lines)


def publish(
    name: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], verdict: Sequence[str], root: Path
) -> None:
    """Write the rows, print the table and what follows from it."""
    folder = ResultFolder(root, f"sim_{name}")
    commit = git_commit()
    for row in rows:
        folder.add_row({"experiment": f"sim_{name}", "device": "sim", "kind": "simulated", "commit": commit, **row})
    print(markdown(rows, columns))
    print("\n".join(verdict))
    print(f"results: {folder.path}")
