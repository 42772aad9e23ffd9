"""What decode and prefill attention have in common: the arguments of their plans and of their runs, checked once."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from gpu_kernels.cache_shape import CacheShape, cache_shape, check_scales
from gpu_kernels.capability import Capability, capability_of
from gpu_kernels.checks import (
    check_heads,
    check_is_tensor,
    check_rows,
    check_tensor,
    number,
    per_head,
    refuse,
    soft_cap,
)
from gpu_kernels.config import DTYPES
from gpu_kernels.overlap import check_result, refuse_overlap
from gpu_kernels.reach import flags


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries of one kind over one cache geometry, the same for every layer. Made by `attention_over`."""

    cache: CacheShape
    capability: Capability
    q_dtype: torch.dtype
    num_q_heads: int
    sm_scale: float
    logits_soft_cap: float
    biased: bool
    alibi_slopes: torch.Tensor
    sinks: torch.Tensor

    def __post_init__(self) -> None:
        if self.q_dtype not in DTYPES:
            refuse("q_dtype", f"{self.q_dtype} is not supported; use float32, float16 or bfloat16")
        if not self.cache.quantised and self.q_dtype is not self.cache.dtype:
            refuse("q_dtype", f"{self.q_dtype} does not match the cache's {self.cache.dtype}")
        self.capability.refuse_dtype("q_dtype", self.q_dtype)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.cache.num_kv_heads

    @property
    def bias_strides(self) -> tuple[int, int]:
        """Elements from one sequence's ALiBi slopes and sinks to the next one's; 0 where all share them."""
        slopes, sinks = (x.stride(0) if x.dim() == 2 else 0 for x in (self.alibi_slopes, self.sinks))
        return slopes, sinks

    @property
    def extras(self) -> bool:
        """Whether the kernels need their slower form, with a cap or biases."""
        return self.logits_soft_cap > 0.0 or self.biased

    def check(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        num_rows: int,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check the inputs of a run with ``num_rows`` queries; returns the scales, or what stands for them."""
        self.cache.check(k_cache, v_cache)
        scales = check_scales(self.cache, k_scale, v_scale)
        check_rows("q", q, (num_rows, self.num_q_heads, self.cache.head_dim), (self.q_dtype,), self.cache.device)
        return scales or (self.sinks, self.sinks)  # a float32 pointer that is not followed

    def results(
        self,
        num_rows: int,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        *out_dtypes: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``out`` and ``lse`` of a run with ``num_rows`` queries, made or checked; ``out`` may be of ``out_dtypes``.

        Given ones have memory of their own, but for an ``out`` in exactly the place of ``q``.
        """
        shape, device = (num_rows, self.num_q_heads, self.cache.head_dim), self.cache.device
        read = [("k_cache", caches[0]), ("v_cache", caches[1])]
        if out is None:
            out = torch.empty(shape, dtype=self.q_dtype, device=device)
        else:
            check_rows("out", out, shape, (self.q_dtype, *out_dtypes), device)
            check_result("out", out)
            refuse_overlap("out", out, [("q", q)])
            refuse_overlap("out", out, read, in_place=False)
        if lse is None:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
        else:
            check_tensor("lse", lse, shape[:2], (torch.float32,), device)
            check_result("lse", lse)
            refuse_overlap("lse", lse, [("q", q), ("out", out), *read], in_place=False)
        return out, lse


def check_queries(q: torch.Tensor) -> None:
    """Refuse what is no tensor of [rows, heads, head_dim]."""
    check_is_tensor("q", q)
    if q.dim() != 3:
        refuse("q", f"shape {tuple(q.shape)} is not [rows, num_q_heads, head_dim]")


def attention_over(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_q_heads: int,
    q_dtype: torch.dtype | None,
    sm_scale: float | None,
    logits_soft_cap: float | None,
    alibi_slopes: Any,
    sinks: Any,
    with_sinks: Any,
    num_seqs: int,
) -> Attention:
    """The attention that the arguments of `plan_decode` or `plan_prefill` ask for, or ValueError."""
    cache = cache_shape(k_cache, v_cache)
    capability = capability_of(cache.device)
    heads = check_heads(num_q_heads, cache.num_kv_heads)
    logits = per_head("sinks", sinks, heads, -math.inf, torch.device("cpu"), num_seqs)
    counted = flags("with_sinks", with_sinks, num_seqs)
    if sinks is not None and not bool(counted.all()):
        logits = torch.where(counted[:, None], logits, -math.inf)
    return Attention(
        cache=cache,
        capability=capability,
        q_dtype=q_dtype or (capability.half if cache.quantised else cache.dtype),
        num_q_heads=heads,
        sm_scale=cache.head_dim**-0.5 if sm_scale is None else number("sm_scale", sm_scale),
        logits_soft_cap=soft_cap(logits_soft_cap),
        biased=alibi_slopes is not None,
        alibi_slopes=per_head("alibi_slopes", alibi_slopes, heads, 0.0, cache.device, num_seqs),
        sinks=logits.to(cache.device),
    )
