"""The simulated device: a virtual clock, and ops whose times are known the moment they are submitted.

Lanes are in order and prices are known, so an op starts at max(lane free, ends of ``after``, now) and there is no event
heap. The clock moves only when the driver waits, sleeps, submits or polls:

    now ---+-- submit A (0..10) --- submit B after A (10..14) ---+-- wait(B) --> now = 14
           |  done(A)? 10 <= 0: no                               |  done(A)? yes

With ``execute=True`` the ops' closures really run, in order of their virtual end (ties: order of submission), when the
clock passes that end. Then this is the deterministic asynchronous device: the caller chooses every duration, so a test
decides when the CPU finishes.

Contention is a factor at submit: an op that starts while a lane it shares bandwidth with is busy takes longer for all
of its time. What is already on a lane is not slowed down by what comes later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from hybridattn.core.device import DecodeStep, Future, Memory, Span, check_after
from hybridattn.core.errors import DeviceError, StallError
from hybridattn.core.op import CPU, GPU, LANES, WAITED, Op
from hybridattn.cost.pricing import Pricing
from hybridattn.devices.budget import Budget
from hybridattn.devices.late import WAKE, lateness
from hybridattn.devices.sim_closures import Closures
from hybridattn.devices.sim_future import RunFuture, SimFuture
from hybridattn.devices.sim_prices import Prices

UNLIMITED = 1 << 62
_ANYWHERE = nullcontext()


class SimDevice:
    """Virtual lanes priced by ``price``.

    Parameters
    ----------
    price : callable ``(Op) -> int``, or a Pricing
        Duration of an op in nanoseconds; raises for what was neither measured nor modelled. A ``Pricing`` brings its
        contention and its fingerprint along.
    execute : bool
        Run the closures at their virtual end (deterministic asynchronous device).
    record : bool
        Keep spans for ``drain``; off, memory stays flat over millions of ops.
    submit_ns, poll_ns : int
        What a submission and a poll cost the driver, on the virtual clock.
    wake_ns : int or sequence of int
        How long after the end of an op a driver that waited for it goes on; several times are taken in turn.
    handover_ns : dict of lane to int or sequence of int, optional
        How late an op of that lane begins, once it was submitted, what it comes after has ended and the lane is free:
        lanes that are threads have to be woken.
    steals_ns : int
        What each op of another lane takes from the next op of the GPU lane: driver and copies share the core of the
        thread which plays the GPU. (What submitting its own ops takes is part of their prices.)
    memory_bytes : dict, optional
        Bytes of the ``gpu`` and ``cpu`` tier; unlimited where absent.
    """

    kind = "simulated"

    def __init__(
        self,
        price: Callable[[Op], int] | Pricing,
        *,
        execute: bool = False,
        record: bool = True,
        submit_ns: int = 0,
        poll_ns: int = 0,
        wake_ns: int | Sequence[int] = 0,
        handover_ns: Mapping[str, int | Sequence[int]] | None = None,
        steals_ns: int = 0,
        memory_bytes: dict[str, int] | None = None,
        name: str = "sim",
        profile: str = "unnamed",
    ) -> None:
        self.name = name
        self.profile = price.fingerprint if isinstance(price, Pricing) else profile
        self.clock_ns = 0
        self.execute = execute
        self._future = RunFuture if execute else SimFuture
        self._prices = Prices(price)
        self._known = self._prices.known
        self._record = record
        self.submit_ns = submit_ns
        self.poll_ns = poll_ns
        self._watched = bool(execute or record or submit_ns)
        self._late = lateness(wake_ns, handover_ns)
        self._steals_ns = steals_ns
        self._stolen_ns = 0
        hidden = self._late is None and not steals_ns
        self.resolves = hidden and not execute and not record  # nobody looks at single ops: layers may pass in one step
        self._free_ns = dict.fromkeys(LANES, 0)
        self._queued_skipped: list[SimFuture] = []  # cpu.attention ops that a waited one may overtake
        self._closures = Closures(self)
        self._spans: list[SimFuture] = []
        self._budget = Budget({"gpu": UNLIMITED, "cpu": UNLIMITED} | (memory_bytes or {}))
        self._closed = False

    # -- the contract ------------------------------------------------------------------------------------------------

    def submit(self, op: Op, after: tuple[Future, ...] = ()) -> SimFuture:
        if self._closed:
            raise DeviceError(f"{op.describe()} was submitted to a closed device")
        lane = op.lane
        ready = self.clock_ns
        for t in after:
            if t.end_ns > ready:
                if lane != CPU and t.op.lane == CPU:
                    check_after(op, after)
                ready = t.end_ns
        if lane == CPU:
            future = self._place_cpu(op, ready)
            if self._steals_ns:
                self._stolen_ns += self._steals_ns
        else:
            start = self._free_ns[lane]
            if start < ready:
                start = ready
            if self._late is not None:
                start += next(self._late[lane])
            price = self._known[lane].get(op.work)
            if price is None:
                price = self._prices.at(op, lane, start, self._free_ns)
            if self._steals_ns:
                price += self._take_stolen(lane)
            self._free_ns[lane] = end = start + price
            future = self._future(self, op, ready, start, end)
        if self._watched:
            self._submitted(future, after)
        return future

    def _submitted(self, future: SimFuture, after: tuple[Future, ...]) -> None:
        """What a submission leaves behind, beside its future."""
        if self.execute:
            self._closures.add(future, after)  # type: ignore[arg-type]
        if self._record:
            self._spans.append(future)
        if self.submit_ns:
            self.advance(self.clock_ns + self.submit_ns)

    def stretch(
        self,
        attention: Op,
        linear: Op,
        count: int,
        ahead: deque[Future],
        run_ahead: int,
        timeout_ns: int,
        until_ns: int | None,
    ) -> tuple[int, SimFuture | None]:
        """Up to ``count`` layers without any decision, as if each op had been submitted on its own.

        The driver's clock moves as in the executor's loop: two submissions a layer, then a wait until it is at most
        ``run_ahead`` layers ahead. With ``until_ns`` the driver also follows the end of each attention (it looks for
        detours there), and the stretch ends before the layer at which it would be at or past that time.

        Returns
        -------
        number of layers passed, and the future of the last linear stage (None when none passed). ``ahead`` holds the
        futures of the layers that the driver is ahead.
        """
        free, clock, cost = self._free_ns[GPU], self.clock_ns, self.submit_ns
        attention_ns, linear_ns = self._prices.alone(attention, GPU), self._prices.alone(linear, GPU)
        ends, passed = deque([t.end_ns for t in ahead]), 0
        while passed < count:
            attended = (free if free > clock else clock) + attention_ns
            at = clock + cost
            end = (attended if attended > at else at) + linear_ns
            at += cost
            if until_ns is not None:
                if attended > at:
                    at = attended
                if at >= until_ns:
                    break
            if len(ends) >= run_ahead:
                first = ends[0] if ends else end
                if first > at + timeout_ns:
                    break  # the layer-by-layer way says what stalled
                ends.append(end)
                ends.popleft()
                if first > at:
                    at = first
            else:
                ends.append(end)
            free, clock = end, at
            passed += 1
        if not passed:
            return 0, None
        self._free_ns[GPU], self.clock_ns = free, clock
        made = [SimFuture(self, linear, 0, e - linear_ns, e) for e in ends]
        ahead.clear()
        ahead.extend(made)
        return passed, made[-1]

    @property
    def gpu_free_ns(self) -> int:
        """When gpu.compute will have done all it was given."""
        return self._free_ns[GPU]

    def step_alone(self, step: DecodeStep) -> None:
        """A whole step on gpu.compute to whose end the driver waits, as if each op had been submitted on its own."""
        price, layers = self._prices.alone, step.num_layers
        took_ns = price(step.first, GPU) + layers * price(step.attention, GPU)
        took_ns += (layers - 1) * price(step.linear, GPU) + price(step.last, GPU)
        self.clock_ns = self._free_ns[GPU] = max(self._free_ns[GPU], self.clock_ns) + took_ns

    def driving(self) -> AbstractContextManager[None]:
        return _ANYWHERE

    def now_ns(self) -> int:
        return self.clock_ns

    def _take_stolen(self, lane: str) -> int:
        """What ops of other lanes took from the GPU lane since its last op, where ``lane`` is that."""
        if lane != GPU:
            self._stolen_ns += self._steals_ns
            return 0
        taken, self._stolen_ns = self._stolen_ns, 0
        return taken

    def wake(self, end_ns: int) -> None:
        """The driver, which waited for what ends then, goes on."""
        self.advance(end_ns if self._late is None else end_ns + next(self._late[WAKE]))

    def sleep_until_ns(self, when_ns: int) -> None:
        if when_ns > self.clock_ns:
            self.advance(when_ns)

    def waits_for(self, future: Future, timeout_ns: int) -> bool:
        return False

    def wait_any(self, futures: Sequence[Future], timeout_ns: int) -> None:
        end = min(t.end_ns for t in futures)
        if end > self.clock_ns + timeout_ns:
            self.advance(self.clock_ns + timeout_ns)
            named = ", ".join(t.op.describe() for t in futures)
            raise StallError(f"none of {named} ended within {timeout_ns / 1e9:g} s")
        if end > self.clock_ns:
            self.wake(end)

    def drain(self, timeout_ns: int) -> list[Span]:
        end = max(self._free_ns.values())
        if end > self.clock_ns + timeout_ns:
            raise StallError(
                f"lanes are busy for another {(end - self.clock_ns) / 1e9:g} s, past {timeout_ns / 1e9:g} s"
            )
        self.sleep_until_ns(end)
        error = self._closures.take_error()
        if error is not None:
            raise error
        spans, self._spans = [t.span() for t in self._spans], []
        return spans

    def memory(self, tier: str) -> Memory:
        return self._budget.memory(tier)

    def reserve(self, tier: str, num_bytes: int, what: str) -> None:
        self._budget.reserve(tier, num_bytes, what, self.name)

    def close(self) -> None:
        self._closed = True

    # -- the clock and the lanes -------------------------------------------------------------------------------------

    def advance(self, when_ns: int) -> None:
        """Move the clock forward; with ``execute``, run what ends on the way, in order of end, then of submission."""
        if self.execute:
            self._closures.run_until(when_ns)
        if when_ns > self.clock_ns:
            self.clock_ns = when_ns

    def _place_cpu(self, op: Op, ready: int) -> SimFuture:
        """Place an op on cpu.attention; a waited one goes before skipped ones that have not started yet.

        Overtaking moves the times of the overtaken ops. Nothing else knows those times yet: no GPU-lane op may name an
        unfinished host future, and the driver only asks whether they have passed.
        """
        overtaken: list[SimFuture] = []
        if op.priority == WAITED and self._queued_skipped:
            not_before = max(self.clock_ns, ready)
            overtaken = [t for t in self._queued_skipped if t.start_ns > not_before]
            self._queued_skipped = overtaken  # what stays before this op may not be moved past it by a later one
        free = overtaken[0].lane_free_ns if overtaken else self._free_ns[CPU]
        start = free if free > ready else ready
        if self._late is not None:
            start += next(self._late[CPU])
        price = self._known[CPU].get(op.work)
        if price is None:
            price = self._prices.at(op, CPU, start, self._free_ns)
        at = start + price
        future = self._future(self, op, ready, start, at)
        for t in overtaken:
            length = t.end_ns - t.start_ns
            t.lane_free_ns = at
            t.start_ns = max(at, t.ready_ns) + (next(self._late[CPU]) if self._late is not None else 0)
            at = t.end_ns = t.start_ns + length
        self._free_ns[CPU] = at
        if op.priority != WAITED:
            future.lane_free_ns = free
            queued = self._queued_skipped
            while queued and queued[0].start_ns <= self.clock_ns:
                del queued[0]
            queued.append(future)
        return future
