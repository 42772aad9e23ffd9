"""Pages for the tokens to come: one more for each row of a step, or many steps ahead where nothing else can happen.

The oldest request reserves first. When a tier is full, blocks are asked for in this order: those on their way back,
contexts of sessions, then the youngest request of the tier, which moves down where the policy swaps and is preempted
otherwise. So the oldest one always advances.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridattn.core.request import Request, State
from hybridattn.core.stages import GPU_TIER, Batch
from hybridattn.kv.blocks import blocks_for
from hybridattn.scheduler.queues import Queues, arrival
from hybridattn.scheduler.room import Room
from hybridattn.scheduler.swaps import Swaps


class Reservation:
    """Gives running requests their next pages. ``preempt`` takes a request's blocks away."""

    __slots__ = ("_page", "_preempt", "_queues", "_room", "_swaps")

    def __init__(
        self, queues: Queues, room: Room, swaps: Swaps, page_size: int, preempt: Callable[[Request], None]
    ) -> None:
        self._queues = queues
        self._room = room
        self._swaps = swaps
        self._page = page_size
        self._preempt = preempt

    def newest(self, request: Request) -> bool:
        """Make sure that the page of the request's newest token is there; False when it must wait or was preempted."""
        if len(request.blocks) * self._page >= len(request.token_ids):
            return True
        pool = self._room.pools[request.tier]
        while len(request.blocks) * self._page < request.num_tokens:
            if pool.num_free:
                request.blocks += pool.allocate(1)
            elif not self._make_room(request):
                return False
        return True

    def _make_room(self, request: Request) -> bool:
        """Free a block of the request's tier; False when it has to wait for one, or had to give its own."""
        tier, running, swaps = request.tier, self._queues.running, self._swaps
        if any(r.state is State.LEAVING and r.tier == tier for r in running):
            return False  # blocks are on their way back
        if any(m.source == tier for m in swaps.begun):
            return False  # as above, once a move is through
        if self._room.contexts.evict(tier):
            return True
        if any(m.source == tier and m.then is State.PAUSED for m in swaps.under_way):
            return False
        victim = max((r for r in running if r.tier == tier and r.blocks), key=_younger)
        if tier == GPU_TIER and swaps.swap_out(victim):
            return False
        self._preempt(victim)
        return victim is not request

    # -- many steps ahead -------------------------------------------------------------------------------------------

    def quiet_steps(self, batch: Batch) -> int:
        """How many steps after the coming one are certain to have exactly its rows: until one ends or blocks run out.

        The caller stops earlier when a request arrives. 0 where anything else may happen: prompts under way, CPU rows,
        or a queue whose head might be admitted.
        """
        queues = self._queues
        if queues.prefilling or queues.idle or len(queues.decoding) != len(batch.segments):
            return 0
        if len(queues.running) != len(queues.decoding):
            return 0
        steps = min(r.max_tokens - r.num_output for r in queues.decoding) - 1
        free = self._room.pools[GPU_TIER].num_free
        while steps > 0 and sum(self._missing(r, steps) for r in queues.decoding) > free:
            steps //= 2
        return max(0, steps)

    def ahead(self, batch: Batch, steps: int) -> None:
        """Pages for ``steps`` steps beyond what is known, for every row; never more than ``quiet_steps`` said."""
        pool = self._room.pools[GPU_TIER]
        for s in batch.segments:
            request = s.request
            assert isinstance(request, Request)
            missing = self._missing(request, steps - 1)
            if missing > 0:
                request.blocks += pool.allocate(missing)

    def _missing(self, request: Request, more: int) -> int:
        return blocks_for(request.num_tokens + more, self._page) - len(request.blocks)


def _younger(request: Request) -> tuple[bool, int, int]:
    """Who gives blocks back first: the youngest; one whose K,V is on its way comes last, or it moved for nothing."""
    return request.state is not State.MOVING, *arrival(request)
