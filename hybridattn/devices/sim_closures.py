"""What ``execute=True`` adds to the simulated device: closures that really run, at their virtual end.

    now --- submit A (0..10), B (0..4) ---+-- wait(A): the clock goes to 10 --+-- A.result
            nothing has run               |  at 4: B.run()    at 10: A.run()  |

In order of end; ties in order of submission.
"""

from __future__ import annotations

from hybridattn.core.device import Future
from hybridattn.core.errors import DeviceError
from hybridattn.devices.sim_future import Clock, RunFuture


class Closures:
    """Those that have not run yet, and the first error since it was last asked for."""

    __slots__ = ("_clock", "_first_error", "_sequence", "_to_run")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._to_run: list[tuple[int, RunFuture, tuple[Future, ...]]] = []  # (sequence, future, after)
        self._sequence = 0
        self._first_error: BaseException | None = None

    def add(self, future: RunFuture, after: tuple[Future, ...]) -> None:
        """Let the closure run when the clock comes to its end."""
        if future.end_ns <= self._clock.clock_ns:
            self._execute(future, after)  # all that ends up to now has run, so this one is next
            return
        self._sequence += 1
        self._to_run.append((self._sequence, future, after))

    def run_until(self, when_ns: int) -> None:
        """Run what ends up to ``when_ns``, each with the clock at its end."""
        due = sorted((e for e in self._to_run if e[1].end_ns <= when_ns), key=lambda e: (e[1].end_ns, e[0]))
        self._to_run = [e for e in self._to_run if e[1].end_ns > when_ns]
        for _, future, after in due:
            self._clock.clock_ns = max(self._clock.clock_ns, future.end_ns)
            self._execute(future, after)

    def take_error(self) -> BaseException | None:
        """The first error of a closure since the last call."""
        error, self._first_error = self._first_error, None
        return error

    def _execute(self, future: RunFuture, after: tuple[Future, ...]) -> None:
        failed = next((t.error for t in after if t.error is not None), None)
        if failed is not None:
            future.error = failed
            return
        if future.op.run is None:
            return
        try:
            result = future.op.run()
        except Exception as error:  # the lane must survive: the error travels on the future
            future.error = error
            if self._first_error is None:
                self._first_error = DeviceError(f"{future.op.describe()} failed: {error}")
                self._first_error.__cause__ = error
        else:
            future.result = None if future.cancelled else result
