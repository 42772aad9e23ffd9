"""The pages of one request: which of them lie on which tier, in order of position.

The oldest pages may lie on the CPU tier (``cold``), the newest on the GPU tier (``hot``):

    position    0 ------------------------> newest
    cold        |c0|c1|
    hot               |h0|h1|h2|
    arriving          |a0|                  h0 is on its way down: read as h0 and held as a0 too, until the copy ends

A request of one tier has all its pages in one of the two lists. Pages that a sliding window has left behind are in
neither: ``gone`` counts them, and the first page that is read stands at that index.
"""

from __future__ import annotations

from hybridattn.core.errors import InputError

GPU_TIER, CPU_TIER = "gpu", "cpu"
TIERS = (GPU_TIER, CPU_TIER)


def other(tier: str) -> str:
    """The tier that ``tier`` is not."""
    return CPU_TIER if tier == GPU_TIER else GPU_TIER


class PageTable:
    """Numbers of pages only: who may give them away is the KV manager (``hybridattn.kv.manager``).

    ``cold`` and ``hot`` are extended or replaced by other lists, never changed in another way: who knows a list and its
    length knows its pages.

    Attributes
    ----------
    cold, hot : pages of the CPU tier and of the GPU tier that are read; the positions of ``hot`` follow on ``cold``
    gone : oldest pages that were given back
    arriving : pages of the tier ``goes_to`` that a copy under way writes
    goes_to : that tier; None when nothing is on its way
    """

    __slots__ = ("_leaving", "arriving", "cold", "goes_to", "gone", "hot")

    def __init__(self, cold: list[int] | None = None, hot: list[int] | None = None) -> None:
        self.cold = cold or []
        self.hot = hot or []
        self.gone = 0
        self.arriving: list[int] = []
        self.goes_to: str | None = None
        self._leaving = 0  # pages that the copy under way reads

    def __len__(self) -> int:
        """Pages that are read; those that only a copy writes do not count."""
        return len(self.cold) + len(self.hot)

    @property
    def num_cold(self) -> int:
        """Pages read on the CPU tier."""
        return len(self.cold)

    @property
    def stays_cold(self) -> int:
        """Pages of the CPU tier that are not on their way to the other."""
        return len(self.cold) - (self._leaving if self.goes_to == GPU_TIER else 0)

    def on(self, tier: str) -> list[int]:
        """The pages of a tier that are read, in order of position."""
        return self.hot if tier == GPU_TIER else self.cold

    def held(self, tier: str) -> list[int]:
        """The pages of a tier that nobody else may have: those that are read, and those that a copy writes."""
        return self.on(tier) + self.arriving if self.goes_to == tier else list(self.on(tier))

    def at(self, index: int) -> tuple[str, int]:
        """Where page ``index`` (counted from position 0) is read, and its number there; InputError when the request has
        no such page."""
        at = index - self.gone
        if not 0 <= at < len(self):
            raise InputError(f"page table: page {index}, there are {self.gone} to {self.gone + len(self) - 1}")
        return (CPU_TIER, self.cold[at]) if at < len(self.cold) else (GPU_TIER, self.hot[at - len(self.cold)])

    def append(self, tier: str, pages: list[int]) -> None:
        """Pages for the tokens to come. InputError on the CPU tier behind pages of the GPU tier, and while the newest
        page is on its way."""
        if tier == CPU_TIER and self.hot:
            raise InputError(f"page table: a page of the cpu tier cannot follow on {len(self.hot)} of the gpu tier")
        if self.goes_to is not None and (not self.hot if self.goes_to == GPU_TIER else self._leaving == len(self.hot)):
            raise InputError(f"page table: nothing can follow on a page that is on its way to the {self.goes_to} tier")
        self.on(tier).extend(pages)

    def move_down(self, count: int, pages: list[int]) -> None:
        """The oldest ``count`` pages of the GPU tier are on their way to ``pages`` of the CPU tier.

        ``pages`` may be more where all go: the rest is room for tokens to come. InputError when fewer are there, or
        while others are on their way.
        """
        self._begin(CPU_TIER, count, self.hot, pages, all_go=count == len(self.hot))

    def move_up(self, count: int, pages: list[int]) -> None:
        """The newest ``count`` pages of the CPU tier are on their way to ``pages`` of the GPU tier, which may be more
        where none lies there yet (see :meth:`move_down`)."""
        self._begin(GPU_TIER, count, self.cold, pages, all_go=not self.hot)

    def _begin(self, tier: str, count: int, source: list[int], pages: list[int], all_go: bool) -> None:
        if self.goes_to is not None:
            raise InputError(f"page table: pages are on their way to the {self.goes_to} tier")
        if not 1 <= count <= len(source):
            raise InputError(f"page table: {count} pages to move to the {tier} tier of the {len(source)} of the other")
        if len(pages) < count or (len(pages) > count and not all_go):
            raise InputError(f"page table: {count} pages cannot move to {len(pages)} of the {tier} tier")
        self.goes_to, self.arriving, self._leaving = tier, list(pages), count

    def arrive(self) -> list[int]:
        """The copy has ended: what was arriving is read from now on. Returns the pages that it was read from."""
        count = self._leaving
        if self.goes_to == CPU_TIER:
            left, self.hot = self.hot[:count], self.hot[count:]
            self.cold = self.cold + self.arriving
        else:
            at = len(self.cold) - count
            self.cold, left = self.cold[:at], self.cold[at:]
            self.hot = self.arriving + self.hot
        self.goes_to, self.arriving, self._leaving = None, [], 0
        return left

    def cut(self, count: int) -> dict[str, list[int]]:
        """Keep pages up to index ``count``; returns the others by tier. InputError while pages are on their way."""
        self.gone = min(self.gone, count)
        newer = self._cut_at(count)
        dropped = {CPU_TIER: self.cold[newer[0] :], GPU_TIER: self.hot[newer[1] :]}
        self.cold, self.hot = self.cold[: newer[0]], self.hot[: newer[1]]
        return dropped

    def leave_behind(self, count: int) -> dict[str, list[int]]:
        """Give back the pages before index ``count``; returns them by tier. InputError while pages are on their way."""
        older = self._cut_at(count)
        left = {CPU_TIER: self.cold[: older[0]], GPU_TIER: self.hot[: older[1]]}
        self.cold, self.hot = self.cold[older[0] :], self.hot[older[1] :]
        self.gone = max(self.gone, count)
        return left

    def _cut_at(self, index: int) -> tuple[int, int]:
        """How many pages of each list stand before page ``index``."""
        if self.goes_to is not None:
            raise InputError(f"page table: pages are on their way to the {self.goes_to} tier")
        count = max(0, index - self.gone)
        return min(count, len(self.cold)), max(0, count - len(self.cold))
