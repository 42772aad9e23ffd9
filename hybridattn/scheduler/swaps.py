"""Who changes its tier, and what a request does once its K,V has arrived.

    the GPU tier has room   idle (CPU tier)  --swap_in-->  MOVING  --arrived-->  decoding (GPU tier)
                                             --move_up-->  (room for all they may ever hold, and the policy says so)
    the GPU tier is full    decoding         --swap_out->  MOVING  --arrived-->  idle (CPU tier)
    a session pauses        its context      --park----->  rests on the CPU tier

Pages are the KV manager's (``hybridattn.kv.manager``), copies the executor's (``hybridattn.executor.moves``).
"""

from __future__ import annotations

from hybridattn.core.config import EngineConfig
from hybridattn.core.request import Request, State
from hybridattn.core.stages import CPU_TIER, GPU_TIER, TIERS
from hybridattn.kv.manager import KVManager, Move
from hybridattn.policies.base import Policy
from hybridattn.scheduler.finish import Finish
from hybridattn.scheduler.queues import Queues


class Swaps:
    """Moves of one engine. All that begin here are handed out by ``KVManager.take_begun``.

    Attributes
    ----------
    possible : the stages can move K,V at all
    wanted : the policy swaps requests between the tiers
    upwards : the policy moves requests up where the GPU tier has room for good, and down where that is full
    """

    __slots__ = ("_finish", "_kv", "_parks", "_policy", "_queues", "possible", "upwards", "wanted")

    def __init__(self, config: EngineConfig, policy: Policy, queues: Queues, kv: KVManager, finish: Finish) -> None:
        self._queues = queues
        self._kv = kv
        self._policy = policy
        self._finish = finish
        self._parks = kv.can_move and config.pause_tier == CPU_TIER
        self.possible = kv.can_move
        self.wanted = kv.can_move and policy.swap_in_below is not None
        self.upwards = kv.can_move and "move_up" in policy.hooks

    def swap_in(self) -> None:
        """Requests of the CPU tier move up while the GPU tier has room, the oldest first. Pages of contexts are room:
        they give way to whoever runs."""
        total, share = self._kv.pools[GPU_TIER].num_blocks, self._policy.swap_in_below
        assert share is not None
        for request in tuple(self._queues.idle):
            need = self._kv.need(request)
            if total - self._kv.free(GPU_TIER) + need > share * total:
                return
            if request.at_rest:
                self._move(request, GPU_TIER)

    def move_up(self) -> None:
        """Requests of the CPU tier move up, the oldest first, while the policy wants it and the GPU tier has pages for
        all that its requests and they may ever hold."""
        kv, queues = self._kv, self._queues
        room = kv.pools[GPU_TIER].num_blocks
        room -= sum(kv.need_at_most(r) for r in queues.running if r.tier == GPU_TIER)
        gpu_rows = len(queues.decoding)
        cpu_rows, _ = queues.cpu_load()
        for request in tuple(queues.idle):
            if not request.at_rest:
                continue
            room -= kv.need_at_most(request)
            if room < 0 or kv.need(request) > kv.free(GPU_TIER) or not self._policy.move_up(gpu_rows, cpu_rows):
                return
            self._move(request, GPU_TIER)
            gpu_rows, cpu_rows = gpu_rows + 1, cpu_rows - 1

    def swap_out(self, request: Request) -> bool:
        """Move a GPU request down instead of preempting it; False when the CPU tier has no room for it either."""
        if not self.possible or not request.at_rest or self._needs(request, CPU_TIER) > self._kv.free(CPU_TIER):
            return False
        rows = len(self._queues.decoding)
        if self.wanted or (self.upwards and self._policy.move_down(rows, request.num_tokens)):
            self._move(request, CPU_TIER)
            return True
        return False

    def move(self, request: Request, tier: str) -> bool:
        """Begin to move a request that decodes to ``tier`` now; False when it cannot: a row of it is in flight, its
        prompt is under way, it is there already, or there is no room."""
        if tier not in TIERS or not self.possible or request.tier == tier:
            return False
        if not request.at_rest or self._needs(request, tier) > self._kv.free(tier):
            return False
        self._move(request, tier)
        return True

    def park(self) -> None:
        """Contexts of sessions that have paused leave the GPU tier where the engine is configured so, as far as the CPU
        tier has pages that are free."""
        if not self._parks or not self._kv.contexts:
            return
        for held in self._kv.contexts.at_rest(GPU_TIER):
            if len(held.pages.hot) <= self._kv.pools[CPU_TIER].num_free:
                self._kv.move_context(held, CPU_TIER)

    def arrived(self, move: Move, now_ns: int) -> None:
        """The copy of a move has ended."""
        request = move.request
        self._kv.arrived(move)
        if move.then is State.PAUSED:
            return
        if request.state is State.LEAVING:
            self._finish.released(request, now_ns)
            return
        if move.then is None:
            return
        request.in_flight = False
        request.state = move.then
        self._queues.join(request)

    def _needs(self, request: Request, tier: str) -> int:
        """Pages of ``tier`` that a request takes with all it has."""
        return self._kv.need(request) - len(request.pages.on(tier))

    def _move(self, request: Request, tier: str) -> None:
        self._queues.step_out(request)
        self._kv.move(request, tier)
