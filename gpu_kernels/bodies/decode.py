"""Decode attention: one query token per sequence, the keys cut into splits of a fixed size.

::

    grid of attend_split: (work items, kv heads, blocks of the group)         grid of combine: (sequences, query heads)
    sequence 0, 1100 keys, split 512:  [ item 0 | item 1 | item 2 ] --parts--> combine --> out, lse
    sequence 1,  300 keys           :  [ item 3 ]                   --part ---> combine --> out, lse

Splits begin at fixed positions of the sequence, so a row's result does not depend on its neighbours.
"""

import triton
import triton.language as tl

from gpu_kernels.bodies.pages import load_scale, load_tile, offset_of, page_of, weigh
from gpu_kernels.bodies.softmax import advance, finish, finite_or_zero, soft_cap


@triton.jit(
    do_not_specialize=[
        "table_stride", "group", "page_shift", "split_tokens", "lse_stride", "alibi_stride", "sink_stride",
    ],
    do_not_specialize_on_alignment=[
        "k_scale_ptr", "v_scale_ptr", "alibi_ptr", "sink_ptr", "item_seq_ptr", "item_split_ptr", "table_ptr",
        "span_ptr", "lse_ptr",
    ],
)  # fmt: skip
def attend_split(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, alibi_ptr, sink_ptr, item_seq_ptr, item_split_ptr, table_ptr,
    span_ptr, out_ptr, lse_ptr, q_stride, q_stride_head, cache_stride, cache_stride_head, cache_stride_position,
    scale_stride, scale_stride_head, out_stride, out_stride_head, lse_stride, table_stride, alibi_stride, sink_stride,
    sm_scale, cap, group, head_dim, page_shift, split_tokens, QUANTISED: tl.constexpr, EXTRAS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One split of one sequence for the query heads of one kv head -> out[item], lse[item].

    ``span_ptr`` is [num_seqs, 3]: the first allowed key, one past the last, and the query's position, all counted from
    the sequence's first key.
    """
    item = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = tl.load(item_seq_ptr + item).to(tl.int64)
    split = tl.load(item_split_ptr + item)
    first_key = tl.load(span_ptr + seq * 3)
    q_pos = tl.load(span_ptr + seq * 3 + 2)
    begin = tl.maximum(split * split_tokens, first_key // BLOCK_N * BLOCK_N)
    end = tl.minimum((split + 1) * split_tokens, tl.load(span_ptr + seq * 3 + 1))

    offs_g = tl.program_id(2) * BLOCK_G + tl.arange(0, BLOCK_G)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    live_g = offs_g < group
    live_q = live_g[:, None] & (offs_d < head_dim)[None, :]
    head = kv_head * group + offs_g
    q = tl.load(q_ptr + seq * q_stride + head[:, None] * q_stride_head + offs_d[None, :], mask=live_q, other=0.0)
    k_base = k_ptr + kv_head * cache_stride_head
    v_base = v_ptr + kv_head * cache_stride_head
    k_scale_base = k_scale_ptr + kv_head * scale_stride_head
    v_scale_base = v_scale_ptr + kv_head * scale_stride_head
    table_row = table_ptr + seq * table_stride
    page_mask = (1 << page_shift) - 1
    if EXTRAS:
        slope = tl.load(alibi_ptr + seq * alibi_stride + head, mask=live_g, other=0.0)

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    page = page_of(table_row, begin + offs_n, (begin + offs_n < end) & (begin + offs_n >= first_key), page_shift)
    for start in range(begin, end, BLOCK_N):
        pos = start + offs_n
        live = (pos < end) & (pos >= first_key)
        page_after = page_of(table_row, pos + BLOCK_N, pos + BLOCK_N < end, page_shift)
        offset = offset_of(page, pos, cache_stride, page_mask, cache_stride_position)
        k = load_tile(k_base, offset, live, offs_d, head_dim)
        score = tl.dot(q, tl.trans(k).to(q.dtype), input_precision="ieee")
        if QUANTISED:
            score *= load_scale(k_scale_base, page, pos, live, scale_stride, page_mask)[None, :]
        score *= sm_scale
        if EXTRAS:
            if cap > 0.0:
                score = soft_cap(score, cap)
            score += slope[:, None] * (pos - q_pos).to(tl.float32)[None, :]
        score = tl.where(live[None, :], score, float("-inf"))
        weight, shrink, m, total = advance(score, m, total)
        v = load_tile(v_base, offset, live, offs_d, head_dim)
        if QUANTISED:
            v_scale = load_scale(v_scale_base, page, pos, live, scale_stride, page_mask)
        else:
            v_scale = weight
        acc = acc * shrink[:, None] + weigh(weight, v, v_scale, QUANTISED, q.dtype)
        page = page_after

    sink = tl.load(sink_ptr + seq * sink_stride + head, mask=live_g, other=float("-inf"))
    shrink, denominator, lse = finish(m, total, sink)
    result = tl.div_rn(acc * shrink[:, None], denominator[:, None])
    out = out_ptr + item * out_stride + head[:, None] * out_stride_head + offs_d[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=live_q)
    tl.store(lse_ptr + item * lse_stride + head, lse, mask=live_g)


@triton.jit(
    do_not_specialize=["lse_stride", "num_heads", "sink_stride"],
    do_not_specialize_on_alignment=["part_lse_ptr", "part_start_ptr", "sink_ptr", "lse_ptr"],
)
def combine(
    part_ptr, part_lse_ptr, part_start_ptr, sink_ptr, out_ptr, lse_ptr, out_stride, out_stride_head, lse_stride,
    sink_stride, num_heads, head_dim, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge the parts [parts, num_heads, head_dim] of one sequence and query head, in order, and apply its sink."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    first = tl.load(part_start_ptr + seq)
    last = tl.load(part_start_ptr + seq + 1)
    offs_p = tl.arange(0, BLOCK_P)
    offs_d = tl.arange(0, BLOCK_D)
    live_d = offs_d < head_dim
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_P):
        part = start + offs_p
        live = part < last
        row = part.to(tl.int64) * num_heads + head
        part_lse = tl.load(part_lse_ptr + row, mask=live, other=float("-inf"))
        values = tl.load(
            part_ptr + row[:, None] * head_dim + offs_d[None, :], mask=live[:, None] & live_d[None, :], other=0.0
        )
        top = tl.maximum(m, tl.max(part_lse, axis=0))
        safe = finite_or_zero(top)
        weight = tl.exp(part_lse - safe)
        shrink = tl.exp(m - safe)
        acc = acc * shrink + tl.sum(weight[:, None] * values, axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        m = top
    sink = tl.load(sink_ptr + seq * sink_stride + head)
    shrink, denominator, lse = finish(m, total, sink)
    result = tl.div_rn(acc * shrink, denominator)
    out = out_ptr + seq * out_stride + head * out_stride_head + offs_d
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=live_d)
    tl.store(lse_ptr + seq * lse_stride + head + tl.arange(0, 1), lse)
