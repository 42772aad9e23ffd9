"""Requests that end or are preempted, at once or as soon as nothing of theirs is in flight.

A request is aborted while its row is in flight; nobody else gets the pages that the row still reads:

    driver          |abort: LEAVING|  step  |  step  | released: pages go back, the request has ended
    cpu.attention   |-- attention of its row --|
"""

from __future__ import annotations

from collections.abc import Callable

from hybridattn.core.request import Request, State
from hybridattn.kv.manager import KVManager
from hybridattn.scheduler.queues import Queues


class Finish:
    """``on_end`` is called once for every request that ends, with its pages freed, or kept as a session's context.

    Attributes
    ----------
    leaving : requests that left while a row of theirs is in flight, or while pages of theirs moved
    """

    __slots__ = ("_kv", "_on_end", "_queues", "leaving")

    def __init__(self, queues: Queues, kv: KVManager, on_end: Callable[[Request], None]) -> None:
        self._queues = queues
        self._kv = kv
        self._on_end = on_end
        self.leaving = 0

    def end(self, request: Request, reason: str, now_ns: int) -> None:
        """End a request. With a row in flight, or pages on their way, it leaves first: its pages are held until that
        future has ended."""
        if request.state is State.FINISHED:
            return
        request.finish_reason = request.finish_reason or reason
        request.end_ns = now_ns
        request.requeue = False
        if _held(request):
            self._leave(request)
            return
        queues = self._queues
        (queues.waiting if request.state is State.WAITING else queues.running).remove(request)
        queues.step_out(request)
        (self._kv.doubt if reason == "error" else self._kv.computed)(request)
        if request.keep and reason in ("stop", "length") and request.pages:
            self._kv.contexts.keep(request)
        else:
            self._kv.contexts.drop(request)
            self._kv.give_back(request)
            request.state = State.FINISHED
        self._on_end(request)

    def preempt(self, request: Request) -> None:
        """Take a request's pages away; it waits to be admitted again, with its K,V on the CPU tier or without any."""
        request.preemptions += 1
        request.requeue = True
        if _held(request):
            self._leave(request)
        else:
            self._requeue(request)

    def released(self, request: Request, now_ns: int) -> None:
        """Nothing of a leaving request is in flight any longer: its pages may go."""
        request.in_flight = False
        if request.state is not State.LEAVING:
            return
        self.leaving -= 1
        if request.requeue:
            self._requeue(request)
        else:
            self.end(request, request.finish_reason or "abort", request.end_ns or now_ns)

    def _leave(self, request: Request) -> None:
        self.leaving += request.state is not State.LEAVING
        request.state = State.LEAVING

    def _requeue(self, request: Request) -> None:
        self._queues.running.remove(request)
        self._queues.step_out(request)
        self._kv.preempt(request)
        request.state = State.WAITING
        request.requeue = False
        self._queues.wait(request)


def _held(request: Request) -> bool:
    return request.in_flight or request.pages.goes_to is not None
