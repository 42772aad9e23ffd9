"""The KV manager: which page of which request lies on which tier, and who gets the next one.

Every page of a tier is in exactly one place: free in its pool, in the page table of a running request, in that of a
context (K,V that a session left behind), or on one of the two sides of a copy under way; only pages of a common prefix
(``hybridattn.kv.prefixes``) are in several tables:

    pages of the old tier    |---------- held, read by the copy ----------|free
    pages of the new tier    |---------- held, written by the copy -------|read from now on
    request                  |MOVING: no row of it runs                   |decodes on, prefills, or pauses
    driver                   move                                         arrived

The oldest pages of a request that decodes on the GPU tier may go down, and the newest of those come up, while it
decodes on (``move_pages``): nothing is written to them any more, and they are read where they were until the copy has
ended. Where every layer has a sliding window, pages that the widest has left behind are given back, on either tier;
those of a session stay, for its next turn may begin anywhere.

Bookkeeping only: the bytes live in ``hybridattn.kv.storage``, copies are the executor's, queues are the scheduler's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridattn.core.config import EngineConfig
from hybridattn.core.page_table import CPU_TIER, GPU_TIER, PageTable, other
from hybridattn.core.request import DeclaredTokens, Request, State
from hybridattn.kv.blocks import BlockPool, blocks_for
from hybridattn.kv.contexts import Contexts
from hybridattn.kv.prefixes import PageStore, Prefixes


@dataclass(frozen=True, slots=True)
class Move:
    """Pages of a request on their way to the other tier.

    Attributes
    ----------
    source : the tier that they come from
    pages : those that the copy reads, in order of position; it writes ``request.pages.arriving``
    tokens : whose K,V is copied
    then : what the request does next: decode on, prefill what a session's turn adds to its context, or pause; None: it
        decodes all the while
    """

    request: Request
    source: str
    pages: tuple[int, ...]
    tokens: int
    then: State | None


class Victims(Protocol):
    """What the manager asks of the scheduler when a tier is full: it knows no queues itself."""

    def leaving(self, tier: str) -> bool:
        """Some request will give its pages of the tier back by itself, soon."""
        ...

    def give_way(self, request: Request) -> bool:
        """Take the pages of the youngest request of ``request``'s tier. False when ``request`` has to wait for them,
        or was the youngest itself."""
        ...


class KVManager:
    """Pools, page tables and contexts of one engine. Running requests come before contexts: these give their pages up
    to whoever runs.

    Attributes
    ----------
    can_move : K,V can be copied between the tiers
    window : positions that a query attends to at most, its own included; None: all
    pools : the free pages of each tier
    prefixes : what names pages that requests may share; None where they do not
    contexts : K,V that sessions left behind
    under_way : moves begun and not known to have arrived
    """

    __slots__ = ("_begun", "_page", "can_move", "contexts", "pools", "prefixes", "under_way", "window")

    def __init__(
        self, config: EngineConfig, can_move: bool = False, store: PageStore | None = None, window: int | None = None
    ) -> None:
        self.can_move = can_move
        self.window = window
        self._page = config.page_size
        self.pools = {
            GPU_TIER: BlockPool(GPU_TIER, config.gpu_kv_blocks, config.page_size),
            CPU_TIER: BlockPool(CPU_TIER, config.cpu_kv_blocks, config.page_size),
        }
        self.prefixes = Prefixes(config.page_size, self.pools, store) if config.share_prefixes else None
        self.contexts = Contexts(self.cut, config.page_size)
        self.under_way: list[Move] = []
        self._begun: list[Move] = []

    # -- counts ------------------------------------------------------------------------------------------------------

    def need(self, request: Request) -> int:
        """Pages of all its known tokens, but for those that a window has left behind."""
        holder = self.contexts.preempted(request) if self.contexts else None
        return blocks_for(request.num_tokens, self._page) - (holder or request).pages.gone

    def need_at_most(self, request: Request) -> int:
        """Pages of all tokens that it may ever hold, whatever a window leaves behind: it may begin anew."""
        return blocks_for(request.max_cached, self._page)

    def free(self, tier: str) -> int:
        """Pages that are free, or that contexts would give up."""
        free = self.pools[tier].num_free
        if not self.contexts:
            return free
        if self.prefixes is None:
            return free + sum(len(r.pages.on(tier)) for r in self.contexts.at_rest(tier))
        return free + len(self._reclaimable(tier))

    def free_for(self, request: Request, tier: str) -> int:
        """The same, and pages of its first tokens that others hold."""
        free = self.free(tier)
        if self.prefixes is None or self._prefix_tier(request, tier) != tier:
            return free
        pool, lost = self.pools[tier], self._reclaimable(tier)
        return free + sum(1 for page in self.prefixes.found(request, tier) if pool.holders(page) and page not in lost)

    def has_prefix(self, request: Request, tier: str) -> bool:
        """Some of its first tokens need not be computed on ``tier``."""
        return self.prefixes is not None and bool(self.prefixes.found(request, tier))

    def _reclaimable(self, tier: str) -> set[int]:
        """Pages that nobody would hold if contexts gave them up."""
        held = Counter(page for r in self.contexts.at_rest(tier) for page in r.pages.on(tier))
        return {page for page, count in held.items() if self.pools[tier].holders(page) == count}

    # -- a request begins and ends -----------------------------------------------------------------------------------

    def admit(self, request: Request, tier: str, cold: int = 0) -> None:
        """Pages of all its known tokens on ``tier``, where that is the GPU's but for the ``cold`` oldest.

        What a context holds of them is taken up; what lies elsewhere has to come first, and the request is MOVING. One
        that lacks only its newest token decodes on.
        """
        before, request.num_computed = request.num_computed, 0
        request.tier = tier
        taken = self.contexts.take(request) if self.contexts else None
        if taken is not None:
            held, request.num_computed = taken
            request.pages, held.pages = held.pages, PageTable()
        if self.prefixes is not None:
            self._share(request, CPU_TIER if cold else self._prefix_tier(request, tier))
        if request.scheduled_ns is None:
            request.reused_tokens = request.num_computed
        request.recomputed_tokens += max(0, before - request.num_computed)
        then = State.DECODE if request.num_output and request.num_computed == request.num_tokens - 1 else State.PREFILL
        table, need = request.pages, self.need(request)
        come = len(table.cold) - cold if tier == GPU_TIER else len(table.hot)
        if come > 0:
            request.state = State.MOVING
            self._move(request, tier, come, come + need - len(table), then)
            return
        request.state = then
        if cold and not table.hot:
            table.append(CPU_TIER, self._take(CPU_TIER, cold - len(table.cold)))
        table.append(tier, self._take(tier, need - len(table)))

    def preempt(self, request: Request) -> None:
        """A request gives its pages up to whoever needs them. K,V on the CPU tier stay until then, and those of the GPU
        tier go down as far as the CPU tier has pages that are free; the rest has to be computed again."""
        self.computed(request)
        table, count = request.pages, blocks_for(request.num_computed, self._page)
        room = self.pools[CPU_TIER].num_free if self.can_move else 0
        kept = min(count, table.gone + table.num_cold + min(room, len(table.hot)))
        if kept <= table.gone or (table.gone and kept < count):  # what a window still needs is there as a whole or not
            self.give_back(request)
            return
        held = self.contexts.stand_in(request, min(request.num_computed, kept * self._page))
        if held.pages.hot:
            self.move_context(held, CPU_TIER)
        else:
            held.tier = CPU_TIER

    def give_back(self, request: Request) -> None:
        """All pages of a request."""
        self.cut(request, 0)

    def cut(self, request: Request, tokens: int) -> None:
        """Free its pages behind those of its first ``tokens`` tokens."""
        if request.pages.gone + len(request.pages) > (count := blocks_for(tokens, self._page)):
            self._free(request.pages.cut(count))

    def _free(self, pages: dict[str, list[int]]) -> None:
        for tier, dropped in pages.items():
            self.pools[tier].free(dropped)

    def _take(self, tier: str, count: int) -> list[int]:
        """``count`` pages; contexts give some of theirs up where too few are free."""
        pool = self.pools[tier]
        while pool.num_free < count and self.contexts.evict(tier):
            pass
        return pool.allocate(count)

    # -- common prefixes ---------------------------------------------------------------------------------------------

    def computed(self, request: Request) -> None:
        """Whole pages whose K,V the request has can be found from now on."""
        if self.prefixes is not None:
            self.prefixes.computed(request)

    def doubt(self, request: Request) -> None:
        """A request failed: its K,V are not shared any more."""
        if self.prefixes is not None:
            self.prefixes.doubt(request)

    def must_wait(self, request: Request, prefilling: Sequence[Request]) -> bool:
        """The next page of its first tokens is being computed by somebody else; what files hold is loaded before."""
        if self.prefixes is None:
            return False
        self.prefixes.load(request)
        return self.prefixes.in_the_making(request, prefilling)

    def _prefix_tier(self, request: Request, tier: str) -> str:
        """Where the pages come from that a request of ``tier`` may share: the CPU tier where that holds more of them
        and they can come up."""
        assert self.prefixes is not None
        found = self.prefixes.found
        up = tier == GPU_TIER and self.can_move and len(found(request, CPU_TIER)) > len(found(request, GPU_TIER))
        return CPU_TIER if up else tier

    def _share(self, request: Request, source: str) -> None:
        """A request begins with pages of ``source`` that are there already, where they are more than its own. One that
        it would write to is its own: a context that ends inside a page with a name gives that page up."""
        assert self.prefixes is not None
        whole = request.num_computed // self._page
        if request.num_computed % self._page:
            at, last = request.pages.at(whole)
            if self.pools[at].holders(last) > 1 or self.pools[at].name_of(last) is not None:
                request.num_computed = whole * self._page
                self.cut(request, request.num_computed)
        pages = self.prefixes.found(request, source)
        more = len(pages) * self._page - request.num_computed
        if more > 0:
            for page in pages:
                self.pools[source].share(page)
            self.give_back(request)
            request.pages.append(source, pages)
            request.num_computed += more
            self.prefixes.reused_tokens += more

    def lower(self) -> None:
        """Pages of prefixes that nobody holds any more on the GPU tier are copied down, while the CPU tier has pages
        that are free; they stay where they are until somebody needs the room."""
        gpu, cpu = self.pools[GPU_TIER], self.pools[CPU_TIER]
        released, gpu.released, cpu.released = gpu.released, [], []
        if not self.can_move or not released:
            return
        pages = [page for page in dict.fromkeys(released) if not gpu.holders(page)]
        names = {page: name for page in pages if (name := gpu.name_of(page)) and cpu.find(name) is None}
        names = dict(list(names.items())[: cpu.num_free])
        if not names:
            return
        held = Request("prefix", 0, DeclaredTokens(len(names) * self._page), 1, None, 0)
        held.num_computed, held.page_names = held.num_tokens, list(names.values())
        held.state = State.FINISHED  # nobody holds the copies either
        held.pages.append(GPU_TIER, list(names))
        for page in names:
            gpu.share(page)
        self.move_context(held, CPU_TIER)

    # -- a request grows ---------------------------------------------------------------------------------------------

    def reserve(self, request: Request, victims: Victims) -> bool:
        """See to the page of a request's newest token, and give back what a window has left behind; False when it must
        wait for one, or had to give its own.

        When the tier is full, pages are asked for in this order: those that are on their way back, contexts, the
        youngest request of the tier. So the oldest one always advances.
        """
        table, tier = request.pages, request.tier
        if self.window is not None and not request.keep and table.goes_to is None:
            behind = (len(request.token_ids) - self.window) // self._page
            if behind > table.gone:
                self._free(table.leave_behind(behind))
        while (table.gone + len(table.cold) + len(table.hot)) * self._page < len(request.token_ids):
            if self.pools[tier].num_free:
                table.append(tier, self.pools[tier].allocate(1))
            elif not self._make_room(request, victims):
                return False
        return True

    def _make_room(self, request: Request, victims: Victims) -> bool:
        """Free a page of the request's tier; False when it has to wait for one, or had to give its own."""
        tier = request.tier
        if victims.leaving(tier) or any(m.source == tier for m in self._begun):
            return False
        if any(m.then is State.PAUSED or (m.then is None and m.source == tier) for m in self.under_way):
            return False
        return self.contexts.evict(tier) or victims.give_way(request)

    def steps_ahead(self, requests: Sequence[Request], steps: int) -> int:
        """For how many of the next ``steps`` steps, each with a token for every request, the GPU tier has pages; a
        lower bound, halved until they fit."""
        free = self.pools[GPU_TIER].num_free
        while steps > 0 and sum(self._missing(r, steps) for r in requests) > free:
            steps //= 2
        return steps

    def reserve_ahead(self, requests: Sequence[Request], steps: int) -> None:
        """Pages of the GPU tier for ``steps`` tokens more of each request than the newest that has its page; as many
        steps as ``steps_ahead`` said, or fewer."""
        for request in requests:
            missing = self._missing(request, steps - 1)
            if missing > 0:
                request.pages.append(GPU_TIER, self.pools[GPU_TIER].allocate(missing))

    def _missing(self, request: Request, more: int) -> int:
        return blocks_for(request.num_tokens + more, self._page) - request.pages.gone - len(request.pages)

    # -- between the tiers -------------------------------------------------------------------------------------------

    def move(self, request: Request, tier: str) -> None:
        """A request that decodes goes to ``tier``, with room for all its known tokens."""
        count = len(request.pages.on(other(tier)))
        request.tier, request.state = tier, State.MOVING
        self._move(request, tier, count, count + self.need(request) - len(request.pages), State.DECODE)

    def move_context(self, held: Request, tier: str) -> None:
        """A context goes to ``tier``."""
        count = len(held.pages.on(other(tier)))
        held.tier, held.in_flight = tier, True  # room is made of other contexts
        self._move(held, tier, count, count, State.PAUSED)

    def move_pages(self, request: Request, tier: str, count: int) -> None:
        """Down, the ``count`` oldest pages of the GPU tier, or up, the newest of the CPU tier; all are full."""
        self._move(request, tier, count, count, None)

    def _move(self, request: Request, tier: str, count: int, room: int, then: State | None) -> None:
        """``count`` pages of the other tier go to ``room`` pages of ``tier``, or to as many where others lie there."""
        table = request.pages
        pages = tuple(table.hot[:count] if tier == CPU_TIER else table.cold[-count:])
        first = table.gone + len(table.cold) - (0 if tier == CPU_TIER else count)
        tokens = min(request.num_computed, (first + count) * self._page) - first * self._page
        if tier == CPU_TIER:
            table.move_down(count, self._take(tier, room))
        else:
            behind = room - count if table.hot else 0  # follow on those that are there
            table.move_up(count, self._take(tier, room - behind))
            if behind:
                table.append(tier, self._take(tier, behind))
        if then is not None:
            request.in_flight = True
        move = Move(request, other(tier), pages, tokens, then)
        self._begun.append(move)
        self.under_way.append(move)

    def take_begun(self) -> tuple[Move, ...]:
        """Moves begun since the last call, whose copies are to be submitted."""
        begun, self._begun = tuple(self._begun), []
        return begun

    def arrived(self, move: Move) -> None:
        """The copy has ended: the pages that it read are free."""
        left = move.request.pages.arrive()
        self.computed(move.request)
        self._leave(move, left)

    def _leave(self, move: Move, left: list[int]) -> None:
        self.under_way.remove(move)
        self.pools[move.source].free(left)
        if move.then is State.PAUSED:
            self.contexts.arrived(move.request)

    def give_up(self) -> None:
        """Nothing is in flight any more: pages that copies read go back, and every context is forgotten."""
        for move in tuple(self.under_way):
            self._leave(move, move.request.pages.arrive())
        self._begun = []
        self.contexts.clear()
