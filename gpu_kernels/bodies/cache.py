"""Writing new tokens into the paged cache."""

import triton
import triton.language as tl

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and taking it away rounds |x| < 2**22 to nearest even
_LARGEST = tl.constexpr(448 * 2.0**119)  # with the largest scale, the largest code is a float32 still


@triton.jit
def to_e4m3(x):
    """float32 as OCP E4M3 codes (uint8): ties to even, saturating at 448, NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # The unit place of a sum with 2**14 is the smallest subnormal, so the adder does the rounding.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
    return (tl.where(size > 0x7F800000, 0x7F, code) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantise(x, TYPE: tl.constexpr):
    """Rows of ``x [rows, columns]`` as codes and one float32 scale each.

    int8: scale = max|x| / 127, with no floor. fp8: the smallest power of two that brings max|x| to 448 at most.
    """
    if TYPE == tl.uint8:
        largest = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)
        least = tl.div_rn(tl.minimum(largest, _LARGEST), 448.0).to(tl.uint32, bitcast=True)
        scale = ((least + 0x7FFFFF) & 0xFF800000).to(tl.float32, bitcast=True)
        return to_e4m3(tl.div_rn(x, tl.where(scale > 0.0, scale, 1.0)[:, None])), scale
    else:
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
    v_stride_head, cache_stride, cache_stride_head, cache_stride_position, scale_stride, scale_stride_head,
    num_kv_heads, head_dim, page_shift, QUANTISED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
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
    to = page * cache_stride + inside * cache_stride_position + wide_head[:, None] * cache_stride_head + offs_d[None, :]
    if QUANTISED:
        k_code, k_scale = quantise(k.to(tl.float32), k_cache_ptr.dtype.element_ty)
        v_code, v_scale = quantise(v.to(tl.float32), v_cache_ptr.dtype.element_ty)
        tl.store(k_cache_ptr + to, k_code, mask=live)
        tl.store(v_cache_ptr + to, v_code, mask=live)
        at = page * scale_stride + inside + wide_head * scale_stride_head
        tl.store(k_scale_ptr + at, k_scale, mask=live_h)
        tl.store(v_scale_ptr + at, v_scale, mask=live_h)
    else:
        tl.store(k_cache_ptr + to, k.to(k_cache_ptr.dtype.element_ty), mask=live)
        tl.store(v_cache_ptr + to, v.to(v_cache_ptr.dtype.element_ty), mask=live)
