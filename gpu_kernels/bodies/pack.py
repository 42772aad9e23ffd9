"""Between the GPU's plain pages and the CPU's tile layout: moves of bits, no arithmetic.

The CPU's block of one page and kv head is all of K, then all of V, then (int8) the K and V scales::

    K  [page_size/16][words][16 positions]      a word is SHARE elements of one position, next to each other
    V  [head_dim/16][page_size/SHARE][16 dims]  a word is one element of SHARE positions, one after another

SHARE elements fill a 32-bit word (float32 1, 16-bit 2, int8 4); float16 is stored with SHARE 1 and 16-bit words.
So K is a transposition of words within 16 positions; V interleaves SHARE rows and goes by columns of 16 dims. A program
does 16 positions.
"""

import triton
import triton.language as tl


@triton.jit
def spread(word, part: tl.constexpr, SHARE: tl.constexpr):
    """Element ``part`` of a 32-bit word, as an unsigned number in the low bits."""
    BITS: tl.constexpr = 32 // SHARE
    return (word >> (part * BITS)) & ((1 << BITS) - 1)


@triton.jit
def pack_tile(
    k_base, v_base, k_scale_base, v_scale_base, block, first, head_dim, page_size, SHARE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Positions ``first .. first + 15`` of one page and head: bases are those of the page, ``block`` is its block."""
    words = head_dim // SHARE
    offs_w = tl.arange(0, BLOCK_W)
    offs_d = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, 16)
    live_w = (offs_w < words)[None, :]
    k = tl.load(k_base + (first + lane)[:, None] * words + offs_w[None, :], mask=live_w, other=0)
    tl.store(block + first * words + offs_w[:, None] * 16 + lane[None, :], tl.trans(k), mask=tl.trans(live_w))

    ROWS: tl.constexpr = 16 // SHARE
    offs_r = tl.arange(0, ROWS)
    live_d = (offs_d < head_dim)[None, :]
    for part in tl.static_range(SHARE):
        source = (first + offs_r * SHARE + part)[:, None] * head_dim + offs_d[None, :]
        element = tl.load(v_base + source, mask=live_d, other=0).to(block.dtype.element_ty)
        if part == 0:
            word = element
        else:
            word = word | (element << (part * (32 // SHARE)))
    v_block = block + page_size * words
    column = (offs_d // 16) * page_size * (16 // SHARE) + offs_d % 16
    tl.store(v_block + (first // SHARE + offs_r)[:, None] * 16 + column[None, :], word, mask=live_d)
    if SCALES:
        scale_block = v_block + page_size * words + first + lane
        tl.store(scale_block, tl.load(k_scale_base + first + lane))
        tl.store(scale_block + page_size, tl.load(v_scale_base + first + lane))


@triton.jit
def unpack_tile(
    k_base, v_base, k_scale_base, v_scale_base, block, first, head_dim, page_size, SHARE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The inverse of `pack_tile`, with its arguments."""
    words = head_dim // SHARE
    offs_w = tl.arange(0, BLOCK_W)
    offs_d = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, 16)
    live_w = (offs_w < words)[None, :]
    k = tl.load(block + first * words + offs_w[:, None] * 16 + lane[None, :], mask=tl.trans(live_w), other=0)
    tl.store(k_base + (first + lane)[:, None] * words + offs_w[None, :], tl.trans(k), mask=live_w)

    ROWS: tl.constexpr = 16 // SHARE
    offs_r = tl.arange(0, ROWS)
    live_d = (offs_d < head_dim)[None, :]
    v_block = block + page_size * words
    column = (offs_d // 16) * page_size * (16 // SHARE) + offs_d % 16
    word = tl.load(v_block + (first // SHARE + offs_r)[:, None] * 16 + column[None, :], mask=live_d, other=0)
    for part in tl.static_range(SHARE):
        target = (first + offs_r * SHARE + part)[:, None] * head_dim + offs_d[None, :]
        element = word if SHARE == 1 else spread(word, part, SHARE)
        tl.store(v_base + target, element.to(v_base.dtype.element_ty), mask=live_d)
    if SCALES:
        scale_block = v_block + page_size * words + first + lane
        tl.store(k_scale_base + first + lane, tl.load(scale_block))
        tl.store(v_scale_base + first + lane, tl.load(scale_block + page_size))


@triton.jit(
    do_not_specialize=["page_size", "head_words", "page_words"],
    do_not_specialize_on_alignment=["id_ptr", "k_scale_ptr", "v_scale_ptr"],
)
def pack(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, id_ptr, block_ptr, k_stride, k_stride_head, v_stride, v_stride_head,
    scale_stride, scale_stride_head, head_dim, page_size, head_words, page_words, SHARE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """k in words (strides too), v in unsigned elements, scales and blocks in words; ``head_words`` per block."""
    item = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    page = tl.load(id_ptr + item).to(tl.int64)
    scales = page * scale_stride + head * scale_stride_head
    pack_tile(
        k_ptr + page * k_stride + head * k_stride_head, v_ptr + page * v_stride + head * v_stride_head,
        k_scale_ptr + scales, v_scale_ptr + scales, block_ptr + item * page_words + head * head_words,
        tl.program_id(2) * 16, head_dim, page_size, SHARE, SCALES, BLOCK_W, BLOCK_D,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["page_size", "head_words", "page_words"],
    do_not_specialize_on_alignment=["id_ptr", "k_scale_ptr", "v_scale_ptr"],
)
def unpack(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, id_ptr, block_ptr, k_stride, k_stride_head, v_stride, v_stride_head,
    scale_stride, scale_stride_head, head_dim, page_size, head_words, page_words, SHARE: tl.constexpr,
    SCALES: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The inverse of `pack`, with its arguments."""
    item = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    page = tl.load(id_ptr + item).to(tl.int64)
    scales = page * scale_stride + head * scale_stride_head
    unpack_tile(
        k_ptr + page * k_stride + head * k_stride_head, v_ptr + page * v_stride + head * v_stride_head,
        k_scale_ptr + scales, v_scale_ptr + scales, block_ptr + item * page_words + head * head_words,
        tl.program_id(2) * 16, head_dim, page_size, SHARE, SCALES, BLOCK_W, BLOCK_D,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "page_size", "head_words", "page_words", "count", "num_heads", "num_layers", "num_pages", "num_blocks",
    ],
    do_not_specialize_on_alignment=["id_ptr", "home_ptr", "k_scale_ptr", "v_scale_ptr"],
)  # fmt: skip
def copy_down(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, id_ptr, home_ptr, block_ptr, k_stride, k_stride_head, v_stride,
    v_stride_head, scale_stride, scale_stride_head, head_dim, page_size, head_words, page_words, count, num_heads,
    num_layers, num_pages, num_blocks, SHARE: tl.constexpr, SCALES: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`pack` of page ``id[i]`` into block ``home[i]``, layer after layer, by as few programs as the grid has: so beside
    the kernels of a step, and no faster than the bus."""
    parts = page_size // 16
    for work in range(tl.program_id(0), num_layers * count * num_heads * parts, tl.num_programs(0)):
        first = work % parts * 16
        head = (work // parts % num_heads).to(tl.int64)
        item = work // (parts * num_heads) % count
        layer = (work // (parts * num_heads * count)).to(tl.int64)
        page = layer * num_pages + tl.load(id_ptr + item)
        block = layer * num_blocks + tl.load(home_ptr + item)
        scales = page * scale_stride + head * scale_stride_head
        pack_tile(
            k_ptr + page * k_stride + head * k_stride_head, v_ptr + page * v_stride + head * v_stride_head,
            k_scale_ptr + scales, v_scale_ptr + scales, block_ptr + block * page_words + head * head_words,
            first, head_dim, page_size, SHARE, SCALES, BLOCK_W, BLOCK_D,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "page_size", "head_words", "page_words", "count", "num_heads", "num_layers", "num_pages", "num_blocks",
    ],
    do_not_specialize_on_alignment=["id_ptr", "home_ptr", "k_scale_ptr", "v_scale_ptr"],
)  # fmt: skip
def copy_up(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, id_ptr, home_ptr, block_ptr, k_stride, k_stride_head, v_stride,
    v_stride_head, scale_stride, scale_stride_head, head_dim, page_size, head_words, page_words, count, num_heads,
    num_layers, num_pages, num_blocks, SHARE: tl.constexpr, SCALES: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The inverse of `copy_down`, with its arguments."""
    parts = page_size // 16
    for work in range(tl.program_id(0), num_layers * count * num_heads * parts, tl.num_programs(0)):
        first = work % parts * 16
        head = (work // parts % num_heads).to(tl.int64)
        item = work // (parts * num_heads) % count
        layer = (work // (parts * num_heads * count)).to(tl.int64)
        page = layer * num_pages + tl.load(id_ptr + item)
        block = layer * num_blocks + tl.load(home_ptr + item)
        scales = page * scale_stride + head * scale_stride_head
        unpack_tile(
            k_ptr + page * k_stride + head * k_stride_head, v_ptr + page * v_stride + head * v_stride_head,
            k_scale_ptr + scales, v_scale_ptr + scales, block_ptr + block * page_words + head * head_words,
            first, head_dim, page_size, SHARE, SCALES, BLOCK_W, BLOCK_D,
        )  # fmt: skip
