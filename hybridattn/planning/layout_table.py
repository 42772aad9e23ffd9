"""Answers about layouts that outlive a run: a table over coarse loads, one file for each profile and model.

    calibrate  --fill-->  layouts/<digest>.json  <--add, one by one--  the planner's process
                               |
                               '--read once--> the policy of each run, which then asks about new loads only

The digest is that of the profile, the model and the code that decides: what any other made is never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from hybridattn.core.folders import cache_dir
from hybridattn.cost.table import ExtrapolationWarning
from hybridattn.planning.messages import Setup, said_answer, said_question, told_answer, told_question
from hybridattn.planning.predict import predict_for
from hybridattn.policies.layouts import Layout
from hybridattn.policies.load import Limits, Load, Prediction
from hybridattn.policies.planning import LayoutQuestion

MOST_KEPT = 1024  # answers; the oldest go first
_DECIDES = ("policies", "planning", "executor", "cost", "devices")  # rooms whose code makes an answer
_ROWS, _CONTEXTS = (2, 4, 8, 1, 6, 12, 3, 16), (64, 512, 256, 1024, 128, 2048)  # the likely ones first


class LayoutTable:
    """The answers for one machine and model; ``known`` are those read from the file and those added.

    A file that cannot be read, or says that it is another's, is ignored with a warning and replaced by ``save``.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[LayoutQuestion, tuple[Layout, Prediction]] = self._read(True) if path is not None else {}

    def add(self, question: LayoutQuestion, layout: Layout, expected: Prediction) -> None:
        """Keep an answer, unless it depends on what a run learnt about its layouts."""
        if not question.discount:
            self.known[question] = layout, expected

    def save(self) -> None:
        """Write the file, with what other processes have added to it meanwhile; nothing where it cannot be written."""
        if self.path is None:
            return
        self.known = {**self._read(False), **self.known}
        latest = list(self.known.items())[-MOST_KEPT:]
        answers = [{**said_question(q), **said_answer(*answer)} for q, answer in latest]
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps({"of": self.path.stem, "answers": answers}))
            new.replace(self.path)
        except OSError:  # a cache that cannot be written is none
            with suppress(OSError):
                new.unlink()

    def _read(self, warn: bool) -> dict[LayoutQuestion, tuple[Layout, Prediction]]:
        assert self.path is not None
        try:
            said: Any = json.loads(self.path.read_text())
            if said["of"] != self.path.stem:
                raise ValueError(f"it is {said['of']!r}")
            return {told_question(a): told_answer(a) for a in said["answers"]}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            if warn:
                text = f"{self.path} is no table of layouts ({error}): it is ignored"
                warnings.warn(text, RuntimeWarning, stacklevel=4)
            return {}


def table_path(setup: Setup) -> Path | None:
    """The file for a profile and a model in the user's cache folder; None for a user who has none."""
    folder = cache_dir()
    digest = hashlib.sha256(_code() + setup.line()).hexdigest()[:16]
    return None if folder is None else folder / "layouts" / f"{digest}.json"


@cache
def _code() -> bytes:
    """Digest of the code that decides."""
    package, found = Path(__file__).parents[1], hashlib.sha256()
    for room in _DECIDES:
        for path in sorted((package / room).glob("*.py")):
            found.update(path.read_bytes())
    return found.digest()


def fill(table: LayoutTable, setup: Setup, seconds: float, say: Callable[[str], None]) -> None:
    """Ask about likely loads for at most about so many seconds, as ``adaptive`` and ``auto`` would, and save."""
    costs, predict = setup.costs(), predict_for(setup.profile)
    until = time.monotonic() + seconds
    asked = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtrapolationWarning)  # said where the answers are used
        for question in _likely():
            if time.monotonic() >= until:
                break
            if question not in table.known:
                table.add(question, *question.answer(costs, predict))
                asked += 1
    table.save()
    say(f"layouts of {asked} loads simulated, {len(table.known)} known")


def _likely() -> Iterator[LayoutQuestion]:
    """Coarse loads, the likely ones first."""
    rows = sorted(product(range(len(_ROWS)), range(len(_ROWS)), range(len(_CONTEXTS))), key=sum)
    for gpu, cpu, context in rows:
        for min_gain in (1.0, 1.02):  # the second costs no simulation: those of the first are remembered
            yield LayoutQuestion(Load(_ROWS[gpu], _ROWS[cpu], _CONTEXTS[context]), 1.0, Limits(), min_gain)
