"""The process that plans: reads questions from its input, writes answers to its output, ends with either.

Started by ``hybridattn.planning.planner.Planner`` as a program of its own, so that nothing of the user's is imported
again, and torch never.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path

from hybridattn.planning.layout_table import LayoutTable
from hybridattn.planning.messages import Failed, Found, Setup, read_question
from hybridattn.planning.predict import predict_for

NICENESS = 10  # it shares its core with those who serve


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that serves; it ends us
    os.nice(NICENESS)
    warnings.simplefilter("ignore")  # said where the answers are used
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    first = questions.readline()
    if not first:
        return
    setup = Setup.read(first)
    costs, predict = setup.costs(), predict_for(setup.profile)
    table = LayoutTable(Path(setup.table) if setup.table is not None else None)
    counted_ns = 0  # what starting took is part of the first answer
    for line in questions:  # until nobody asks any more
        try:
            question = read_question(line)
            layout, expected = question.answer(costs, predict)
            table.add(question, layout, expected)
            before_ns, counted_ns = counted_ns, time.process_time_ns()
            said = Found(layout, expected, counted_ns - before_ns).line()
        except Exception as error:  # the process that serves goes on without, and says why
            said = Failed(f"{type(error).__name__}: {error}").line()
        try:
            answers.write(said)
            answers.flush()
        except BrokenPipeError:
            return
        table.save()  # after the answer: nobody waits for it
