"""Merging two partial attention results over disjoint key sets."""

import triton
import triton.language as tl

from gpu_kernels.bodies.softmax import finite_or_zero


@triton.jit(
    do_not_specialize=["num_rows", "num_heads"],
    do_not_specialize_on_alignment=["lse_a_ptr", "lse_b_ptr", "lse_ptr"],
)
def merge(
    a_ptr, lse_a_ptr, b_ptr, lse_b_ptr, out_ptr, lse_ptr, num_rows, num_heads, head_dim, a_stride, a_stride_head,
    b_stride, b_stride_head, out_stride, out_stride_head, unit, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_R (sequence, head) pairs. LSEs are [num_seqs, num_heads], contiguous; ``unit`` times them is natural log.

    A part with lse = -inf (or +inf) is empty: the other is returned as it is, whatever the empty one's values hold.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    live_r = row < num_rows
    live = live_r[:, None] & (offs_d < head_dim)[None, :]
    seq = row // num_heads
    head = row % num_heads
    lse_a = tl.load(lse_a_ptr + row, mask=live_r, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + row, mask=live_r, other=float("-inf"))
    a = tl.load(a_ptr + seq[:, None] * a_stride + head[:, None] * a_stride_head + offs_d[None, :], mask=live, other=0.0)
    b = tl.load(b_ptr + seq[:, None] * b_stride + head[:, None] * b_stride_head + offs_d[None, :], mask=live, other=0.0)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    lse_a = tl.where(lse_a == float("inf"), float("-inf"), lse_a)
    lse_b = tl.where(lse_b == float("inf"), float("-inf"), lse_b)
    empty_a = lse_a == float("-inf")
    empty_b = lse_b == float("-inf")
    top = finite_or_zero(tl.maximum(lse_a, lse_b))
    weight_a = tl.exp((lse_a - top) * unit)
    weight_b = tl.exp((lse_b - top) * unit)
    total = tl.where(empty_a & empty_b, 1.0, weight_a + weight_b)
    mixed = tl.div_rn(a * weight_a[:, None] + b * weight_b[:, None], total[:, None])
    mixed = tl.where(empty_a[:, None], b, tl.where(empty_b[:, None], a, mixed))
    mixed = tl.where((empty_a & empty_b)[:, None], 0.0, mixed)
    lse = tl.where(empty_a, lse_b, tl.where(empty_b, lse_a, top + tl.div_rn(tl.log(total), unit)))
    out = out_ptr + seq[:, None] * out_stride + head[:, None] * out_stride_head + offs_d[None, :]
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=live)
    tl.store(lse_ptr + row, lse, mask=live_r)
