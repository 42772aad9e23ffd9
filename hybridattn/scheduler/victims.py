"""Who gives pages up when a tier is full."""

from __future__ import annotations

from hybridattn.core.request import Request, State
from hybridattn.core.stages import GPU_TIER
from hybridattn.scheduler.cold_pages import ColdPages
from hybridattn.scheduler.finish import Finish
from hybridattn.scheduler.queues import Queues, arrival
from hybridattn.scheduler.swaps import Swaps


class Victims:
    """The youngest request of a tier: where the policy splits or swaps requests, its oldest pages or all of them go
    down and it goes on; it is preempted otherwise."""

    __slots__ = ("_cold_pages", "_finish", "_queues", "_swaps")

    def __init__(self, queues: Queues, swaps: Swaps, cold_pages: ColdPages, finish: Finish) -> None:
        self._queues = queues
        self._swaps = swaps
        self._cold_pages = cold_pages
        self._finish = finish

    def leaving(self, tier: str) -> bool:
        """Some request will give its pages of the tier back by itself, soon."""
        return any(r.state is State.LEAVING and r.pages.held(tier) for r in self._queues.running)

    def give_way(self, request: Request) -> bool:
        """Take the pages of the youngest request of ``request``'s tier. False when ``request`` has to wait for them,
        or was the youngest itself."""
        tier = request.tier
        if tier == GPU_TIER and self._cold_pages.wanted and self._cold_pages.sink(1):
            return False
        youngest = max((r for r in self._queues.running if r.tier == tier and r.pages), key=_younger)
        if tier == GPU_TIER and self._swaps.swap_out(youngest):
            return False
        self._finish.preempt(youngest)
        return youngest is not request


def _younger(request: Request) -> tuple[bool, int, int]:
    """Order of age; one whose K,V is on its way counts as the oldest, or it would have moved for nothing."""
    return request.state is not State.MOVING, *arrival(request)
