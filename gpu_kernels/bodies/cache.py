"""Writing new tokens into the paged cache."""

import triton
import triton.language as tl

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and taking it away rounds |x| < 2**22 to nearest even


@triton.jit
def quantise(x):
    """Rows of ``x [rows, columns]`` as int8 codes and one float32 scale each: scale = max|x| / 127, with no floor."""
    scale = tl.div_rn(tl.max(tl.abs(x), axis=1), 127.0)
    code = tl.div_rn(x, tl.where(scale > 0.0, scale, 1.0)[:, None])
    code = (code + _ROUND) - _ROUND
    return tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8), scale


@triton.jit(
    do_not_specialize=["num_kv_heads", "page_shift"],
    do_not_specialize_on_alignment=["slot_ptr", "k_scale_ptr", "v_scale_ptr"],
)
def append(
    k_ptr, v_ptr, slot_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, k_stride, k_stride_head, v_stride,
    v_stride_head, cache_stride, cache_stride_head, scale_stride, scale_stride_head, num_kv_heads, head_dim, page_shift,
    QUANTISED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Token row program_id(0), BLOCK_H of its kv heads. A negative slot skips the row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    live_h = head < tl.where(slot >= 0, num_kv_heads, 0)
    live = live_h[:, None] & (offs_d < head_dim)[None, :]
    wide_head = head.to(tl.int64)
    page = slot >> page_shift
    inside = slot & ((1 << page_shift) - 1)
    k = tl.load(k_ptr + row * k_stride + wide_head[:, None] * k_stride_head + offs_d[None, :], mask=live, other=0.0)
    v = tl.load(v_ptr + row * v_stride + wide_head[:, None] * v_stride_head + offs_d[None, :], mask=live, other=0.0)
    to = page * cache_stride + inside * head_dim + wide_head[:, None] * cache_stride_head + offs_d[None, :]
    if QUANTISED:
        k_code, k_scale = quantise(k.to(tl.float32))
        v_code, v_scale = quantise(v.to(tl.float32))
        tl.store(k_cache_ptr + to, k_code, mask=live)
        tl.store(v_cache_ptr + to, v_code, mask=live)
        at = page * scale_stride + inside + wide_head * scale_stride_head
        tl.store(k_scale_ptr + at, k_scale, mask=live_h)
        tl.store(v_scale_ptr + at, v_scale, mask=live_h)
    else:
        tl.store(k_cache_ptr + to, k.to(k_cache_ptr.dtype.element_ty), mask=live)
        tl.store(v_cache_ptr + to, v.to(v_cache_ptr.dtype.element_ty), mask=live)
