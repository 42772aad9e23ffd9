"""Blocks of both tiers: what is free, and what contexts of sessions would give up."""

from __future__ import annotations

from hybridattn.core.config import EngineConfig
from hybridattn.core.request import Request
from hybridattn.core.stages import CPU_TIER, GPU_TIER
from hybridattn.kv.blocks import BlockPool, blocks_for
from hybridattn.policies.base import RequestView, TierView
from hybridattn.scheduler.contexts import Contexts


class Room:
    """The pools of an engine and the contexts that live in them; running requests come first."""

    __slots__ = ("_page", "contexts", "pools")

    def __init__(self, config: EngineConfig) -> None:
        self._page = config.page_size
        self.pools = {
            GPU_TIER: BlockPool(GPU_TIER, config.gpu_kv_blocks, config.page_size),
            CPU_TIER: BlockPool(CPU_TIER, config.cpu_kv_blocks, config.page_size),
        }
        self.contexts = Contexts(self.pools, config.page_size)

    def need(self, request: Request) -> int:
        """Blocks of all its known tokens."""
        return blocks_for(request.num_tokens, self._page)

    def free(self, tier: str) -> int:
        """Blocks that are free, or that contexts of sessions would give up."""
        return self.pools[tier].num_free + (self.contexts.reclaimable(tier) if self.contexts else 0)

    def take(self, tier: str, count: int) -> list[int]:
        """``count`` blocks; contexts of sessions give theirs up where too few are free."""
        pool = self.pools[tier]
        while pool.num_free < count and self.contexts.evict(tier):
            pass
        return pool.allocate(count)

    def give_back(self, request: Request) -> None:
        """All blocks of a request: what it knows has to be computed again."""
        if request.blocks:
            self.pools[request.tier].free(request.blocks)
        request.blocks = []
        request.num_computed = 0

    def request_view(self, request: Request) -> RequestView:
        return RequestView(request.index, self.need(request), blocks_for(request.max_cached, self._page))

    def tier_view(self, tier: str) -> TierView:
        return TierView(self.free(tier), self.pools[tier].num_blocks)
