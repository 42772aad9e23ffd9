"""Drives an engine with a workload: open arrivals, closed loops and sessions.

A workload says how many tokens come and go. That is all a simulation needs; a real device is given token ids as well.

    feed      |0 1 2 3 ...                     |4 follows the end of 1
    engine    |add 0|add 1| step step step |end 1| --> feed.ended(1) --> 4 arrives ...

Only the next arrival to come is handed to the engine ahead of time, so that a long trace costs what is under way.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hybridattn.core.errors import CapacityError, InputError
from hybridattn.core.records import RequestRecord, StepRecord
from hybridattn.core.request import DeclaredTokens, Request
from hybridattn.engine.engine import Engine
from hybridattn.workload.item import Feed, WorkItem, Workload


@dataclass(slots=True)
class Served:
    """What a replay left behind. ``requests`` is empty when the records went to a sink."""

    requests: list[RequestRecord] = field(default_factory=list)
    arrived: int = 0
    ended: int = 0
    failed: int = 0  # of those that ended; a session goes on after a turn that failed, with what it should have made
    refused: int = 0  # could never fit
    empty: int = 0  # asked for no token
    end_ns: int = 0


class Replay:
    """One workload on one engine. Arrivals count from the moment at which ``run`` is called.

    Parameters
    ----------
    prompts : callable ``(index, item) -> list of int``, optional
        The new token ids of an item, ``item.prompt_tokens`` of them. The history of a session's turn is what its
        earlier turns were given and made. Default: declared lengths, for simulation.
    params : callable ``(index, item) -> SamplingParams``, optional
        With ``prompts``: they should ignore ends of sequence, so that the lengths come out as declared.
    keep_contexts : bool
        K,V of a session are kept between its turns and leave the GPU tier meanwhile (see ``Engine.add``); otherwise
        each turn computes its history again.
    on_record : callable, optional
        Takes each record as its request ends; default: keep them all.
    on_step : callable, optional
        Takes each step; default: they are dropped.
    on_progress : callable, optional
        Called after every step with the number of requests that ended (progress).
    """

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        *,
        prompts: Callable[[int, WorkItem], Sequence[int]] | None = None,
        params: Callable[[int, WorkItem], object] = lambda index, item: None,
        keep_contexts: bool = False,
        on_record: Callable[[RequestRecord], None] | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self.engine = engine
        self.workload = workload
        self.served = Served()
        self._sink = on_record or self.served.requests.append
        self._on_progress = on_progress
        self._feed = Feed(workload)
        self._coming: list[tuple[int, int]] = []  # heap of (arrival since the start, item)
        self._start_ns = 0
        self._prompts, self._params = prompts, params
        self._keep_contexts = keep_contexts
        self._followers = Counter(i.after for i in workload.items if i.after is not None)  # still to come, by item
        self._running: dict[int, Request] = {}  # items that others follow, while their tokens are wanted
        self._contexts: dict[int, list[int]] = {}  # what items left behind for their followers
        engine.send_records(self._ended, on_step)

    def run(self) -> Served:
        """Serve everything. Ends when every item has arrived and ended."""
        self._start_ns = self.engine.device.now_ns()
        self._coming = self._feed.start()
        heapq.heapify(self._coming)
        engine = self.engine
        while self._coming or engine.unfinished:
            self._hand_over()
            if engine.unfinished:
                engine.step()
            if self._on_progress is not None:
                self._on_progress(self.served.ended)
        self.served.end_ns = engine.device.now_ns()
        return self.served

    def _hand_over(self) -> None:
        """Give the engine what has arrived, and what comes before anything that it waits for."""
        now_ns = self.engine.device.now_ns() - self._start_ns
        while self._coming:
            next_ns = self.engine.next_arrival_ns
            if self._coming[0][0] > now_ns and next_ns is not None and self._start_ns + self._coming[0][0] >= next_ns:
                break
            arrival_ns, index = heapq.heappop(self._coming)
            self._add(index, arrival_ns)

    def _add(self, index: int, arrival_ns: int) -> None:
        item = self.workload.items[index]
        self.served.arrived += 1
        prompt = self._prompt(index, item)
        if item.output_tokens == 0:
            self.served.empty += 1
            self._remember(index, prompt)
            self._follow(index, arrival_ns)
            return
        try:
            request = self.engine.add(
                prompt,
                item.output_tokens,
                self._params(index, item),
                request_id=str(index),
                arrival_ns=self._start_ns + arrival_ns,
                session=item.session if self._keep_contexts else "",
                keep=index in self._followers,
            )
        except CapacityError:
            self.served.refused += 1
            self._remember(index, prompt, item.output_tokens)  # later turns are longer: refused as well
            self._follow(index, arrival_ns)
            return
        if request.max_tokens < item.output_tokens:
            raise InputError(
                f"workload {self.workload.name}: item {index} holds {item.context_tokens} tokens, above max_model_len "
                f"{self.engine.config.max_model_len}; leave such items out first (Workload.within)"
            )
        if self._prompts is not None and index in self._followers:
            self._running[index] = request

    def _prompt(self, index: int, item: WorkItem) -> Sequence[int] | DeclaredTokens:
        if self._prompts is None:
            return DeclaredTokens(item.history_tokens + item.prompt_tokens)
        new, history = list(self._prompts(index, item)), self._history(item)
        if len(new) != item.prompt_tokens or len(history) != item.history_tokens:
            raise InputError(
                f"workload {self.workload.name}: item {index} declares {item.history_tokens} + {item.prompt_tokens} "
                f"tokens of history and prompt, but there are {len(history)} + {len(new)}"
            )
        return history + new

    def _history(self, item: WorkItem) -> list[int]:
        if item.after is None:
            return []
        history = self._contexts.get(item.after, [])
        self._followers[item.after] -= 1
        if not self._followers[item.after]:
            self._contexts.pop(item.after, None)
        return history[: item.history_tokens]

    def _remember(self, index: int, tokens: Sequence[int] | DeclaredTokens, missing: int = 0) -> None:
        """What the items that follow this one go on from."""
        if index in self._followers and not isinstance(tokens, DeclaredTokens):
            self._contexts[index] = [*tokens, *([0] * missing)]

    def _ended(self, record: RequestRecord) -> None:
        self.served.ended += 1
        self.served.failed += record.failed
        self._sink(record)
        index = int(record.request_id)
        request = self._running.pop(index, None)
        if request is not None:
            missing = self.workload.items[index].output_tokens - request.num_output if record.failed else 0
            self._remember(index, request.token_ids, max(0, missing))
        self._follow(index, record.end_ns - self._start_ns)

    def _follow(self, index: int, end_ns: int) -> None:
        for arrival in self._feed.ended(index, end_ns):
            heapq.heappush(self._coming, arrival)
