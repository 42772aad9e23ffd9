"""Paged decode attention: plan once per batch, run once per layer.

::

    host   plan (checks, work list, one upload)   run(layer 0)   run(layer 1)  ...
    GPU                                             attend_split combine | attend_split combine | ...
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from gpu_kernels.attention import Attention, attention_over, check_queries
from gpu_kernels.bodies import decode as bodies
from gpu_kernels.cache_shape import check_table, codes
from gpu_kernels.checks import (
    ceil_div,
    check_is_tensor,
    check_lengths,
    host_integers,
    owners,
    per_head,
    refuse,
    upload,
    whole,
)
from gpu_kernels.config import DECODE_TILES, SPLIT_MULTIPLE, Config, combine_config, decode_config
from gpu_kernels.launch import launch
from gpu_kernels.overlap import refuse_overlap
from gpu_kernels.reach import relative_query, sides, span

DEFAULT_SPLIT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What a batch's decode attention does, the same for every layer of equal cache geometry. Made by `plan_decode`."""

    attention: Attention
    config: Config
    num_seqs: int
    num_parts: int
    split_tokens: int
    item_seq: torch.Tensor
    item_split: torch.Tensor
    part_start: torch.Tensor
    block_table: torch.Tensor
    spans: torch.Tensor
    no_sinks: torch.Tensor

    def __post_init__(self) -> None:
        if self.num_parts < self.num_seqs:
            raise ValueError(f"num_parts: {self.num_parts} parts can't cover {self.num_seqs} sequences")

    @property
    def direct(self) -> bool:
        """Whether every sequence is one split, so that no parts are kept and merged."""
        return self.num_parts == self.num_seqs

    @property
    def workspace_size(self) -> int:
        """Elements of float32 workspace that `run` needs."""
        attention = self.attention
        return 0 if self.direct else self.num_parts * attention.num_q_heads * (attention.cache.head_dim + 1)

    def make_workspace(self) -> torch.Tensor:
        """A workspace for `run`; runs that may overlap need one each."""
        return torch.empty(self.workspace_size, dtype=torch.float32, device=self.attention.cache.device)

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue the attention of one layer on the current stream.

        Parameters
        ----------
        q
            [num_seqs, num_q_heads, head_dim] of the plan's ``q_dtype``; may be a view into a fused QKV matrix.
        k_cache, v_cache
            [num_pages, num_kv_heads, page_size, head_dim] each, with the geometry the plan was made for.
        out
            Same shape as ``q``, its dtype or float32; made when absent.
        lse
            [num_seqs, num_q_heads] float32, natural log; made when absent. A sequence without keys: out 0, lse -inf.
        k_scale, v_scale
            For an int8 or fp8 cache: [num_pages, num_kv_heads, page_size] float32.
        workspace
            ``workspace_size`` float32 elements or more; made when absent.

        Returns
        -------
        out, lse

        Raises
        ------
        ValueError
            where a tensor does not fit the plan.
        """
        attention = self.attention
        scales = attention.check(q, k_cache, v_cache, self.num_seqs, k_scale, v_scale)
        out, lse = attention.results(self.num_seqs, out, lse, q, (k_cache, v_cache), torch.float32)
        if self.direct:
            self._attend(q, k_cache, v_cache, scales, attention.sinks, out, lse)
        else:
            parts, part_lse = self._parts(workspace)
            refuse_overlap(
                "workspace",
                parts.view(-1),
                [("q", q), ("out", out), ("lse", lse), ("k_cache", k_cache)],
                in_place=False,
            )
            self._attend(q, k_cache, v_cache, scales, self.no_sinks, parts, part_lse)
            self._combine(parts, part_lse, out, lse)
        return out, lse

    def _parts(self, workspace: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if workspace is None:
            workspace = self.make_workspace()
        check_is_tensor("workspace", workspace)
        if workspace.dtype is not torch.float32 or not workspace.is_contiguous():
            refuse("workspace", f"{workspace.dtype}, strides {workspace.stride()}: contiguous float32 is needed")
        cache, rows = self.attention.cache, (self.num_parts, self.attention.num_q_heads)
        if workspace.numel() < self.workspace_size or workspace.device != cache.device:
            refuse(
                "workspace",
                f"{workspace.numel()} elements on {workspace.device}; needed are {self.workspace_size} on "
                f"{cache.device}",
            )
        flat, cut = workspace.view(-1), rows[0] * rows[1] * cache.head_dim
        return flat[:cut].view(*rows, cache.head_dim), flat[cut : self.workspace_size].view(rows)

    def _attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor],
        sinks: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        attention, cache = self.attention, self.attention.cache
        sink_stride = sinks.stride(0) if sinks.dim() == 2 else 0
        grid = (self.num_parts, cache.num_kv_heads, -(-attention.group // self.config.constants["BLOCK_G"]))
        launch(
            bodies.attend_split, grid, self.config, cache.device,
            q, codes(k_cache), codes(v_cache), *scales, attention.alibi_slopes, sinks, self.item_seq, self.item_split,
            self.block_table, self.spans, out, lse, q.stride(0), q.stride(1), *cache.strides, out.stride(0),
            out.stride(1), lse.stride(0), self.block_table.stride(0), attention.bias_strides[0], sink_stride,
            attention.sm_scale, attention.logits_soft_cap, attention.group, cache.head_dim, cache.page_shift,
            self.split_tokens,
        )  # fmt: skip

    def _combine(self, parts: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        num_heads, head_dim, device = out.shape[1], out.shape[2], out.device
        launch(
            bodies.combine, (self.num_seqs, num_heads), combine_config(head_dim), device,
            parts, part_lse, self.part_start, self.attention.sinks, out, lse, out.stride(0), out.stride(1),
            lse.stride(0), self.attention.bias_strides[1], num_heads, head_dim,
        )  # fmt: skip


def plan_decode(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: Any,
    seq_lens: Any,
    num_q_heads: int,
    *,
    q_dtype: torch.dtype | None = None,
    sm_scale: float | None = None,
    window_left: Any = -1,
    window_right: Any = -1,
    causal: Any = True,
    logits_soft_cap: float | None = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    with_sinks: Any = True,
    key_start: Any = None,
    query_pos: Any = None,
    split_tokens: int | None = DEFAULT_SPLIT_TOKENS,
    tile: tuple[int, int] | None = None,
) -> DecodePlan:
    """Check a batch and lay out its work. Everything that can be refused is refused here.

    Parameters
    ----------
    k_cache, v_cache
        One layer's cache, for its geometry: [num_pages, num_kv_heads, page_size, head_dim], float32, float16, bfloat16,
        int8 or float8_e4m3fn, of any strides with a contiguous last axis (a transposed [num_pages, page_size,
        num_kv_heads, head_dim], say). Contents are not read. A page_size may be a multiple of one that is supported
        (48, 96, 256).
    block_table
        [num_seqs, max_pages] integers. Entries before the window and past a sequence's last page are never read.
    seq_lens
        [num_seqs] integers, keys per sequence; 0 is an empty sequence. Give host tensors, arrays or lists: device ones
        are copied down.
    q_dtype
        dtype of the queries; the cache's by default, and for one with scales the device's 16-bit type.
    sm_scale
        Factor on q.k; ``head_dim ** -0.5`` by default.
    window_left, window_right
        Keys before and after the query that it attends to, beside its own position; -1 or None: all. One number or
        one per sequence.
    causal
        No key after the query is attended to. One bool or one per sequence.
    logits_soft_cap
        ``cap * tanh(score / cap)`` before bias and mask; 0 or None: none.
    alibi_slopes, sinks
        [num_q_heads] or [num_seqs, num_q_heads]: slope times (key position - query position) is added; a sink is a
        further logit without a value, -inf for none.
    with_sinks
        Whether sinks count, one bool or one per sequence: of a sequence in several parts, in one.
    key_start
        [num_seqs]: position of each sequence's first key, 0 by default. A sequence may so be a part of another.
    query_pos
        [num_seqs]: position of each query; ``key_start + seq_lens - 1``, its last key's, by default.
    split_tokens
        Keys per split, a multiple of 64. Results depend on it (by rounding), never on the other rows.
    tile
        (keys, stages) of a program's loop, one of `config.tiles_of`; by default what suits the device by its shared
        memory. It is passed over where it does not apply (scales, ALiBi, other head dims). Results depend on the keys
        by rounding.

    Raises
    ------
    ValueError
        one sentence that names the argument, the sequence and the numbers.
    """
    lens = host_integers("seq_lens", seq_lens, torch.int32, 1)
    check_lengths("seq_lens", lens)
    attention = attention_over(
        k_cache, v_cache, num_q_heads, q_dtype, sm_scale, logits_soft_cap, alibi_slopes, sinks, with_sinks, len(lens)
    )
    cache = attention.cache
    split_tokens = DEFAULT_SPLIT_TOKENS if split_tokens is None else whole("split_tokens", split_tokens)
    if split_tokens < SPLIT_MULTIPLE or split_tokens % SPLIT_MULTIPLE:
        refuse("split_tokens", f"{split_tokens} is not a positive multiple of {SPLIT_MULTIPLE}")
    if tile is not None and tile not in DECODE_TILES:
        refuse("tile", f"{tile} is none of {', '.join(map(str, DECODE_TILES))}")
    table = host_integers("block_table", block_table, torch.int32, 2)
    counts = lens.to(torch.int64)
    query = relative_query(counts, 1, key_start, query_pos)
    begin, end = span(counts, query, query, *sides(causal, window_left, window_right, len(lens)))
    table = check_table(table, lens, begin, end, cache)
    item_seq, item_split, part_start = _work(end, begin, split_tokens)
    spans = torch.stack((begin, end, query), 1)
    item_seq, item_split, part_start, table, spans = upload(
        cache.device, item_seq, item_split, part_start, table, spans
    )
    config = decode_config(
        attention.q_dtype, cache.quantised, attention.extras, attention.group, cache.head_dim, attention.capability,
        tile,
    )  # fmt: skip
    return DecodePlan(
        attention=attention,
        config=config,
        num_seqs=len(lens),
        num_parts=len(item_seq),
        split_tokens=split_tokens,
        item_seq=item_seq,
        item_split=item_split,
        part_start=part_start,
        block_table=table,
        spans=spans,
        no_sinks=per_head("sinks", None, attention.num_q_heads, -math.inf, cache.device),
    )


def _work(
    lens: torch.Tensor, first_keys: torch.Tensor, split_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Work items over the keys ``first_keys`` to ``lens - 1``, in sequence order.

    Returned are item -> sequence, item -> split, and each sequence's first item.
    Splits wholly before the window are left out; an empty sequence gets one item, which writes its empty result.
    """
    first_split = first_keys // split_tokens
    counts = (ceil_div(lens.to(torch.int64), split_tokens) - first_split).clamp(min=1)
    part_start = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    item_seq = owners(counts)
    item_split = torch.arange(len(item_seq)) - part_start[item_seq] + first_split[item_seq]
    return item_seq, item_split, part_start


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: Any,
    seq_lens: Any,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`plan_decode` and `DecodePlan.run` in one call, for a caller with one layer. Returns ``out, lse``.

    ``options`` are those of `plan_decode`.
    """
    check_queries(q)
    plan = plan_decode(k_cache, v_cache, block_table, seq_lens, q.shape[1], q_dtype=q.dtype, **options)
    return plan.run(q, k_cache, v_cache, out, lse, k_scale=k_scale, v_scale=v_scale)
