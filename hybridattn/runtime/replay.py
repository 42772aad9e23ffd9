"""Drives an engine with a workload: open arrivals, closed loops and sessions. For declared lengths, so for simulation.

    feed      |0 1 2 3 ...                     |4 follows the end of 1
    engine    |add 0|add 1| step step step |end 1| --> feed.ended(1) --> 4 arrives ...

Only the next arrival to come is handed to the engine ahead of time, so that a long trace costs what is under way.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from hybridattn.core.errors import CapacityError, InputError
from hybridattn.core.records import PassRecord, RequestRecord
from hybridattn.runtime.engine import Engine
from hybridattn.runtime.request import DeclaredTokens
from hybridattn.workload.item import Feed, Workload


@dataclass(slots=True)
class Served:
    """What a replay left behind. ``requests`` is empty when the records went to a sink."""

    requests: list[RequestRecord] = field(default_factory=list)
    arrived: int = 0
    ended: int = 0
    refused: int = 0  # could never fit
    empty: int = 0  # asked for no token
    end_ns: int = 0


class Replay:
    """One workload on one engine.

    Parameters
    ----------
    on_record : callable, optional
        Takes each record as its request ends; default: keep them all.
    on_pass : callable, optional
        Takes each pass; default: they are dropped.
    on_step : callable, optional
        Called after every step with the number of requests that ended (progress).
    """

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        *,
        on_record: Callable[[RequestRecord], None] | None = None,
        on_pass: Callable[[PassRecord], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        self.engine = engine
        self.workload = workload
        self.served = Served()
        self._sink = on_record or self.served.requests.append
        self._on_step = on_step
        self._feed = Feed(workload)
        self._coming: list[tuple[int, int]] = []  # heap of (arrival, item)
        engine.send_records(self._ended, on_pass)

    def run(self) -> Served:
        """Serve everything. Ends when every item has arrived and ended."""
        self._coming = self._feed.start()
        heapq.heapify(self._coming)
        engine = self.engine
        while self._coming or engine.unfinished:
            self._hand_over()
            if engine.unfinished:
                engine.step()
            if self._on_step is not None:
                self._on_step(self.served.ended)
        self.served.end_ns = engine.device.now_ns()
        return self.served

    def _hand_over(self) -> None:
        """Give the engine what has arrived, and the one that comes next."""
        now_ns = self.engine.device.now_ns()
        while self._coming and (self._coming[0][0] <= now_ns or not self.engine.expects_arrivals):
            arrival_ns, index = heapq.heappop(self._coming)
            self._add(index, arrival_ns)

    def _add(self, index: int, arrival_ns: int) -> None:
        item = self.workload.items[index]
        self.served.arrived += 1
        if item.output_tokens == 0:
            self.served.empty += 1
            self._follow(index, arrival_ns)
            return
        prompt = DeclaredTokens(item.history_tokens + item.prompt_tokens)
        try:
            request = self.engine.add(prompt, item.output_tokens, request_id=str(index), arrival_ns=arrival_ns)
        except CapacityError:
            self.served.refused += 1
            self._follow(index, arrival_ns)
            return
        if request.max_tokens < item.output_tokens:
            raise InputError(
                f"workload {self.workload.name}: item {index} holds {item.context_tokens} tokens, above max_model_len "
                f"{self.engine.config.max_model_len}; leave such items out first (Workload.within)"
            )

    def _ended(self, record: RequestRecord) -> None:
        self.served.ended += 1
        self._sink(record)
        self._follow(int(record.request_id), record.end_ns)

    def _follow(self, index: int, end_ns: int) -> None:
        for arrival in self._feed.ended(index, end_ns):
            heapq.heappush(self._coming, arrival)
