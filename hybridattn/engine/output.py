"""Tokens to the requests that they belong to: text, the end of the request, or its next row.

A request that fails alone (logits that are not finite, no token that is allowed, a token without text) ends with the
reason ``error`` and one sentence; its neighbours never hear of it. Errors of the engine are for lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridattn.core.request import Request
from hybridattn.core.stages import CPU_TIER, RowFault, Sampled
from hybridattn.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Event:
    """A token that a request got; ``text`` is what it adds to the visible text (it may be empty).

    A request that failed got none: ``token_id`` is None then, ``finish_reason`` is ``error`` and ``error`` says why.
    """

    request: Request
    token_id: int | None
    text: str
    finish_reason: str | None
    error: str | None = None


class OutputProcessor:
    """Hands tokens out. A request that ends with one leaves the scheduler; ``eos_ids`` are the ids that end any."""

    __slots__ = ("_eos_ids", "_scheduler")

    def __init__(self, scheduler: Scheduler, eos_ids: frozenset[int]) -> None:
        self._scheduler = scheduler
        self._eos_ids = eos_ids

    def deliver(self, sampled: Sampled) -> Event:
        """Give a request its token, or its fault; the event also goes to who collects the events of this request."""
        request = sampled.request
        assert isinstance(request, Request)
        event = self._event(request, sampled.token_id, sampled.time_ns)
        if event.finish_reason is not None:
            self._scheduler.finish.end(request, event.finish_reason, sampled.time_ns)
        elif request.tier == CPU_TIER:
            self._scheduler.queues.returned(request)
        if request.events is not None:
            request.events.append(event)
        return event

    def _event(self, request: Request, token: int | RowFault, time_ns: int) -> Event:
        if isinstance(token, RowFault):
            held = _text_of(request, lambda stream: stream.finish()) or ""
            request.error = f"the logits of request {request.request_id} {token.reason}"
            return Event(request, None, held, "error", request.error)
        request.num_computed = len(request.token_ids)  # the newest token has no K,V yet
        request.token_ids.append(token)
        request.token_ns.append(time_ns)
        text = _text_of(request, lambda stream: stream.push(token))
        reason = stop_reason(request, self._eos_ids)
        if reason is not None and text is not None:
            rest = _text_of(request, lambda stream: stream.finish())
            text = None if rest is None else text + rest
        if text is None:
            return Event(request, token, "", "error", request.error)
        return Event(request, token, text, reason)


def _text_of(request: Request, take: Callable[..., str]) -> str | None:
    """What ``take`` gets from the request's text; None, with the request's error set, where it has none."""
    if request.text is None:
        return ""
    try:
        return take(request.text)
    except Exception as error:  # whatever it is, it is this request's own; it may quote text, so only its kind is told
        request.error = f"a token of request {request.request_id} could not become text ({type(error).__name__})"
        return None


def stop_reason(request: Request, eos_ids: frozenset[int]) -> str | None:
    """Why the request ends after its newest token, or None.

    A stop id of the user's own ends it even under ``ignore_eos``; an end-of-sequence token counts only from
    ``min_tokens`` on (sampling blocks it before). A request without params (simulation) ends by length only.
    """
    params = request.params
    if params is not None:
        token = request.token_ids[-1]
        if token in params.stop_token_ids:
            return "stop"
        if token in eos_ids and not params.ignore_eos and request.num_output >= params.min_tokens:
            return "stop"
        if request.text is not None and request.text.stopped:
            return "stop"
    return "length" if request.num_output >= request.max_tokens else None
