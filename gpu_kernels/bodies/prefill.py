"""Prefill attention: many query tokens per sequence over paged keys, the query heads of a kv head packed together.

Row r of a sequence is token r // group, head r % group: no row is padding, whatever the group, and a short chunk
costs no more than its rows.
"""

import triton
import triton.language as tl

from gpu_kernels.bodies.pages import load_scale, load_tile, offset_of, page_of, weigh
from gpu_kernels.bodies.softmax import advance, finish, soft_cap


@triton.jit(
    do_not_specialize=["table_stride", "group", "page_shift", "lse_stride", "alibi_stride", "sink_stride"],
    do_not_specialize_on_alignment=[
        "k_scale_ptr", "v_scale_ptr", "alibi_ptr", "sink_ptr", "item_seq_ptr", "item_tile_ptr", "table_ptr",
        "q_start_ptr", "reach_ptr", "lse_ptr",
    ],
)  # fmt: skip
def attend_tile(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, alibi_ptr, sink_ptr, item_seq_ptr, item_tile_ptr, table_ptr,
    q_start_ptr, reach_ptr, out_ptr, lse_ptr, q_stride, q_stride_head, cache_stride, cache_stride_head,
    cache_stride_position, scale_stride, scale_stride_head, out_stride, out_stride_head, lse_stride, table_stride,
    alibi_stride, sink_stride, sm_scale, cap, group, head_dim, page_shift, QUANTISED: tl.constexpr,
    EXTRAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M rows of one sequence and kv head.

    ``reach_ptr`` is [num_seqs, 4]: the keys, the position of the first query counted from the first key, and how many
    keys before and after its own position a query attends to.
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    seq = tl.load(item_seq_ptr + item).to(tl.int64)
    first_row = tl.load(item_tile_ptr + item) * BLOCK_M
    q_start = tl.load(q_start_ptr + seq)
    q_len = tl.load(q_start_ptr + seq + 1) - q_start
    seq_len = tl.load(reach_ptr + seq * 4)
    context = tl.load(reach_ptr + seq * 4 + 1)
    left = tl.load(reach_ptr + seq * 4 + 2)
    right = tl.load(reach_ptr + seq * 4 + 3)

    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    row = first_row + tl.arange(0, BLOCK_M)
    token = row // group
    live_r = token < q_len
    head = kv_head * group + row % group
    live_q = live_r[:, None] & (offs_d < head_dim)[None, :]
    place = (q_start + token).to(tl.int64)
    q = tl.load(
        q_ptr + place[:, None] * q_stride + head[:, None] * q_stride_head + offs_d[None, :], mask=live_q, other=0.0
    )
    q_pos = context + token
    last_key = q_pos + right
    first_key = q_pos - left
    tile_first = tl.maximum(context + first_row // group - left, 0)
    last_token = tl.minimum((first_row + BLOCK_M - 1) // group, q_len - 1)
    tile_last = tl.minimum(context + last_token + right, seq_len - 1)

    k_base = k_ptr + kv_head * cache_stride_head
    v_base = v_ptr + kv_head * cache_stride_head
    k_scale_base = k_scale_ptr + kv_head * scale_stride_head
    v_scale_base = v_scale_ptr + kv_head * scale_stride_head
    table_row = table_ptr + seq * table_stride
    page_mask = (1 << page_shift) - 1
    if EXTRAS:
        slope = tl.load(alibi_ptr + seq * alibi_stride + head, mask=live_r, other=0.0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(tile_first // BLOCK_N * BLOCK_N, tile_last + 1, BLOCK_N):
        pos = start + offs_n
        live = (pos <= tile_last) & (pos >= tile_first)
        page = page_of(table_row, pos, live, page_shift)
        offset = offset_of(page, pos, cache_stride, page_mask, cache_stride_position)
        k = load_tile(k_base, offset, live, offs_d, head_dim)
        score = tl.dot(q, tl.trans(k).to(q.dtype), input_precision="ieee")
        if QUANTISED:
            score *= load_scale(k_scale_base, page, pos, live, scale_stride, page_mask)[None, :]
        score *= sm_scale
        if EXTRAS:
            if cap > 0.0:
                score = soft_cap(score, cap)
            score += slope[:, None] * (pos[None, :] - q_pos[:, None]).to(tl.float32)
        allowed = live[None, :] & (pos[None, :] <= last_key[:, None]) & (pos[None, :] >= first_key[:, None])
        score = tl.where(allowed, score, float("-inf"))
        weight, shrink, m, total = advance(score, m, total)
        v = load_tile(v_base, offset, live, offs_d, head_dim)
        if QUANTISED:
            v_scale = load_scale(v_scale_base, page, pos, live, scale_stride, page_mask)
        else:
            v_scale = weight
        acc = acc * shrink[:, None] + weigh(weight, v, v_scale, QUANTISED, q.dtype)

    sink = tl.load(sink_ptr + seq * sink_stride + head, mask=live_r, other=float("-inf"))
    shrink, denominator, lse = finish(m, total, sink)
    result = tl.div_rn(acc * shrink[:, None], denominator[:, None])
    out = out_ptr + place[:, None] * out_stride + head[:, None] * out_stride_head + offs_d[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=live_q)
    tl.store(lse_ptr + place * lse_stride + head, lse, mask=live_r)
