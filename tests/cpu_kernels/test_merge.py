"""Merging partial results: K02, and the property that any split of the keys, over any kernels, gives the whole."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu_kernels as ck

EMPTY = (np.zeros((1, 2, 4), np.float32), np.full((1, 2), -np.inf, np.float32))
FULL = (np.array([[[1.0, -0.0, 3e-39, 4], [5, 6, 7, 8]]], np.float32), np.array([[0.1, -50_000]], np.float32))


def equal(a: Any, b: Any) -> bool:
    return all(np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(a, b, strict=True))


def test_K02_empty_parts() -> None:
    assert equal(ck.merge_state(*EMPTY, *EMPTY), EMPTY)
    assert equal(ck.merge_state(*EMPTY, *FULL), FULL)
    assert equal(ck.merge_state(*FULL, *EMPTY), FULL)
    for order in itertools.permutations([EMPTY, FULL, EMPTY]):
        assert equal(ck.merge_states([o for o, _ in order], [s for _, s in order]), FULL)


def test_K02_the_output_of_an_empty_part_is_not_read() -> None:
    garbage = (np.full((1, 2, 4), np.nan, np.float32), EMPTY[1])
    assert equal(ck.merge_state(*garbage, *FULL), FULL)
    assert equal(ck.merge_state(*FULL, *garbage), FULL)
    assert equal(ck.merge_state(*garbage, *garbage), EMPTY)


def test_K02_more_splits_than_tokens(problem: Any) -> None:
    p = problem([3], page=16, dtype="fp32", spare_pages=8)
    whole = p.run()
    parts = []
    for i in range(8):
        n = 1 if i < 3 else 0
        out, lse = np.full_like(p.out, np.nan), np.full_like(p.lse, np.nan)
        one = ck.KVPages(1, 2, 64, 16, "fp32", huge_pages=False)
        if n:
            ck.append_kv(one, 0, p.k[p.table[0, 0], :, i][None], p.v[p.table[0, 0], :, i][None], [0])
        ck.plan_decode(one, [[0]], [n], p.heads).run(p.q, out, lse)
        parts.append((out, lse))
    out, lse = ck.merge_states([o for o, _ in parts], [s for _, s in parts])
    assert np.abs(out - whole[0]).max() < 1e-6 and np.abs(lse - whole[1]).max() < 1e-6


def test_kinds_are_kept() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    out, lse = torch.ones(1, 2, 4).bfloat16(), torch.zeros(1, 2)
    merged, merged_lse = ck.merge_state(out, lse, 3 * out, lse)
    assert merged.dtype == torch.bfloat16 and (merged == 2).all()
    assert torch.allclose(merged_lse, torch.full((1, 2), 0.6931472))
    bits, _ = ck.merge_state(ck.to_bf16(FULL[0]), FULL[1], ck.to_bf16(EMPTY[0]), EMPTY[1])
    assert bits.dtype == np.uint16


def test_parts_may_come_stacked() -> None:
    stacked = np.stack([FULL[0], EMPTY[0]]), np.stack([FULL[1], EMPTY[1]])
    assert equal(ck.merge_states(*stacked), FULL)
    with pytest.raises(TypeError, match="outs must be a sequence of arrays, got NoneType"):
        ck.merge_states(None, None)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="expected as many, at least one"):
        ck.merge_states([], [])
    with pytest.raises(ValueError, match=r"part 1 has out \[1, 2, 3\]"):
        ck.merge_state(*FULL, FULL[0][..., :3], FULL[1])


_SHARED: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _share(problem: Any, levels: tuple[str, ...]) -> None:
    _SHARED.update(make=problem, levels=levels)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_split_over_any_mix_of_kernels_is_the_whole(data: st.DataObject) -> None:
    """Parts are sets of pages in any order, empty ones included, each computed by another level or back end."""
    p = _SHARED["make"]([data.draw(st.integers(1, 400))], group=3, dtype="fp32", seed=data.draw(st.integers(0, 50)))
    length, used = int(p.lens[0]), list(range(-(-int(p.lens[0]) // 32)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(used)), max_size=4)))
    groups = [used[a:b] for a, b in zip([0, *cuts], [*cuts, len(used)], strict=True)]
    kernels = [{"isa": level} for level in _SHARED["levels"]] + [{"backend": "torch"}]
    outs, lses = [], []
    for group in data.draw(st.permutations(groups)):
        n = sum(min(32, length - 32 * j) for j in group)
        out, lse = np.full_like(p.out, np.nan), np.full_like(p.lse, np.nan)
        table = p.table[:, group] if group else np.zeros((1, 1), np.int32)
        kernel = data.draw(st.sampled_from(kernels))
        ck.plan_decode(p.pages, table, [n], p.heads, split_tokens=64, **kernel).run(p.q, out, lse)
        outs.append(out)
        lses.append(lse)
    out, lse = ck.merge_states(outs, lses)
    want, want_lse = p.want()
    assert np.abs(out - want).max() < 3e-6 and np.abs(lse - want_lse).max() < 1e-5
    ref_out, ref_lse = ck.reference.merge_reference(outs, lses)
    assert np.abs(out - ref_out).max() < 1e-6 and np.abs(lse - ref_lse).max() < 1e-5
