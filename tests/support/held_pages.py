"""Where every page of an engine is, after any step."""

from __future__ import annotations

from collections import Counter


def check_pages(engine):
    """Every page is held once or free, and none by a request that waits."""
    queues = engine.scheduler.queues
    check_held(engine.kv, queues.running)
    assert all(not r.pages for r in queues.waiting)


def check_held(kv, running):
    """Every page is held or free: by a request, by a context, by one side of a copy under way; and by one of them only
    unless prefixes are shared."""
    on_their_way = [m.request for m in kv.under_way]  # a context that was dropped meanwhile is in no other place
    holders = {id(r): r for r in [*running, *kv.contexts, *on_their_way]}.values()
    for tier, pool in kv.pools.items():
        held = Counter(page for r in holders for page in r.pages.held(tier))
        assert all(pool.holders(page) == held[page] for page in range(pool.num_blocks))
        assert len(held) + pool.num_free == pool.num_blocks
        assert kv.prefixes is not None or max(held.values(), default=1) == 1


def check_empty(engine):
    """Nobody is left and every page is free."""
    assert engine.unfinished == 0 and not engine.kv.contexts and not engine.kv.under_way
    assert all(pool.num_free == pool.num_blocks for pool in engine.kv.pools.values())
