"""Where a position's K and V lie, and how a tile of them is read."""

import triton
import triton.language as tl


@triton.jit
def page_of(table_row, pos, live, page_shift):
    """Page ids (int64) of positions; entries of positions that are not live are never read."""
    return tl.load(table_row + (pos >> page_shift), mask=live, other=0).to(tl.int64)


@triton.jit
def offset_of(page, pos, stride_page, page_mask, stride_position):
    """Element offset of a position inside one head of the cache; int64, a pool above 2**31 elements is normal."""
    return page * stride_page + (pos & page_mask) * stride_position


@triton.jit
def from_e4m3(code):
    """Values of OCP E4M3 codes (uint8) in float16, exactly: its exponent's bias is larger by 8, so 2**8 is missing.

    Only the NaN code carries into bit 7 when 1 is added; the carry makes it a NaN of float16.
    """
    size = (code & 0x7F).to(tl.int16)
    bits = ((size + ((size + 1) & 0x80)) << 7) | ((code & 0x80).to(tl.int16) << 8)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def load_tile(base, offset, live, offs_d, head_dim):
    """[keys, BLOCK_D] of the cache; 0 where the position is not live or the column is past head_dim."""
    mask = live[:, None] & (offs_d < head_dim)[None, :]
    tile = tl.load(base + offset[:, None] + offs_d[None, :], mask=mask, other=0)
    if base.dtype.element_ty == tl.uint8:
        return from_e4m3(tile)
    else:
        return tile


@triton.jit
def load_scale(base, page, pos, live, stride_page, page_mask):
    """Scales of positions (int8, fp8): are [num_pages, num_kv_heads, page_size] float32."""
    return tl.load(base + page * stride_page + (pos & page_mask), mask=live, other=0.0)


@triton.jit
def weigh(weight, v, v_scale, QUANTISED: tl.constexpr, COMPUTE: tl.constexpr):
    """``weight [rows, keys] @ v [keys, BLOCK_D]`` in float32.

    Codes of int8 and fp8 are exact in 16 bits, so the per-token scale moves to the weight. It is taken relative to the
    tile's largest one: a 16-bit weight then keeps its precision whatever the size of the values.
    """
    if QUANTISED:
        largest = tl.max(v_scale, axis=0)
        relative = tl.where(largest > 0.0, v_scale / tl.where(largest > 0.0, largest, 1.0), 0.0)
        scaled = (weight * relative[None, :]).to(COMPUTE)
        return tl.dot(scaled, v.to(COMPUTE), input_precision="ieee") * largest
    else:
        return tl.dot(weight.to(COMPUTE), v, input_precision="ieee")
