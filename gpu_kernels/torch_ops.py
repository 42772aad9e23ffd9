"""Calls of this package as torch operators, so that ``torch.compile`` passes over them; importing it registers them.

Integers of a batch are tensors here as everywhere; those of `paged_decode_attention` and `prefill_attention` are best
given on the host, since a plan is made at each call. A step with many layers keeps its plan outside of compiled code.
"""

import torch

from gpu_kernels import decode, kv_cache, merge, prefill


@torch.library.custom_op("gpu_kernels::paged_decode_attention", mutates_args=())
def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gpu_kernels.paged_decode_attention`."""
    return decode.paged_decode_attention(
        q, k_cache, v_cache, block_table, seq_lens, k_scale=k_scale, v_scale=v_scale, sm_scale=sm_scale,
        window_left=window_left, logits_soft_cap=logits_soft_cap, alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip


@torch.library.custom_op("gpu_kernels::prefill_attention", mutates_args=())
def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gpu_kernels.prefill_attention`."""
    return prefill.prefill_attention(
        q, k_cache, v_cache, block_table, query_start_loc, seq_lens, k_scale=k_scale, v_scale=v_scale, causal=causal,
        sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap, alibi_slopes=alibi_slopes,
        sinks=sinks,
    )  # fmt: skip


@torch.library.custom_op("gpu_kernels::append_kv", mutates_args=("k_cache", "v_cache", "k_scale", "v_scale"))
def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    check_ids: bool = True,
) -> None:
    """`gpu_kernels.append_kv`."""
    kv_cache.append_kv(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale, check_ids=check_ids)


@torch.library.custom_op("gpu_kernels::merge_state", mutates_args=())
def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    mask: torch.Tensor | None = None,
    base2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gpu_kernels.merge_state`."""
    return merge.merge_state(out_a, lse_a, out_b, lse_b, mask=mask, base2=base2)


@paged_decode_attention.register_fake
@prefill_attention.register_fake
def _(q, *rest, **options):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@append_kv.register_fake
def _(*rest, **options):
    return None


@merge_state.register_fake
def _(out_a, lse_a, *rest, **options):
    return torch.empty_like(out_a), torch.empty_like(lse_a)
