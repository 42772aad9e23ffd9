"""The page table against a plain model of it: what is read, what is held, what may follow on what."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.core.errors import InputError
from hybridattn.core.page_table import CPU_TIER, GPU_TIER, TIERS, PageTable, other
from hybridattn.kv.blocks import BlockPool

ACTIONS = st.one_of(
    st.tuples(st.just("append"), st.sampled_from(TIERS), st.integers(1, 3)),
    st.tuples(st.just("down"), st.integers(1, 4), st.integers(0, 2)),
    st.tuples(st.just("up"), st.integers(1, 4), st.integers(0, 2)),
    st.tuples(st.just("arrive"), st.just(0), st.just(0)),
    st.tuples(st.just("cut"), st.integers(0, 6), st.just(0)),
    st.tuples(st.just("leave"), st.integers(0, 6), st.just(0)),
)


def refused(table, action, first, count):
    """Why an action is none that a table takes, from the picture alone: cold in front of hot, one copy at a time."""
    moving = table.goes_to is not None
    if action == "append":
        newest_moves = moving and table.hot == ([] if table.goes_to == GPU_TIER else leaving(table))
        return (first == CPU_TIER and bool(table.hot)) or newest_moves
    if action in ("down", "up"):
        source = table.hot if action == "down" else table.cold
        whole = first == len(source) if action == "down" else not table.hot
        return moving or first > len(source) or (count > 0 and not whole)
    return action in ("cut", "leave") and moving


def leaving(table):
    """The pages that the copy under way reads."""
    return deepcopy(table).arrive()


@given(st.lists(ACTIONS, max_size=40))
@settings(max_examples=200, deadline=None)
def test_after_every_operation_each_page_is_held_once_or_free(actions):
    pools = {tier: BlockPool(tier, 200, 16) for tier in TIERS}
    table = PageTable()
    for action, first, count in actions:
        before = deepcopy(table)
        wrong = refused(table, action, first, count)
        tier = {"append": first, "down": CPU_TIER, "up": GPU_TIER}.get(action, CPU_TIER)
        new = (
            pools[tier].allocate(count + (first if action in ("down", "up") else 0))
            if count or action not in ("cut", "leave")
            else []
        )
        try:
            if action == "append":
                table.append(first, new)
            elif action == "down":
                table.move_down(first, new)
            elif action == "up":
                table.move_up(first, new)
            elif action == "arrive" and table.goes_to is not None:
                source = other(table.goes_to)
                pools[source].free(table.arrive())
            elif action == "cut":
                for where, pages in table.cut(first).items():
                    pools[where].free(pages)
            elif action == "leave":
                for where, pages in table.leave_behind(first).items():
                    pools[where].free(pages)
        except InputError:
            assert wrong, (action, first, count)
            pools[tier].free(new)
            assert (table.cold, table.hot, table.held(CPU_TIER)) == (before.cold, before.hot, before.held(CPU_TIER))
        else:
            assert not wrong, (action, first, count)
        check(table, pools)
        if action in ("down", "up") and not wrong:  # nothing is read elsewhere before the copy has ended
            assert (table.cold, table.hot) == (before.cold, before.hot)


def check(table, pools):
    for tier, pool in pools.items():
        held = table.held(tier)
        assert len(held) == len(set(held)) and len(held) + pool.num_free == pool.num_blocks
    pages = [*((CPU_TIER, page) for page in table.cold), *((GPU_TIER, page) for page in table.hot)]
    assert [table.at(i) for i in range(table.gone, table.gone + len(table))] == pages
    assert len(table) == len(table.on(CPU_TIER)) + len(table.on(GPU_TIER))


def test_the_oldest_pages_go_down_and_the_newest_of_those_come_up_again():
    table = PageTable(hot=[0, 1, 2, 3])
    table.move_down(2, [10, 11])
    assert table.hot == [0, 1, 2, 3] and table.cold == [] and table.held(CPU_TIER) == [10, 11]  # read where they were
    table.append(GPU_TIER, [4])  # and its request goes on meanwhile
    assert table.arrive() == [0, 1]
    assert (table.cold, table.hot, table.num_cold) == ([10, 11], [2, 3, 4], 2)
    assert [table.at(i) for i in (1, 2, 4)] == [(CPU_TIER, 11), (GPU_TIER, 2), (GPU_TIER, 4)]
    table.move_up(1, [9])
    assert table.arrive() == [11]
    assert (table.cold, table.hot) == ([10], [9, 2, 3, 4])
    table.move_down(2, [12, 13])
    assert table.arrive() == [9, 2]
    assert (table.cold, table.hot) == ([10, 12, 13], [3, 4])
    table.move_up(2, [20, 21])
    assert table.arrive() == [12, 13]
    assert (table.cold, table.hot) == ([10], [20, 21, 3, 4])


@pytest.mark.parametrize(("way", "there", "back"), [("move_down", "hot", "cold"), ("move_up", "cold", "hot")])
def test_a_whole_request_may_arrive_with_room_for_its_next_tokens(way, there, back):
    table = PageTable(**{there: [5, 6]})
    getattr(table, way)(2, [1, 2, 3])
    assert len(table) == 2
    with pytest.raises(InputError, match="nothing can follow on a page that is on its way"):
        table.append(GPU_TIER, [7])
    with pytest.raises(InputError, match="pages are on their way"):
        getattr(table, way)(1, [9])
    with pytest.raises(InputError, match="pages are on their way"):
        table.cut(1)
    assert table.arrive() == [5, 6] and getattr(table, back) == [1, 2, 3] and getattr(table, there) == []


def test_what_a_table_refuses():
    table = PageTable(cold=[1], hot=[2, 3])
    with pytest.raises(InputError, match="a page of the cpu tier cannot follow on 2 of the gpu tier"):
        table.append(CPU_TIER, [4])
    with pytest.raises(InputError, match="3 pages to move to the cpu tier of the 2 of the other"):
        table.move_down(3, [7, 8, 9])
    with pytest.raises(InputError, match="1 pages cannot move to 2 of the gpu tier"):
        table.move_up(1, [7, 8])
    with pytest.raises(InputError, match="page 3, there are 0 to 2"):
        table.at(3)
    assert table.leave_behind(2) == {CPU_TIER: [1], GPU_TIER: [2]} and (table.gone, table.hot) == (2, [3])
    with pytest.raises(InputError, match="page 1, there are 2 to 2"):
        table.at(1)
    assert table.cut(3) == {CPU_TIER: [], GPU_TIER: []} and table.cut(0)[GPU_TIER] == [3] and table.gone == 0
