"""Planning beside the steps: short simulations in a process of their own.

    driver    begin: ask ... begin: nothing yet ... begin: nothing yet ... begin: take -> the layout from now on
    thread         |write                                          read|
    process            |-- some twenty layouts, simulated one by one --|

The driver neither simulates nor waits: it puts a question down and looks for its answer before each step. Until one has
come closed forms choose the layouts, and so they do for good when the process has died.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from hybridattn.core.shapes import ModelShape
from hybridattn.cost.profile import Profile
from hybridattn.planning.layout_table import LayoutTable
from hybridattn.planning.messages import Failed, Found, Setup, question_line, read_answer
from hybridattn.policies.layouts import Layout
from hybridattn.policies.load import Prediction
from hybridattn.policies.planning import LayoutQuestion

_PROGRAM = "from hybridattn.planning.planner_process import main; main()"


class Planner:
    """Answers the questions of an adaptive policy in a spawned process, which starts with the first question.

    Parameters
    ----------
    profile : Profile
        Of this machine; what the simulations are priced by.
    shape, dtype
        Of the model.
    table : Path, optional
        The file in which answers are kept from run to run.
    answer_timeout_s : float
        Longest time for an answer; past it the process is ended.

    Attributes
    ----------
    failure : why there are no more answers, None while there may be
    cpu_ns : processor time that the answers taken so far took
    known : answers of earlier runs, to which those of this one are added
    """

    def __init__(
        self,
        profile: Profile,
        shape: ModelShape,
        dtype: str,
        *,
        table: Path | None = None,
        answer_timeout_s: float = 120.0,
    ) -> None:
        self.failure: str | None = None
        self.cpu_ns = 0
        self.known = LayoutTable(table).known
        self._setup = Setup(profile, shape, dtype, str(table) if table is not None else None).line()
        self._timeout_s = answer_timeout_s
        self._asked_at: float | None = None
        self._questions: queue.SimpleQueue[LayoutQuestion | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()  # whether there is a process is decided by one at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._warned = False
        self._thread = threading.Thread(target=self._serve, name="hybridattn planner", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    # -- the driver's side: never blocks ---------------------------------------------------------------------------

    def ask(self, question: LayoutQuestion) -> None:
        """Begin to answer; one question at a time. Without effect when there are no more answers."""
        self._asked_at = time.monotonic()
        self._questions.put(question)

    def take(self) -> tuple[Layout, Prediction] | None:
        """The answer, once it has come. Warns once when there will be none any more."""
        try:
            answer = self._answers.get_nowait()
        except queue.Empty:
            answer = None
        if isinstance(answer, Failed):
            self._fail(answer.reason)
        elif isinstance(answer, Found):
            self._asked_at = None
            self.cpu_ns += answer.cpu_ns
            return answer.layout, answer.expected
        if self._asked_at is not None and time.monotonic() - self._asked_at > self._timeout_s:
            self._fail(f"no answer within {self._timeout_s:g} s")
        if self.failure is not None and not self._warned and not self._closed:
            self._warned = True
            said = f"planning has stopped, and closed forms choose the layouts: {self.failure}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return None

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self._asked_at = None
        self._end_process()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        said = self._setup  # before the first question
        while (question := self._questions.get()) is not None:
            try:
                process = self._open()
                if process is None:
                    return
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(said + question_line(question))
                process.stdin.flush()
                said = b""
                line = process.stdout.readline()
                if not line:
                    raise EOFError("no more answers")
                self._answers.put(read_answer(line))
            except Exception as error:  # whatever it is, the driver goes on without answers, and says why
                self.failure = self.failure or self._cause(error)
                return

    def _open(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closed or self.failure is not None:
                return None
            if self._process is None:
                path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
                    process_group=0,  # Ctrl-C in the terminal is for the process that serves
                )  # fmt: skip
            return self._process

    def _cause(self, error: Exception) -> str:
        process = self._process
        if process is None:
            return f"its process could not start: {error}"
        try:
            return f"its process ended with code {process.wait(1.0)}"
        except subprocess.TimeoutExpired:
            return f"its process cannot be understood: {type(error).__name__}: {error}"

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 5.0) -> None:
        """End the process and the thread; bounded, idempotent."""
        with self._lock:
            self._closed = True
        self._questions.put(None)
        self._end_process(timeout_s)
        self._thread.join(timeout_s)
        process = self._process
        for pipe in (process.stdin, process.stdout) if process is not None and not self._thread.is_alive() else ():
            try:
                pipe.close()  # type: ignore[union-attr]
            except OSError:  # what was not written yet cannot be any more
                pass

    def _end_process(self, timeout_s: float = 5.0) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()  # it cannot refuse this; the system may take its time to bury it
