"""Pages that requests with the same first tokens may share.

    tokens    |the system prompt, three pages of it|question a|     holders of p0 p1 p2 while both run: 2
              |                                    |question b|     pages that only a question fills are its own
    name      n0 = H(salt, page 0)  n1 = H(n0, page 1)  n2 = H(n1, page 2)

A page is found by the digest of all tokens up to its end, so that equal names mean equal K,V; the salt of a request
goes into the first digest, so that requests of different salts never find each other's pages. Only whole pages are
shared: the page that a request writes to is its own, and so is a copy that it carries to another tier.

Nobody's pages stay until they are needed, those that rested for the longest go first, and they go down: copied to the
CPU tier as soon as nobody holds them, to the file tier (``hybridattn.kv.store``) as the CPU tier needs their room.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from hybridattn.core.page_table import CPU_TIER, GPU_TIER
from hybridattn.core.request import DeclaredTokens, Request
from hybridattn.kv.blocks import BlockPool

DIGEST_BYTES = 16


class PageStore(Protocol):
    """Where pages of the CPU tier survive (``hybridattn.kv.store``)."""

    def has(self, name: bytes) -> bool: ...

    def save(self, name: bytes, page: int) -> None:
        """Keep the content of a page of the CPU tier."""
        ...

    def load(self, name: bytes, page: int) -> bool:
        """Fill a page of the CPU tier; False: what was kept is gone or is refused."""
        ...


class Prefixes:
    """Names of pages, for the pools of one engine.

    Attributes
    ----------
    reused_tokens : tokens that a request found instead of computing them
    """

    __slots__ = ("_page", "_pools", "reused_tokens", "store")

    def __init__(self, page_size: int, pools: dict[str, BlockPool], store: PageStore | None = None) -> None:
        self._page = page_size
        self._pools = pools
        self.store = store
        self.reused_tokens = 0
        if store is not None:
            pools[CPU_TIER].on_forget = lambda page, name: store.save(name, page)

    def names(self, request: Request) -> list[bytes]:
        """Digests of the whole pages of its known tokens; of declared ones, those that are said to be shared."""
        tokens, names, size = request.token_ids, request.page_names, self._page
        declared = isinstance(tokens, DeclaredTokens)
        whole = (tokens.shared if declared else len(tokens)) // size
        for i in range(len(names), whole):
            before = names[-1] if names else blake2b(_salt(request), digest_size=DIGEST_BYTES).digest()
            ids = b"" if declared else array("q", tokens[i * size : (i + 1) * size]).tobytes()
            names.append(blake2b(before + ids, digest_size=DIGEST_BYTES).digest())
        return names

    def computed(self, request: Request) -> None:
        """Name the whole pages of a request whose K,V it has."""
        if not request.pages:
            return
        names, gone = self.names(request)[: request.num_computed // self._page], request.pages.gone
        for i, name in enumerate(names[gone:], gone):
            tier, page = request.pages.at(i)
            self._pools[tier].name(page, name)

    def doubt(self, request: Request) -> None:
        """Nobody finds the pages of a request that failed."""
        for tier, pool in self._pools.items():
            for page in request.pages.on(tier):
                pool.forget(page)

    def found(self, request: Request, tier: str) -> list[int]:
        """Pages of a tier that hold its first tokens; one token at least is left to compute."""
        find, pages = self._pools[tier].find, []
        for name in self.names(request)[: (request.num_tokens - 1) // self._page]:
            page = find(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def in_the_making(self, request: Request, others: Sequence[Request]) -> bool:
        """The first page that it does not find is being computed by one of ``others``."""
        at = max(len(self.found(request, tier)) for tier in self._pools)
        wanted = self.names(request)[: (request.num_tokens - 1) // self._page][at : at + 1]
        return bool(wanted) and any(
            self.names(r)[at : at + 1] == wanted and r.num_computed < (at + 1) * self._page for r in others
        )

    def load(self, request: Request) -> None:
        """What files hold of its first tokens, behind those that the CPU tier or the GPU tier holds, comes to free
        pages of the CPU tier."""
        store, pool = self.store, self._pools[CPU_TIER]
        if store is None:
            return
        known = self.found(request, CPU_TIER)
        wanted = self.names(request)[len(known) : (request.num_tokens - 1) // self._page]
        if not wanted or not store.has(wanted[0]) or len(self.found(request, GPU_TIER)) > len(known):
            return
        for page in known:
            pool.share(page)  # or room for the next page would be made of these
        for name in wanted:
            if not pool.num_free or not store.has(name):
                break
            (page,) = pool.allocate(1)
            known.append(page)
            if not store.load(name, page):
                break
            pool.name(page, name)
        pool.free(known)

    def save_all(self) -> None:
        """Files of all that the CPU tier holds."""
        if self.store is not None:
            for page, name in self._pools[CPU_TIER].named():
                self.store.save(name, page)


def _salt(request: Request) -> bytes:
    return getattr(request.params, "cache_salt", "").encode()
