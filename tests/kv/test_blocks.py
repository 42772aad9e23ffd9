"""Block pools conserve blocks whatever is asked of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.errors import CapacityError, InputError
from hybridattn.kv.blocks import BlockPool, blocks_for
from hybridattn.kv.tables import block_table, slots


@given(st.integers(0, 12), st.lists(st.one_of(st.integers(0, 6), st.just("free")), max_size=40))
@settings(max_examples=100, deadline=None)
def test_used_plus_free_is_total_and_no_block_is_handed_out_twice(total, actions):
    pool, held = BlockPool("gpu", total, 16), []
    for action in actions:
        if action == "free":
            if held:
                pool.free(held.pop(0))
        elif action > pool.num_free:
            with pytest.raises(CapacityError, match=f"{action} blocks wanted, {pool.num_free} of {total} are free"):
                pool.allocate(action)
        else:
            held.append(pool.allocate(action))
        used = [b for blocks in held for b in blocks]
        assert len(used) == len(set(used)) and len(used) + pool.num_free == total


def test_a_block_cannot_be_freed_twice():
    pool = BlockPool("cpu", 3, 16)
    taken = pool.allocate(2)
    pool.free(taken)
    with pytest.raises(InputError, match=f"block {taken[0]} is not in use"):
        pool.free([taken[0]])
    with pytest.raises(InputError, match="block 7 is not in use"):
        pool.free([7])
    assert pool.num_free == 3


@pytest.mark.parametrize("blocks", [2**60, 2**70])
def test_more_blocks_than_can_be_listed_are_refused(blocks):
    with pytest.raises(InputError, match=f"gpu pool: this machine has too little memory to list {blocks} blocks"):
        BlockPool("gpu", blocks, 16)


def test_blocks_for_rounds_up():
    assert [blocks_for(n, 16) for n in (0, 1, 16, 17, 33)] == [0, 1, 1, 2, 3]


def test_tables_and_slots():
    assert block_table([[3, 1], [2]]).tolist() == [[3, 1], [2, -1]]
    assert block_table([[]]).tolist() == [[-1]]
    got = slots([5, 0, 2], start=14, count=5, page_size=16)
    assert got.tolist() == [5 * 16 + 14, 5 * 16 + 15, 0, 1, 2] and got.dtype == np.int64
