"""The process that plans: reads questions from its input, writes answers to its output, ends with either.

Started by ``hybridattn.runtime.planner.Planner`` as a program of its own, so that nothing of the user's is imported
again, and torch never.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import warnings
from dataclasses import dataclass
from functools import partial

from hybridattn.core.shapes import ModelShape
from hybridattn.cost.costs import Costs
from hybridattn.cost.here import costs_here
from hybridattn.cost.machine import driver_of
from hybridattn.cost.profile import Profile, from_json
from hybridattn.cost.table import ExtrapolationWarning
from hybridattn.policies.adaptive import Predict
from hybridattn.runtime.predict import by_simulation, open_priced

NICENESS = 10  # it shares its core with those who serve


@dataclass(frozen=True, slots=True)
class Setup:
    """What all questions have in common; the profile as JSON."""

    profile: str
    shape: ModelShape
    dtype: str

    def costs(self) -> tuple[Costs, Profile]:
        profile = from_json(self.profile)
        return costs_here(profile, self.shape, self.dtype, self.dtype, profile.fingerprint), profile


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to a question that could not be answered."""

    reason: str


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that serves; it ends us
    os.nice(NICENESS)
    warnings.simplefilter("ignore", ExtrapolationWarning)  # said where the answers are used
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        costs, profile = pickle.load(questions).costs()
        predict: Predict = by_simulation(partial(open_priced, **driver_of(profile)))
        while True:
            question = pickle.load(questions)
            try:
                answer = question.answer(costs, predict)
            except Exception as error:  # the process that serves goes on without, and says why
                answer = Failed(f"{type(error).__name__}: {error}")
            pickle.dump(answer, answers)
            answers.flush()
    except (EOFError, BrokenPipeError):  # nobody asks any more
        return
