"""What decode and prefill attention have in common: the arguments of their plans and of their runs, checked once."""

import math
from dataclasses import dataclass

import torch

from gpu_kernels.capability import Capability, capability_of
from gpu_kernels.checks import (
    CacheShape,
    cache_shape,
    check_rows,
    check_scalars,
    check_scales,
    check_tensor,
    per_head,
    refuse,
)
from gpu_kernels.config import DTYPES


@dataclass(frozen=True, slots=True)
class Attention:
    """Queries of one kind over one cache geometry, the same for every layer. Made by `attention_over`."""

    cache: CacheShape
    capability: Capability
    q_dtype: torch.dtype
    num_q_heads: int
    sm_scale: float
    window_left: int
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
        self, num_rows: int, out: torch.Tensor | None, lse: torch.Tensor | None, *out_dtypes: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``out`` and ``lse`` of a run with ``num_rows`` queries, made or checked; ``out`` may be of ``out_dtypes``."""
        shape, device = (num_rows, self.num_q_heads, self.cache.head_dim), self.cache.device
        if out is None:
            out = torch.empty(shape, dtype=self.q_dtype, device=device)
        check_rows("out", out, shape, (self.q_dtype, *out_dtypes), device)
        if lse is None:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
        check_tensor("lse", lse, shape[:2], (torch.float32,), device)
        return out, lse


def attention_over(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_q_heads: int,
    q_dtype: torch.dtype | None,
    sm_scale: float | None,
    window_left: int,
    logits_soft_cap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> Attention:
    """The attention that the arguments of `plan_decode` or `plan_prefill` ask for, or ValueError."""
    cache = cache_shape(k_cache, v_cache)
    capability = capability_of(cache.device)
    scale = cache.head_dim**-0.5 if sm_scale is None else float(sm_scale)
    check_scalars(num_q_heads, cache.num_kv_heads, scale, window_left, logits_soft_cap)
    return Attention(
        cache=cache,
        capability=capability,
        q_dtype=q_dtype or (capability.half if cache.quantised else cache.dtype),
        num_q_heads=num_q_heads,
        sm_scale=scale,
        window_left=window_left,
        logits_soft_cap=float(logits_soft_cap),
        biased=alibi_slopes is not None,
        alibi_slopes=per_head("alibi_slopes", alibi_slopes, num_q_heads, 0.0, cache.device),
        sinks=per_head("sinks", sinks, num_q_heads, -math.inf, cache.device),
    )
