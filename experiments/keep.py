"""Keep what an experiment printed: ``python -m experiments.keep results/NAME/latest [docs/results]``.

Writes NAME.md: a head with the command, where the numbers come from and the commit, then the tables and verdicts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.tables import blocks
from hybridattn.analysis.results import ResultFolder
from hybridattn.analysis.sweep_results import ASKED
from hybridattn.core.errors import InputError

# Where and how it ran, which is nothing to repeat.
HERE = ("results_root=", "resume=", "hydra.", "hydra/", "launcher=", "paths=", "paths.")


def kept(folder: ResultFolder) -> tuple[str, str]:
    """``(name, text)`` of the page about the sweep in ``folder``."""
    rows = folder.rows()
    if not rows or not (folder.path / "sweep.json").is_file():
        raise InputError(f"{folder.path} holds no finished sweep: there is nothing to keep")
    sweep = folder.read_json("sweep.json")
    failed = sum(row["status"] != "ok" for row in rows)
    if failed or len(rows) < len(sweep["points"]):
        raise InputError(
            f"{folder.path} is incomplete: {len(rows)} of {len(sweep['points'])} points ran, {failed} of them failed"
        )
    command = " ".join(f"'{o}'" if any(c in o for c in " {}[]") else o for o in sweep["command"] if not _local(o))
    facts = [
        f"    python -m experiments.run {command}",
        f"{_all(rows, 'kind')} on `{_all(rows, 'device')}`, {len(rows)} points, commit {_all(rows, 'commit')}. "
        f"Profile: {_profiles(rows)}.",
    ]
    return sweep["name"], "\n\n".join(
        [f"# {folder.json(ASKED, {}).get('title') or sweep['name']}", *facts, *_blocks(_found(folder))]
    ) + "\n"


def _local(override: str) -> bool:
    return override.lstrip("+").startswith(HERE)


def _found(folder: ResultFolder) -> list[str]:
    """The experiment's own verdict, or the crossovers where it has none."""
    if verdict := folder.read_json("verdict.json"):
        return list(verdict)
    found = folder.json("crossovers.json", {})
    lines = [f"{f'{panel}: ' if panel else ''}{n}: {c['says']}" for panel, of in found.items() for n, c in of.items()]
    if not lines:
        raise InputError(f"{folder.path} has neither a verdict nor a crossover to keep")
    return lines


def _blocks(lines: Sequence[str]) -> list[str]:
    """Markdown tables as they are, other lines as code blocks."""
    texts = (("\n".join(block) if table else "\n".join(block).strip("\n"), table) for table, block in blocks(lines))
    return [text if is_table else f"```\n{text}\n```" for text, is_table in texts if text]


def _all(rows: Sequence[dict[str, Any]], name: str) -> str:
    return ", ".join(dict.fromkeys(str(row[name]) for row in rows))


def _profiles(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(str(row["profile"]) for row in rows))
    if len(names) <= 4:
        return ", ".join(names)
    machines = ", ".join(dict.fromkeys(name.partition("@")[0] for name in names))
    return f"{len(names)}, of {machines}" if len(machines) < 400 else f"{len(names)} different ones"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m experiments.keep", description=__doc__)
    p.add_argument("folder", type=Path, help="results/NAME/latest or another folder of a sweep")
    p.add_argument("into", type=Path, nargs="?", default=Path("docs/results"))
    args = p.parse_args(argv)
    try:
        name, text = kept(ResultFolder.open(args.folder))
    except InputError as error:
        print(f"experiments.keep: {error}", file=sys.stderr)
        return 2
    args.into.mkdir(parents=True, exist_ok=True)
    file = args.into / f"{name}.md"
    file.write_text(text, encoding="utf-8")
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
