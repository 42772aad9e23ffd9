from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridattn.executor.slots import SlotRanges


@given(st.integers(1, 30), st.lists(st.one_of(st.integers(1, 12), st.just("back")), max_size=60))
@settings(max_examples=100, deadline=None)
def test_ranges_never_overlap_and_all_come_back(capacity, actions):
    ranges, held = SlotRanges(capacity), []
    for i, action in enumerate(actions):
        if action == "back":
            if held:
                ranges.give_back(*held.pop(i % len(held)))
            continue
        first, given_rows = ranges.take(action)
        assert given_rows <= action
        if given_rows:
            held.append((first, given_rows))
        else:
            assert sum(n for _, n in held) == capacity  # nothing given only when nothing is left
        used = [s for first, n in held for s in range(first, first + n)]
        assert len(used) == len(set(used)) and all(0 <= s < capacity for s in used)
    for piece in held:
        ranges.give_back(*piece)
    assert ranges.take(capacity) == (0, capacity)
