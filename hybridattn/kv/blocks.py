"""Block pools: which pages of a tier are free. Pure bookkeeping; the bytes live in ``hybridattn.kv.storage``."""

from __future__ import annotations

from collections.abc import Callable

from hybridattn.core.errors import CapacityError, InputError


def blocks_for(num_tokens: int, page_size: int) -> int:
    """Pages that ``num_tokens`` tokens need."""
    return -(-num_tokens // page_size)


class BlockPool:
    """Pages ``0 .. num_blocks - 1`` of one tier. All of them can be used: none is set aside.

        free --allocate--> 1 holder --share--> 2 holders --free--> 1 holder --free--> free

    A page with a name, by which its content can be found, keeps that content while it is free, until it is handed out
    again: pages without a name go first, last-in first-out, so that a small working set stays warm in the caches; then
    those with a name that nobody held for the longest.

    Attributes
    ----------
    released : pages with a name that nobody holds any more, since somebody last emptied this list
    on_forget : called with a page and its name before its content is given up
    """

    def __init__(self, tier: str, num_blocks: int, page_size: int) -> None:
        if num_blocks < 0 or page_size < 1:
            raise InputError(
                f"{tier} pool: num_blocks must be >= 0 and page_size >= 1, got {num_blocks} and {page_size}"
            )
        try:
            self._free, self._holders = list(range(num_blocks - 1, -1, -1)), [0] * num_blocks
        except (MemoryError, OverflowError) as error:
            raise InputError(f"{tier} pool: this machine has too little memory to list {num_blocks} blocks") from error
        self.tier = tier
        self.num_blocks = num_blocks
        self.page_size = page_size
        self.released: list[int] = []
        self.on_forget: Callable[[int, bytes], None] = lambda page, name: None
        self._unheld: dict[int, None] = {}  # free pages with a name, those that were given back first in front
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._unheld)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages; CapacityError, and nothing taken, when fewer are free."""
        if count > self.num_free:
            raise CapacityError(
                f"{self.tier} pool: {count} blocks wanted, {self.num_free} of {self.num_blocks} are free"
            )
        while len(self._free) < count:
            page = next(iter(self._unheld))
            self.on_forget(page, self._names[page])
            self.forget(page)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, page: int) -> None:
        """One holder more for a page with a name, or with a holder."""
        self._unheld.pop(page, None)
        self._holders[page] += 1

    def free(self, blocks: list[int]) -> None:
        """Give pages back; InputError when one is not in use (freed twice, or of another pool)."""
        for block in reversed(blocks):
            if not 0 <= block < self.num_blocks or not self._holders[block]:
                raise InputError(f"{self.tier} pool: block {block} is not in use")
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._names:
                self._unheld[block] = None
                self.released.append(block)
            else:
                self._free.append(block)

    # -- pages that can be found again ---------------------------------------------------------------------------------

    def name(self, page: int, name: bytes) -> None:
        """A page that is held can be found by ``name`` from now on, unless another already is."""
        if page not in self._names and name not in self._named:
            self._names[page], self._named[name] = name, page

    def name_of(self, page: int) -> bytes | None:
        return self._names.get(page)

    def find(self, name: bytes) -> int | None:
        return self._named.get(name)

    def forget(self, page: int) -> None:
        """A page loses its name, if it has one."""
        name = self._names.pop(page, None)
        if name is not None:
            del self._named[name]
            if page in self._unheld:
                del self._unheld[page]
                self._free.append(page)

    def named(self) -> list[tuple[int, bytes]]:
        """All pages that have a name, with it."""
        return list(self._names.items())
