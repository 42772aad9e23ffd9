"""Triton kernels for paged attention, usable alone (torch and triton only). See README.md.

Decode and prefill attention over a paged KV cache with LSE, KV append with int8 quantisation, packing for the CPU's
tile layout, merging of partial results, and the fused row-wise steps of a Llama-like layer.
"""

from gpu_kernels.cache_shape import CacheShape, cache_shape
from gpu_kernels.capability import Capability, capability_of
from gpu_kernels.cpu_layout import BlockShape, block_shape, copy_down, copy_up, pack_for_cpu, unpack_from_cpu
from gpu_kernels.decode import DEFAULT_SPLIT_TOKENS, DecodePlan, paged_decode_attention, plan_decode
from gpu_kernels.fused import rms_norm, rope, silu_mul
from gpu_kernels.kv_cache import append_kv, check_slots
from gpu_kernels.launch import Calls, do, kept
from gpu_kernels.merge import merge_state, merge_states
from gpu_kernels.prefill import PrefillPlan, plan_prefill, prefill_attention
from gpu_kernels.resident import DecodeIntegers, plan_resident

__all__ = [
    "DEFAULT_SPLIT_TOKENS",
    "BlockShape",
    "CacheShape",
    "Calls",
    "Capability",
    "DecodeIntegers",
    "DecodePlan",
    "PrefillPlan",
    "append_kv",
    "block_shape",
    "cache_shape",
    "capability_of",
    "check_slots",
    "copy_down",
    "copy_up",
    "do",
    "kept",
    "merge_state",
    "merge_states",
    "pack_for_cpu",
    "paged_decode_attention",
    "plan_decode",
    "plan_prefill",
    "plan_resident",
    "prefill_attention",
    "rms_norm",
    "rope",
    "silu_mul",
    "unpack_from_cpu",
]
