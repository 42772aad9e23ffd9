"""The requests of an engine by what they do next; every queue is in order of arrival.

All but the waiting ones are running, those that move between the tiers or leave included:

    waiting --admit--> prefilling --prefilled--> decoding (GPU tier), idle (CPU tier)
       ^                                            |
       +---------------- preempted -----------------+
"""

from __future__ import annotations

from bisect import bisect_left, insort

from hybridattn.core.request import Request, State
from hybridattn.core.stages import CPU_TIER, GPU_TIER


class Queues:
    """``running`` is also kept apart by what its requests do next, so that a step costs what its rows cost and not what
    the queues hold.

    Attributes
    ----------
    waiting : not admitted, or preempted; they hold no pages
    running : admitted and not ended
    prefilling : their prompt is under way
    decoding : on the GPU tier
    idle : on the CPU tier, for their next token; those dispatched since the last step are still in it
    """

    __slots__ = ("decoding", "idle", "prefilling", "running", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.idle: list[Request] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def wait(self, request: Request) -> None:
        insort(self.waiting, request, key=arrival)

    def admit(self, request: Request) -> None:
        """It runs from now on: its prompt or its next token, unless K,V of it are still on their way."""
        insort(self.running, request, key=arrival)
        if request.state is not State.MOVING:
            self.join(request)

    def join(self, request: Request) -> None:
        """Line up a running request for what its state and its tier say that it does next."""
        decodes = self.decoding if request.tier == GPU_TIER else self.idle
        insort(self.prefilling if request.state is State.PREFILL else decodes, request, key=arrival)

    def step_out(self, request: Request) -> None:
        """A running request does nothing for now."""
        request.row = None
        for queue in (self.prefilling, self.decoding, self.idle):
            _discard(queue, request)

    def prefilled(self, request: Request) -> None:
        """Its prompt is through: it decodes."""
        _discard(self.prefilling, request)
        self.join(request)

    def returned(self, request: Request) -> None:
        """A CPU row got its token and goes on: it waits for its next dispatch."""
        request.row = None
        at = bisect_left(self.idle, arrival(request), key=arrival)
        if at == len(self.idle) or self.idle[at] is not request:
            self.idle.insert(at, request)

    def drop_dispatched(self) -> None:
        """``idle`` holds only those that are."""
        self.idle = [r for r in self.idle if not r.in_flight]

    def cpu_load(self) -> tuple[int, int]:
        """Requests that decode on the CPU tier, and the KV tokens that they attend to."""
        kv_tokens = [len(r.token_ids) for r in self.running if r.tier == CPU_TIER and r.state is State.DECODE]
        return len(kv_tokens), sum(kv_tokens)


def arrival(request: Request) -> tuple[int, int]:
    """What the queues are ordered by."""
    return request.arrival_ns, request.index


def _discard(queue: list[Request], request: Request) -> None:
    """Take ``request`` out of a queue in order of arrival, if it is there."""
    at = bisect_left(queue, arrival(request), key=arrival)
    if at < len(queue) and queue[at] is request:
        del queue[at]
