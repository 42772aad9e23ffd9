"""Row-wise work around the matrix products: RMSNorm with residual, rotary embedding, SiLU-mul."""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, x_stride, residual_stride, out_stride, hidden, eps, weight_offset,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. With ADD, ``residual += x`` first (rounded to its dtype and stored), and the sum is normalised."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    live = offs < hidden
    x = tl.load(x_ptr + row * x_stride + offs, mask=live, other=0.0).to(tl.float32)
    if ADD:
        at = residual_ptr + row * residual_stride + offs
        x = (x + tl.load(at, mask=live, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(at, x, mask=live)
        x = x.to(tl.float32)
    mean = tl.sum(x * x, axis=0) / hidden
    weight = tl.load(weight_ptr + offs, mask=live, other=0.0).to(tl.float32) + weight_offset
    result = x * (1.0 / tl.sqrt(mean + eps)) * weight
    tl.store(out_ptr + row * out_stride + offs, result.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(
    do_not_specialize=["num_heads", "half_dim"],
    do_not_specialize_on_alignment=["cos_ptr", "sin_ptr", "position_ptr"],
)
def rope(
    x_ptr, cos_ptr, sin_ptr, position_ptr, x_stride, x_stride_head, num_heads, half_dim, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rotate the first 2 * half_dim columns of BLOCK_H heads of one token, in place; tables are float32.

    Pairs are (d, d + half_dim), or (2d, 2d + 1) with INTERLEAVED. A program reads both of a pair before it writes.
    """
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + row).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    live_d = offs_d < half_dim
    live = (head < num_heads)[:, None] & live_d[None, :]
    cos = tl.load(cos_ptr + position * half_dim + offs_d, mask=live_d, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * half_dim + offs_d, mask=live_d, other=0.0)[None, :]
    if INTERLEAVED:
        first = 2 * offs_d
        second = first + 1
    else:
        first = offs_d
        second = offs_d + half_dim
    base = x_ptr + row * x_stride + head.to(tl.int64)[:, None] * x_stride_head
    a = tl.load(base + first[None, :], mask=live, other=0.0).to(tl.float32)
    b = tl.load(base + second[None, :], mask=live, other=0.0).to(tl.float32)
    tl.store(base + first[None, :], (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=live)
    tl.store(base + second[None, :], (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=live)


@triton.jit
def silu_mul(gate_up_ptr, out_ptr, stride, out_stride, width, BLOCK: tl.constexpr):
    """``silu(gate) * up`` for a [rows, 2 * width] matrix whose first half is the gate."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = offs < width
    base = gate_up_ptr + row * stride + offs
    gate = tl.load(base, mask=live, other=0.0).to(tl.float32)
    up = tl.load(base + width, mask=live, other=0.0).to(tl.float32)
    # exp of a large -gate would overflow: below -87 the sigmoid is 0 in float32 as far as the product can tell
    sigmoid = 1.0 / (1.0 + tl.exp(tl.minimum(-gate, 87.0)))
    tl.store(out_ptr + row * out_stride + offs, (gate * sigmoid * up).to(out_ptr.dtype.element_ty), mask=live)
