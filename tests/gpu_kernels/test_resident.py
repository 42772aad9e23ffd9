"""Plans whose integers change under them, and launches that are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import gpu_kernels
from gpu_kernels.decode import plan_decode


def test_a_resident_plan_follows_its_integers_and_surplus_rows_and_items_do_nothing(
    make_batch: Callable, device: torch.device
) -> None:
    """Two rows of four, in parts of which there may be nine; kept once, called again for other lengths and queries."""
    batch = make_batch([150, 70], head_dim=32)
    with device:
        check_kept_calls(batch)


def check_kept_calls(batch: Any) -> None:
    split = 64
    table = torch.full((4, 16), -1, dtype=torch.int32)
    table[:2, : batch.block_table.shape[1]] = batch.block_table
    wide = torch.zeros(9, dtype=torch.int32)
    integers = gpu_kernels.DecodeIntegers(
        wide, wide.clone(), torch.zeros(5, dtype=torch.int32), table, torch.zeros(4, 3, dtype=torch.int32)
    )

    def lay_out(lens: list[int]) -> None:
        items = [(i, j) for i, n in enumerate([*lens, 0, 0]) for j in range(max(1, -(-n // split)))]
        starts = [next(k for k, (i, _) in enumerate(items) if i == row) for row in range(4)] + [len(items)]
        items += [(0, 1 << 20)] * (9 - len(items))
        integers.item_seq[:], integers.item_split[:] = torch.tensor(items, dtype=torch.int32).T
        integers.part_start[:] = torch.tensor(starts)
        integers.spans[:] = torch.tensor([[0, n, max(n - 1, 0)] for n in [*lens, 0, 0]])

    k, v = batch.k_cache, batch.v_cache
    plan = gpu_kernels.plan_resident(k, v, integers, 4, split_tokens=split)
    q, out, lse = torch.randn(4, 4, 32), torch.full((4, 4, 32), torch.nan), torch.full((4, 4), torch.nan)
    calls: gpu_kernels.Calls = []
    lay_out([150, 70])
    with gpu_kernels.kept(calls):
        plan.run(q, k, v, out, lse, workspace=plan.make_workspace())
    for lens in ([150, 70], [149, 3]):
        lay_out(lens)
        q.normal_()
        for call in calls:
            call()
        want = plan_decode(k, v, batch.block_table, lens, 4, split_tokens=split).run(q[:2], k, v)
        assert torch.equal(out[:2], want[0]) and torch.equal(lse[:2], want[1])
        assert not out[2:].any() and (lse[2:] == -torch.inf).all()
    assert len(calls) == 2  # attention, and the merge of its parts
    assert replace(plan, num_seqs=2, num_parts=2).direct


def test_integers_for_different_numbers_of_rows_are_refused() -> None:
    one, two = torch.zeros(1, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="part_start, block_table: 1 and 2 for 2 rows"):
        gpu_kernels.DecodeIntegers(one, one, one, two, two)
