"""Requests on their way in: checked when they are added, and kept until they arrive.

Added ahead of their time, as a trace is, they wait here and not in the scheduler's queue:

    caller       |add: arrives at 10|add: arrives at 4|
    engine                                            |step at 4: the second is due|... |step at 10: the first is due|
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator, Sequence

from hybridattn.core.errors import InputError
from hybridattn.core.request import DeclaredTokens, Request


class RequestQueue:
    """Makes requests, and holds those whose time has not come. Requests are numbered as they are accepted."""

    __slots__ = ("_coming", "_count", "_max_model_len")

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._coming: list[tuple[int, int, Request]] = []  # heap
        self._count = 0

    def __len__(self) -> int:
        """Requests still to come."""
        return len(self._coming)

    @property
    def next_ns(self) -> int | None:
        """When the next one arrives."""
        return self._coming[0][0] if self._coming else None

    def request(
        self,
        prompt: Sequence[int] | DeclaredTokens,
        max_tokens: int | None,
        params: object,
        request_id: str | None,
        arrival_ns: int,
        taken: Container[str],
    ) -> Request:
        """A request that is fit to be accepted; InputError as ``Engine.add`` says. ``taken``: ids in use."""
        name = request_id if request_id is not None else f"r{self._count}"
        if name in taken:
            raise InputError(f"request id {name} is already in use")
        if not len(prompt):
            raise InputError(f"request {name}: the prompt has no tokens")
        if max_tokens is not None and max_tokens < 1:
            raise InputError(f"request {name}: max_tokens must be at least 1, got {max_tokens}")
        room = self._max_model_len - len(prompt)
        if room < 1:
            raise InputError(
                f"request {name}: its prompt of {len(prompt)} tokens leaves no room for an output token within "
                f"max_model_len {self._max_model_len}"
            )
        most = room if max_tokens is None else min(room, max_tokens)
        return Request(name, self._count, prompt, most, params, arrival_ns)

    def accept(self, request: Request, now_ns: int) -> bool:
        """Count a request in; True when it is still to come and is kept here until then."""
        self._count += 1
        later = request.arrival_ns > now_ns
        if later:
            heapq.heappush(self._coming, (request.arrival_ns, request.index, request))
        return later

    def due(self, now_ns: int) -> Iterator[Request]:
        """Hand out those that have arrived, in order of arrival."""
        while self._coming and self._coming[0][0] <= now_ns:
            yield heapq.heappop(self._coming)[2]

    def withdraw(self, request: Request) -> bool:
        """Take back one that is still to come; False when it is not here."""
        at = next((i for i, (_, _, r) in enumerate(self._coming) if r is request), None)
        if at is None:
            return False
        self._coming.pop(at)
        heapq.heapify(self._coming)
        return True

    def clear(self) -> list[Request]:
        """Take back all that are still to come."""
        gone = [request for _, _, request in self._coming]
        self._coming.clear()
        return gone
