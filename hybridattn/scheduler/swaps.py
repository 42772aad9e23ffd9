"""K,V that change their tier: who moves, which blocks are held meanwhile, what a request does once it has arrived.

    blocks of the old tier   |---------- held, read by the copy ----------|free
    blocks of the new tier   |---------- held, written by the copy -------|held
    request                  |MOVING: no row of it runs                   |decodes on, prefills, or pauses
    driver                   begin                                        moved

The copies themselves are the executor's (``hybridattn.executor.moves``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridattn.core.request import Request, State
from hybridattn.core.stages import CPU_TIER, GPU_TIER, TIERS
from hybridattn.policies.base import Policy
from hybridattn.scheduler.queues import Queues
from hybridattn.scheduler.room import Room


@dataclass(frozen=True, slots=True)
class Move:
    """A request whose K,V goes to the tier that it now names; ``blocks`` of the other tier are held until then.

    ``then`` is what it does next: decode on, prefill what a session's turn adds to its context, or pause.
    """

    request: Request
    blocks: tuple[int, ...]
    tokens: int
    then: State = State.DECODE

    @property
    def source(self) -> str:
        return CPU_TIER if self.request.tier == GPU_TIER else GPU_TIER


class Swaps:
    """Moves of one engine.

    Attributes
    ----------
    possible : the stages can move K,V at all
    wanted : the policy swaps requests between the tiers
    begun : those that begin with the step that is being scheduled
    under_way : begun and not known to have arrived
    """

    __slots__ = ("_policy", "_queues", "_released", "_room", "begun", "possible", "under_way", "wanted")

    def __init__(
        self,
        queues: Queues,
        room: Room,
        policy: Policy,
        can_move: bool,
        released: Callable[[Request, int], None],
    ) -> None:
        self._queues = queues
        self._room = room
        self._policy = policy
        self._released = released
        self.possible = can_move
        self.wanted = can_move and policy.swap_in_below is not None
        self.begun: list[Move] = []
        self.under_way: list[Move] = []

    # -- who moves ---------------------------------------------------------------------------------------------------

    def swap_in(self) -> None:
        """Requests of the CPU tier move up while the GPU tier has room, the oldest first."""
        pool, share = self._room.pools[GPU_TIER], self._policy.swap_in_below
        assert share is not None
        for request in tuple(self._queues.idle):
            need = self._room.need(request)
            if pool.num_blocks - pool.num_free + need > share * pool.num_blocks:
                return
            if request.state is State.DECODE and not request.in_flight:
                self._move(request, GPU_TIER)

    def swap_out(self, request: Request) -> bool:
        """Move a GPU request down instead of preempting it; False when the CPU tier has no room for it either."""
        need = self._room.need(request)
        if not self.wanted or request.state is not State.DECODE or need > self._room.free(CPU_TIER):
            return False
        self._move(request, CPU_TIER)
        return True

    def move(self, request: Request, tier: str) -> Move | None:
        """Begin to move a request that decodes to ``tier`` now; None when it cannot: a row of it is in flight, its
        prompt is under way, it is there already, or there is no room."""
        if tier not in TIERS or not self.possible or request.tier == tier:
            return None
        need = self._room.need(request)
        if request.state is not State.DECODE or request.in_flight or need > self._room.free(tier):
            return None
        self._move(request, tier)
        return self.begun.pop()

    def park(self) -> tuple[Move, ...]:
        """Contexts of sessions that have paused leave the GPU tier, as far as the CPU tier has room that is free."""
        self.begun = []
        for held in self._room.contexts.on_gpu():
            if len(held.blocks) <= self._room.pools[CPU_TIER].num_free:
                self.move_context(held, CPU_TIER)
        return tuple(self.begun)

    def _move(self, request: Request, tier: str) -> None:
        self._queues.step_out(request)
        request.num_computed = request.num_tokens - 1  # the newest token has no K,V yet
        blocks = tuple(request.blocks)
        request.blocks = self._room.take(tier, self._room.need(request))
        request.tier = tier
        request.state = State.MOVING
        self.begin(Move(request, blocks, request.num_computed))

    def move_context(self, held: Request, tier: str) -> None:
        blocks = tuple(held.blocks)
        held.blocks = self._room.take(tier, len(blocks))
        held.tier = tier
        self.begin(Move(held, blocks, held.num_computed, State.PAUSED))

    # -- on the way --------------------------------------------------------------------------------------------------

    def begin(self, move: Move) -> None:
        move.request.in_flight = True
        self.begun.append(move)
        self.under_way.append(move)

    def moved(self, move: Move, now_ns: int) -> None:
        """The K,V of a moving request has arrived."""
        request = move.request
        self.under_way.remove(move)
        self._room.pools[move.source].free(list(move.blocks))
        if move.then is State.PAUSED:
            self._room.contexts.arrived(request)
            return
        if request.state is State.LEAVING:
            self._released(request, now_ns)
            return
        request.in_flight = False
        request.state = move.then
        self._queues.join(request)

    def give_up(self) -> None:
        """Nothing is in flight any more: blocks that were moved from go back, and every context is forgotten."""
        contexts = self._room.contexts
        for move in self.under_way:
            self._room.pools[move.source].free(list(move.blocks))
            if move.request.state is State.FINISHED:  # a context that was dropped on its way
                contexts.arrived(move.request)
        self.under_way.clear()
        contexts.clear()

    def held(self, tier: str) -> list[int]:
        """Blocks of a tier that moves under way still read from."""
        return [b for m in self.under_way if m.source == tier for b in m.blocks]
