"""Contexts: K,V that a finished turn of a session leaves behind for the next one, or a preempted request for itself.

    turn 0               pause                              turn 1
    |prefill|decode|end| K,V go down (gpu.d2h) ... K,V come up (gpu.h2d) |prefill of the new tokens|decode|
                         ^ GPU pages are free for others                  ^ nothing is computed again

A context is kept by the finished request itself, or by one that stands in for a preempted request while that waits. It
is only ever a cache: when somebody who runs needs a page, the one that has paused for the longest gives up its newest,
sessions before preempted requests, and those tokens are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hybridattn.core.page_table import CPU_TIER, PageTable
from hybridattn.core.request import DeclaredTokens, Request, State


class Contexts:
    """The contexts of one engine, those that paused first in front; by the name of the session, or by the request that
    was preempted. ``cut(request, tokens)`` frees the pages of a request behind its first ``tokens`` tokens; ``page`` is
    tokens of a page.

    Attributes
    ----------
    reused_tokens : tokens that a turn found again instead of computing them
    evicted : contexts that have given all up to running requests
    """

    __slots__ = ("_cut", "_held", "_page", "evicted", "reused_tokens")

    def __init__(self, cut: Callable[[Request, int], None], page: int) -> None:
        self._cut = cut
        self._page = page
        self._held: dict[str | Request, Request] = {}
        self.reused_tokens = 0
        self.evicted = 0

    def __bool__(self) -> bool:
        return bool(self._held)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._held.values())

    def find(self, request: Request) -> Request | None:
        """Who holds what it had when it was preempted, or what its session left behind."""
        return self.preempted(request) or self._held.get(request.session)

    def preempted(self, request: Request) -> Request | None:
        """Who holds what it had when it was preempted."""
        return self._held.get(request)

    def keep(self, request: Request) -> None:
        """A turn has ended: its K,V stay, but for pages beyond the last token that has any."""
        self.drop(request.session)
        self._rest(request.session, request)

    def stand_in(self, request: Request, tokens: int) -> Request:
        """A request was preempted: K,V of its first ``tokens`` tokens stay with who is returned, until it is admitted
        again."""
        held = Request(request.request_id, request.index, request.token_ids, 1, None, request.arrival_ns)
        held.tier, held.num_computed, held.page_names = request.tier, tokens, request.page_names
        held.pages, request.pages = request.pages, PageTable()
        self._rest(request, held)
        return held

    def _rest(self, key: str | Request, held: Request) -> None:
        self._cut(held, held.num_computed)
        held.state = State.PAUSED
        self._held[key] = held

    def take(self, request: Request) -> tuple[Request, int] | None:
        """Hand a context over to the session's next turn, or to the request itself: who held it, and how many tokens of
        it hold for ``request``.

        The held pages are cut to those tokens. None: there is nothing that it could use.
        """
        held = self._held.pop(request, None)
        if held is not None:
            return held, held.num_computed
        held = self._held.pop(request.session, None)
        if held is None:
            return None
        count = min(_common(held.token_ids, request.token_ids, held.num_computed), request.num_tokens - 1)
        self._cut(held, count)
        self.reused_tokens += count
        return (held, count) if count else None

    def evict(self, tier: str) -> bool:
        """Free the newest page on a tier, and what follows on it, of the context that has paused for the longest of
        those with pages there; False: there is none. What a window still needs goes as a whole."""
        at_rest = [key for key, r in self._held.items() if _rests(r, tier)]
        if not at_rest:
            return False
        key = min(at_rest, key=lambda key: isinstance(key, Request))
        held = self._held[key]
        left = (held.pages.num_cold if tier == CPU_TIER else len(held.pages)) - 1
        if held.pages.gone or not left:
            self.evicted += 1
            self.drop(key)
        else:
            held.num_computed = min(held.num_computed, left * self._page)
            self._cut(held, held.num_computed)
        return True

    def drop(self, key: str | Request) -> None:
        """Forget a context. On its way between the tiers it keeps its pages until it has arrived."""
        held = self._held.pop(key, None)
        if held is None:
            return
        held.state = State.FINISHED
        if not held.in_flight:
            self._cut(held, 0)

    def arrived(self, held: Request) -> None:
        """A context has come to the other tier."""
        held.in_flight = False
        if held.state is State.FINISHED:  # dropped meanwhile
            self._cut(held, 0)

    def clear(self) -> None:
        """Forget all, at once: nothing is in flight any more."""
        for key, held in list(self._held.items()):
            held.in_flight = False
            self.drop(key)

    def at_rest(self, tier: str) -> list[Request]:
        """Those that hold pages of a tier and do not move: ``evict`` may take them."""
        return [r for r in self._held.values() if _rests(r, tier)]


def _rests(held: Request, tier: str) -> bool:
    return not held.in_flight and bool(held.pages.on(tier))


def _common(held: Any, wanted: Any, limit: int) -> int:
    """How many of the first ``limit`` tokens are the same in both; declared tokens are, as far as both go."""
    if isinstance(held, DeclaredTokens) or isinstance(wanted, DeclaredTokens):
        return min(limit, len(held), len(wanted))
    pairs = zip(held[:limit], wanted, strict=False)
    different = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return min(limit, len(wanted)) if different is None else different
