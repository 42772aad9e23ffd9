"""Block pools: which pages of a tier are free. Pure bookkeeping; the bytes live in ``hybridattn.kv.storage``."""

from __future__ import annotations

from hybridattn.core.errors import CapacityError, InputError


def blocks_for(num_tokens: int, page_size: int) -> int:
    """Pages that ``num_tokens`` tokens need."""
    return -(-num_tokens // page_size)


class BlockPool:
    """Pages ``0 .. num_blocks - 1`` of one tier. All of them can be used: none is set aside.

    Freed pages are handed out again last-in first-out, so a small working set stays warm in the caches.
    """

    def __init__(self, tier: str, num_blocks: int, page_size: int) -> None:
        if num_blocks < 0 or page_size < 1:
            raise InputError(
                f"{tier} pool: num_blocks must be >= 0 and page_size >= 1, got {num_blocks} and {page_size}"
            )
        self.tier = tier
        self.num_blocks = num_blocks
        self.page_size = page_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages; CapacityError, and nothing taken, when fewer are free."""
        if count > len(self._free):
            raise CapacityError(
                f"{self.tier} pool: {count} blocks wanted, {len(self._free)} of {self.num_blocks} are free"
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._used[block] = 1
        return taken

    def free(self, blocks: list[int]) -> None:
        """Give pages back; InputError when one is not in use (freed twice, or of another pool)."""
        for block in blocks:
            if not 0 <= block < self.num_blocks or not self._used[block]:
                raise InputError(f"{self.tier} pool: block {block} is not in use")
            self._used[block] = 0
        self._free.extend(reversed(blocks))
