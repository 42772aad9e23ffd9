"""Writing new tokens' K and V into a layer's paged cache."""

from typing import Any

import torch

from gpu_kernels.bodies import cache as bodies
from gpu_kernels.cache_shape import CacheShape, cache_shape, check_scales, codes
from gpu_kernels.capability import capability_of
from gpu_kernels.checks import check_rows, device_integers, first_where, refuse
from gpu_kernels.config import DTYPES, append_config
from gpu_kernels.launch import launch
from gpu_kernels.overlap import check_result, refuse_overlap


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: Any,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    check_ids: bool = True,
) -> None:
    """Write token rows into their slots, converting to the cache's dtype.

    An int8 cache gets ``code = round(x / scale)``, ``scale = max|x| / 127`` per token and head, without a floor;
    a float8_e4m3fn one ``code = e4m3(x / scale)``, saturating, with NaN kept, ``scale`` the smallest power of two that
    brings max|x| to 448 at most.

    Parameters
    ----------
    k, v
        [num_tokens, num_kv_heads, head_dim], float32, float16 or bfloat16; may be views into a fused QKV matrix.
    k_cache, v_cache
        [num_pages, num_kv_heads, page_size, head_dim].
    slot_mapping
        [num_tokens] integers, ``page * page_size + offset``, each slot at most once; -1 skips the row. int64 on the
        cache's device costs no copy.
    k_scale, v_scale
        For an int8 or fp8 cache: [num_pages, num_kv_heads, page_size] float32, written.
    check_ids
        Check the slots' range and uniqueness. On a CUDA tensor that waits for the device: call `check_slots` on the
        host's copy once per batch, and pass False for every layer.

    Raises
    ------
    ValueError
        one sentence that names the argument, the row and the numbers.
    """
    cache = cache_shape(k_cache, v_cache)
    capability = capability_of(cache.device)
    slot_mapping = device_integers("slot_mapping", slot_mapping, cache.device)
    shape = (slot_mapping.shape[0], cache.num_kv_heads, cache.head_dim)
    if check_ids:
        check_slots(slot_mapping, cache)
    check_rows("k", k, shape, DTYPES, cache.device)
    check_rows("v", v, shape, (k.dtype,), cache.device)
    for name, target in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_result(name, target)
        refuse_overlap(name, target, [("k", k), ("v", v)], in_place=False)
    capability.refuse_dtype("k", k.dtype)
    capability.refuse_dtype("k_cache", cache.dtype)
    scales = check_scales(cache, k_scale, v_scale) or (slot_mapping, slot_mapping)  # a pointer that is not followed
    slot_mapping = cache.places_of(slot_mapping)
    config = append_config(cache.quantised, cache.head_dim)
    grid = (shape[0], -(-cache.num_kv_heads // config.constants["BLOCK_H"]))
    launch(
        bodies.append, grid, config, cache.device,
        k, v, slot_mapping, codes(k_cache), codes(v_cache), *scales, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *cache.strides, cache.num_kv_heads, cache.head_dim, cache.page_shift,
    )  # fmt: skip


def check_slots(slot_mapping: Any, cache: CacheShape) -> None:
    """Refuse slots out of range, and a slot that two rows would write at once."""
    slots = device_integers("slot_mapping", slot_mapping, torch.device("cpu"))
    bad = first_where((slots < -1) | (slots >= cache.num_slots))
    if bad:
        refuse(
            "slot_mapping",
            f"row {bad[0]} names slot {int(slots[bad])}; slots go from 0 to {cache.num_slots - 1}, and -1 skips a row",
        )
    used, counts = slots[slots >= 0].unique(return_counts=True)
    twice = first_where(counts > 1)
    if twice:
        slot = int(used[twice])
        rows = (slots == slot).nonzero().flatten().tolist()
        refuse("slot_mapping", f"slot {slot} is named by rows {rows}; a slot may be written once per call")
