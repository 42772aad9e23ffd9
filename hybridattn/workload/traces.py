"""Readers of public request traces: Azure, BurstGPT, ShareGPT, Mooncake.

| format   | time                                                | tokens |
|---|---|---|
| Azure    | timestamp of a day, up to 9 digits of a second      | ``ContextTokens``, ``GeneratedTokens`` |
| BurstGPT | seconds                                             | ``Request tokens``, ``Response tokens`` |
| Mooncake | milliseconds                                        | ``input_length``, ``output_length`` |
| ShareGPT | none: all at once, give arrivals of your own        | counted by a function of the caller's |

All move the first arrival to 0, restore the order of time (with a warning that says how many rows went backwards),
drop rows without output, which are failures in these traces (``keep_empty`` keeps them), and refuse a row that cannot
be read with file, line and value.
"""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hybridattn.core.errors import InputError
from hybridattn.workload.arrivals import Arrivals, ClosedLoop
from hybridattn.workload.item import WorkItem, Workload

Row = tuple[int, int, int]  # time [ns], prompt tokens, output tokens

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")


class TraceOrderWarning(UserWarning):
    """Rows of a trace go back in time."""


def read_azure(path: str | Path, *, keep_empty: bool = False) -> Workload:
    """An Azure LLM inference trace (CSV; Patel et al., Splitwise, ISCA 2024; CC-BY 4.0)."""
    path = Path(path)
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    rows = [
        (_stamp_ns(t, where), _count(p, columns[1], where), _count(o, columns[2], where))
        for where, (t, p, o) in _csv_rows(path, columns)
    ]
    return _workload(path, rows, keep_empty)


def read_burstgpt(path: str | Path, *, model: str | None = None, keep_empty: bool = False) -> Workload:
    """A BurstGPT trace (CSV), of all models or of one."""
    path = Path(path)
    columns = ("Timestamp", "Model", "Request tokens", "Response tokens")
    rows: list[Row] = []
    models: Counter[str] = Counter()
    for where, (t, name, p, o) in _csv_rows(path, columns):
        models[name] += 1
        if model is None or name == model:
            rows.append((_time_ns(t, 1_000_000_000, where), _count(p, columns[2], where), _count(o, columns[3], where)))
    if model is not None and model not in models:
        raise InputError(f"{path.name} has no rows of model '{model}'; it has {', '.join(models) or 'none'}")
    return _workload(path, rows, keep_empty)


def read_mooncake(path: str | Path, *, keep_empty: bool = False) -> Workload:
    """A Mooncake trace (JSON lines; Qin et al., FAST 2025)."""
    path = Path(path)
    rows: list[Row] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):  # not splitlines: U+2028 may stand in a string
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            data = json.loads(line)
            fields = data["timestamp"], data["input_length"], data["output_length"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(
                f"{where}: needs timestamp, input_length and output_length as JSON, got {line[:80]!r}"
            ) from error
        rows.append(
            (
                _time_ns(fields[0], 1_000_000, where),
                _count(fields[1], "input_length", where),
                _count(fields[2], "output_length", where),
            )
        )
    return _workload(path, rows, keep_empty)


def read_sharegpt(
    path: str | Path,
    count_tokens: Callable[[str], int],
    *,
    arrivals: Arrivals | None = None,
    seed: int = 0,
    keep_empty: bool = False,
) -> Workload:
    """The first question and answer of each ShareGPT conversation (JSON).

    Parameters
    ----------
    count_tokens : callable
        Tokens of a text: the dataset has no counts.
    arrivals : Arrivals, optional
        The dataset has no times; by default all come at once.
    """
    path = Path(path)
    try:
        data = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(data, list):
        raise InputError(f"{path.name}: a list of conversations is needed, got a {type(data).__name__}")
    pairs = [pair for i, c in enumerate(data) if (pair := _first_exchange(c, f"{path.name} conversation {i}"))]
    rows = [(0, count_tokens(question), count_tokens(answer)) for question, answer in pairs]
    found = _workload(path, rows, keep_empty, {"no question and answer": len(data) - len(pairs)})
    if arrivals is None:
        return found
    times = arrivals.draw(np.random.default_rng(seed), len(found)).tolist()
    items = tuple(WorkItem(t, i.prompt_tokens, i.output_tokens) for t, i in zip(times, found.items, strict=True))
    closed = arrivals if isinstance(arrivals, ClosedLoop) else None
    if closed:
        return Workload(found.name, items, closed.concurrency, closed.think_ns, found.dropped)
    return Workload(found.name, items, dropped=found.dropped)


def _first_exchange(conversation: Any, where: str) -> tuple[str, str] | None:
    """The first human message that is answered next; ``None`` when there is none."""
    try:
        messages = [(m["from"], m["value"]) for m in conversation["conversations"]]
    except (KeyError, TypeError) as error:
        raise InputError(f"{where}: needs 'conversations' with 'from' and 'value' each") from error
    for (asker, question), (answerer, answer) in zip(messages, messages[1:], strict=False):
        if asker in ("human", "user") and answerer in ("gpt", "assistant", "chatgpt"):
            return question, answer
    return None


def _workload(path: Path, rows: list[Row], keep_empty: bool, dropped: dict[str, int] | None = None) -> Workload:
    """Order, origin, and what is left out: the same for all formats."""
    dropped = {reason: n for reason, n in (dropped or {}).items() if n}
    for reason, bad in (("no prompt", lambda r: r[1] == 0), ("no output", lambda r: r[2] == 0 and not keep_empty)):
        kept = [r for r in rows if not bad(r)]
        if len(kept) < len(rows):
            dropped[reason] = len(rows) - len(kept)
        rows = kept
    if not rows:
        raise InputError(
            f"{path.name} holds no usable request" + "".join(f"; {n} with {r}" for r, n in dropped.items())
        )
    backward = sum(a[0] > b[0] for a, b in zip(rows, rows[1:], strict=False))
    if backward:
        warnings.warn(f"{path.name}: {backward} rows go back in time; sorted", TraceOrderWarning, stacklevel=3)
    rows.sort(key=lambda r: r[0])
    origin_ns = rows[0][0]
    return Workload(path.stem, tuple(WorkItem(t - origin_ns, p, o) for t, p, o in rows), dropped=dropped)


def _text(path: Path) -> str:
    if not path.is_file():
        raise InputError(f"trace file {path} does not exist")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"trace file {path} is not UTF-8 text: {error}") from error


def _csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    """Where, and the values of ``columns``, for each line that is not blank; other columns are ignored."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        yield from _chosen_columns(path, reader, columns)
    except csv.Error as error:
        raise InputError(f"{path.name} line {reader.line_num} is no CSV: {error}") from error


def _chosen_columns(path: Path, reader: Any, columns: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    header = [h.strip() for h in next(reader, [])]
    missing = [c for c in columns if c not in header]
    if missing:
        raise InputError(f"{path.name} lacks the column {', '.join(missing)}; its first line is {','.join(header)!r}")
    indices = [header.index(c) for c in columns]
    for row in reader:
        if not any(cell.strip() for cell in row):
            continue
        where = f"{path.name} line {reader.line_num}"
        if len(row) <= max(indices):
            raise InputError(f"{where}: {len(row)} columns, {max(indices) + 1} are needed: {','.join(row)!r}")
        yield where, [row[i].strip() for i in indices]


def _count(value: Any, name: str, where: str) -> int:
    try:
        number = float(value)
        if number != int(number) or number < 0 or isinstance(value, bool):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{where}: {name} is {value!r}, a count of tokens is needed") from None
    return int(number)


def _time_ns(value: Any, unit_ns: int, where: str) -> int:
    try:
        return round(float(value) * unit_ns)
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{where}: the time is {value!r}, a number is needed") from None


def _stamp_ns(value: str, where: str) -> int:
    """``2023-11-16 18:15:46.6805900`` in ns; ``datetime`` alone would cut the seventh digit."""
    match = _STAMP.fullmatch(value)
    try:
        if match is None:
            raise ValueError
        day, clock, fraction, zone = match.groups()
        moment = datetime.fromisoformat(f"{day}T{clock}{zone or '+00:00'}")
    except ValueError:
        raise InputError(
            f"{where}: the time is {value!r}, a stamp like 2023-11-16 18:15:46.6805900 is needed"
        ) from None
    seconds = moment.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return (seconds.days * 86_400 + seconds.seconds) * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
