"""Which of the oldest pages of GPU-tier requests lie on the CPU tier.

    admission               what the GPU tier has no room for begins on the CPU tier: prompts are handed down there
    the GPU tier is full    pages of the youngest request go down     hot --sink-->  cold     it decodes all the while
    it has room for good    pages of the oldest request come up       cold --lift--> hot

The page of a request's newest token is always hot. How many pages may or should be cold, the policy says.
"""

from __future__ import annotations

from hybridattn.core.config import EngineConfig
from hybridattn.core.params import as_integer
from hybridattn.core.request import Request
from hybridattn.core.stages import CPU_TIER, GPU_TIER, Batch
from hybridattn.kv.manager import KVManager
from hybridattn.policies.answers import refused
from hybridattn.policies.base import ColdView, Policy
from hybridattn.scheduler.queues import Queues

MOST_MOVED = 8  # pages that one request moves at a time: what a step sends and fetches waits behind them


class ColdPages:
    """``wanted``: the policy splits requests over both tiers, and the stages can move K,V."""

    __slots__ = ("_kv", "_page", "_policy", "_queues", "wanted")

    def __init__(self, config: EngineConfig, policy: Policy, queues: Queues, kv: KVManager) -> None:
        self._policy = policy
        self._queues = queues
        self._kv = kv
        self._page = config.page_size
        self.wanted = kv.can_move and "cold_pages" in policy.hooks

    def at_admission(self, request: Request, waits: bool) -> int | None:
        """How many pages of a request that would begin now are cold; None: it waits, or where ``waits`` is False goes
        elsewhere."""
        kv, need = self._kv, self._kv.need(request)
        cold = self._cold()
        least, most = self._bounds(need, cold)
        lacking, possible = max(0, need - kv.free(GPU_TIER)), min(need - 1, kv.free(CPU_TIER))
        if lacking and lacking > min(most - cold, kv.free(CPU_TIER)):
            return None
        if lacking > possible:  # not even the newest page has room: some is made for those that wait
            if waits and not self._coming():
                self.sink(min(len(self._queues.waiting), MOST_MOVED))
            return None
        return max(lacking, min(least - cold, possible))

    def busy(self, batch: Batch) -> bool:
        """Pages may be on their way in the steps to come, beside what rows that grow want."""
        return self.wanted and (bool(batch.split) or not self._policy.cold_only_when_full)

    def balance(self) -> None:
        """Pages for the next step's tokens: those that lack on the GPU tier are made free while this step runs. Beside
        that, as many cold pages as the policy wants at least, and no more where the GPU tier has room for good."""
        kv, decoding = self._kv, self._queues.decoding
        cold = self._cold()
        least, _ = self._bounds(0, cold)
        lacking = sum(r.num_tokens % self._page == 0 for r in decoding) - kv.free(GPU_TIER)
        if (count := max(lacking, least - cold) - self._coming()) > 0:
            self.sink(count)
        elif cold > least and lacking < 0:
            ever = sum(kv.need_at_most(r) for r in self._queues.running if r.tier == GPU_TIER)
            self._lift(min(cold - least, kv.pools[GPU_TIER].num_blocks - (ever - cold), -lacking))

    def sink(self, count: int) -> bool:
        """Up to ``count`` pages go down, those of the youngest request first; False where none can."""
        free = self._kv.free(CPU_TIER)
        begun = False
        for request in reversed(self._queues.decoding):
            newest = min((request.num_tokens - 1) // self._page - request.pages.gone, len(request.pages) - 1)
            full = newest - len(request.pages.cold)
            move = min(count, full, free, MOST_MOVED)
            if move > 0 and request.at_rest:
                self._kv.move_pages(request, CPU_TIER, move)
                begun, count, free = True, count - move, free - move
        return begun

    def _lift(self, count: int) -> None:
        for request in self._queues.decoding:
            move = min(count, len(request.pages.cold), MOST_MOVED)
            if move > 0 and request.at_rest:
                self._kv.move_pages(request, GPU_TIER, move)
                count -= move

    def _coming(self) -> int:
        """Pages of the GPU tier that will be free when they have gone down."""
        return sum(len(m.pages) for m in self._kv.under_way if m.source == GPU_TIER)

    def _cold(self) -> int:
        return sum(len(r.pages.cold) for r in self._queues.running if r.tier == GPU_TIER)

    def _bounds(self, more: int, cold: int) -> tuple[int, int]:
        """What the policy says of the requests that run on the GPU tier, beside a new one of ``more`` pages."""
        running = [len(r.pages) for r in self._queues.running if r.tier == GPU_TIER]
        total = self._kv.pools[GPU_TIER].num_blocks
        view = ColdView(len(running) + (more > 0), sum(running) + more, cold, total, self._page)
        bounds = self._policy.cold_pages(view)
        if not isinstance(bounds, tuple | list) or [as_integer(n) is None for n in bounds] != [False, False]:
            raise refused(self._policy, "cold_pages", "two numbers of pages", bounds)
        return bounds[0], bounds[1]
