"""Calls of this package as torch operators, so that ``torch.compile`` passes over them; importing it registers them.

A compiled function takes a pool by its number (`pool_number`): pages are no tensors. New tokens go in with the
attention that reads them, so that nothing can be left out or change places.
"""

from __future__ import annotations

import weakref

import torch

from cpu_kernels.merge import merge_state as merge
from cpu_kernels.pages import KVPages
from cpu_kernels.plan import paged_decode_attention as attend

_pools: weakref.WeakValueDictionary[int, KVPages] = weakref.WeakValueDictionary()


def pool_number(pages: KVPages) -> int:
    """The number by which the operators know a pool, as long as it lives."""
    number = next((n for n, known in _pools.items() if known is pages), None)
    if number is None:
        number = max(_pools, default=-1) + 1
        _pools[number] = pages
    return number


@torch.library.custom_op("cpu_kernels::paged_decode_attention", mutates_args=())
def paged_decode_attention(
    q: torch.Tensor,
    pages: int,
    layer: int,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "native",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cpu_kernels.paged_decode_attention`; `pages` is `pool_number`'s."""
    if pages not in _pools:
        raise ValueError(f"pages is {pages}, a number that no living pool has: take it from pool_number(pages)")
    return attend(
        q, _pools[pages], block_table, seq_lens, layer=layer, k_new=k_new, v_new=v_new, sm_scale=sm_scale,
        window_left=window_left, logits_soft_cap=logits_soft_cap, alibi_slopes=alibi_slopes, sinks=sinks,
        backend=backend,
    )  # fmt: skip


@torch.library.custom_op("cpu_kernels::merge_state", mutates_args=())
def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    mask: torch.Tensor | None = None,
    base2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cpu_kernels.merge_state`."""
    return merge(out_a, lse_a, out_b, lse_b, mask=mask, base2=base2)


@paged_decode_attention.register_fake
def _(q, *rest, **options):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@merge_state.register_fake
def _(out_a, lse_a, *rest, **options):
    return torch.empty_like(out_a), torch.empty_like(lse_a)
