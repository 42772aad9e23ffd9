"""Tokens to the requests that they belong to: text, the end of the request, or its next row."""

from __future__ import annotations

from dataclasses import dataclass

from hybridattn.core.request import Request
from hybridattn.core.stages import CPU_TIER, Sampled
from hybridattn.engine.stopping import stop_reason
from hybridattn.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Event:
    """A token that a request got; ``text`` is what it adds to the visible text (it may be empty)."""

    request: Request
    token_id: int
    text: str
    finish_reason: str | None


class OutputProcessor:
    """Hands tokens out. A request that ends with one leaves the scheduler; ``eos_ids`` are the ids that end any."""

    __slots__ = ("_eos_ids", "_scheduler")

    def __init__(self, scheduler: Scheduler, eos_ids: frozenset[int]) -> None:
        self._scheduler = scheduler
        self._eos_ids = eos_ids

    def deliver(self, sampled: Sampled) -> Event:
        """Give a request its token; the event also goes to who collects the events of this request."""
        request = sampled.request
        assert isinstance(request, Request)
        request.token_ids.append(sampled.token_id)
        request.token_ns.append(sampled.time_ns)
        text = request.text.push(sampled.token_id) if request.text is not None else ""
        reason = stop_reason(request, self._eos_ids)
        if reason is not None:
            if request.text is not None:
                text += request.text.finish()
            self._scheduler.finish.end(request, reason, sampled.time_ns)
        elif request.tier == CPU_TIER:
            self._scheduler.queues.returned(request)
        event = Event(request, sampled.token_id, text, reason)
        if request.events is not None:
            request.events.append(event)
        return event
