"""Prefill attention over paged keys: variable lengths, chunks, causal or not, window."""

from dataclasses import dataclass
from typing import Any

import torch

from gpu_kernels.attention import Attention, attention_over, check_queries
from gpu_kernels.bodies import prefill as bodies
from gpu_kernels.cache_shape import check_table, codes
from gpu_kernels.checks import ceil_div, check_lengths, first_where, host_integers, owners, refuse, upload
from gpu_kernels.config import Config, prefill_config
from gpu_kernels.launch import launch
from gpu_kernels.reach import relative_query, sides, span


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What the prefill attention of a batch of chunks does, the same for every layer. Made by `plan_prefill`."""

    attention: Attention
    config: Config
    num_tokens: int
    num_items: int
    item_seq: torch.Tensor
    item_tile: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    reach: torch.Tensor

    def __post_init__(self) -> None:
        if self.num_tokens and not self.num_items:
            raise ValueError(f"num_items: {self.num_tokens} tokens need at least one")

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue the attention of one layer on the current stream. The chunk's own K and V are already in the cache.

        Parameters
        ----------
        q
            [num_tokens, num_q_heads, head_dim] of the plan's ``q_dtype``, sequences one after another.
        k_cache, v_cache
            [num_pages, num_kv_heads, page_size, head_dim] each, with the geometry the plan was made for.
        out, lse
            [num_tokens, num_q_heads, head_dim] of ``q_dtype`` and [num_tokens, num_q_heads] float32 (natural log);
            made when absent.
        k_scale, v_scale
            For an int8 or fp8 cache: [num_pages, num_kv_heads, page_size] float32.

        Returns
        -------
        out, lse

        Raises
        ------
        ValueError
            where a tensor does not fit the plan.
        """
        attention, cache = self.attention, self.attention.cache
        scales = attention.check(q, k_cache, v_cache, self.num_tokens, k_scale, v_scale)
        out, lse = attention.results(self.num_tokens, out, lse, q, (k_cache, v_cache))
        launch(
            bodies.attend_tile, (self.num_items, cache.num_kv_heads), self.config, cache.device,
            q, codes(k_cache), codes(v_cache), *scales, attention.alibi_slopes, attention.sinks, self.item_seq,
            self.item_tile,
            self.block_table, self.query_start_loc, self.reach, out, lse, q.stride(0), q.stride(1), *cache.strides,
            out.stride(0), out.stride(1), lse.stride(0), self.block_table.stride(0), *attention.bias_strides,
            attention.sm_scale, attention.logits_soft_cap, attention.group, cache.head_dim, cache.page_shift,
        )  # fmt: skip
        return out, lse


def plan_prefill(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: Any,
    query_start_loc: Any,
    seq_lens: Any,
    num_q_heads: int,
    *,
    query_lens: Any = None,
    q_dtype: torch.dtype | None = None,
    causal: Any = True,
    sm_scale: float | None = None,
    window_left: Any = -1,
    window_right: Any = -1,
    logits_soft_cap: float | None = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    with_sinks: Any = True,
    key_start: Any = None,
    query_pos: Any = None,
) -> PrefillPlan:
    """Check a batch of chunks and lay out its work. Everything that can be refused is refused here.

    Parameters
    ----------
    query_start_loc
        [num_seqs + 1] integers: sequence i's query tokens are rows ``query_start_loc[i]`` to ``[i + 1]``.
    seq_lens
        [num_seqs] integers: keys per sequence, this chunk's included. The chunk's tokens are its last positions; those
        that come before the first key give 0 and -inf.
    query_lens
        [num_seqs] integers, in the place of ``query_start_loc`` (then None): query tokens per sequence.
    causal
        Token at position p attends to keys up to p; otherwise to all keys of its sequence. One bool or one each.
    query_pos
        [num_seqs]: position of each sequence's first query token; ``key_start + seq_lens - its tokens`` by default.

    The others are those of `plan_decode`.

    Raises
    ------
    ValueError
        one sentence that names the argument, the sequence and the numbers.
    """
    lens = host_integers("seq_lens", seq_lens, torch.int32, 1).to(torch.int64)
    check_lengths("seq_lens", lens)
    attention = attention_over(
        k_cache, v_cache, num_q_heads, q_dtype, sm_scale, logits_soft_cap, alibi_slopes, sinks, with_sinks, len(lens)
    )
    cache = attention.cache
    table = host_integers("block_table", block_table, torch.int32, 2)
    starts = _starts(query_start_loc, query_lens)
    q_lens = _query_lengths(starts, lens)
    first = relative_query(lens, q_lens, key_start, query_pos)
    left, right = sides(causal, window_left, window_right, len(lens))
    # a chunk reads from the window of its first token on to that of its last, and a sequence without a chunk nothing
    begin, end = span(lens, first, first + q_lens - 1, left, right)
    used = q_lens > 0
    table = check_table(
        table, torch.where(used, lens, 0), torch.where(used, begin, 0), torch.where(used, end, 0), cache
    )
    right = torch.minimum(right, (lens - first).clamp(min=0))  # past the last key is far enough, and fits 32 bits
    reach = torch.stack((lens, first, left, right), 1)
    config = prefill_config(attention.q_dtype, cache.quantised, attention.extras, cache.head_dim, attention.capability)
    item_seq, item_tile = _work(q_lens, lens, attention.group, config.constants["BLOCK_M"])
    num_tokens = int(starts[-1])
    item_seq, item_tile, starts, table, reach = upload(cache.device, item_seq, item_tile, starts, table, reach)
    return PrefillPlan(
        attention=attention,
        config=config,
        num_tokens=num_tokens,
        num_items=len(item_seq),
        item_seq=item_seq,
        item_tile=item_tile,
        query_start_loc=starts,
        block_table=table,
        reach=reach,
    )


def _starts(query_start_loc: Any, query_lens: Any) -> torch.Tensor:
    """First row of each sequence and the end, int64, from one of the two ways to say them."""
    if (query_start_loc is None) == (query_lens is None):
        refuse("query_start_loc", "it and query_lens say the same: give one of them")
    if query_lens is None:
        return host_integers("query_start_loc", query_start_loc, torch.int32, 1).to(torch.int64)
    counts = host_integers("query_lens", query_lens, torch.int32, 1).to(torch.int64)
    check_lengths("query_lens", counts)
    return torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))


def _query_lengths(starts: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    if len(starts) != len(lens) + 1:
        refuse(
            "query_start_loc", f"{len(starts)} entries do not fit {len(lens)} sequences, which need one more than those"
        )
    if starts[0] != 0:
        refuse("query_start_loc", f"begins at {starts[0].item()}, not at 0")
    q_lens = starts.diff()
    backward = first_where(q_lens < 0)
    if backward:
        row = backward[0]
        refuse("query_start_loc", f"sequence {row} starts at {starts[row].item()} and ends at {starts[row + 1].item()}")
    return q_lens


def _work(q_lens: torch.Tensor, lens: torch.Tensor, group: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of BLOCK_M packed rows: item -> sequence, item -> tile. Those with the most keys start first."""
    tiles = ceil_div(q_lens * group, block_m)
    item_seq = owners(tiles)
    item_tile = torch.arange(len(item_seq)) - (tiles.cumsum(0) - tiles)[item_seq]
    keys = (lens - q_lens)[item_seq] + (item_tile + 1) * block_m // group
    order = keys.argsort(descending=True, stable=True)
    return item_seq[order], item_tile[order]


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: Any,
    query_start_loc: Any,
    seq_lens: Any,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`plan_prefill` and `PrefillPlan.run` in one call, for a caller with one layer. Returns ``out, lse``.

    ``options`` are those of `plan_prefill`.
    """
    check_queries(q)
    plan = plan_prefill(
        k_cache, v_cache, block_table, query_start_loc, seq_lens, q.shape[1], q_dtype=q.dtype, **options
    )
    return plan.run(q, k_cache, v_cache, out, lse, k_scale=k_scale, v_scale=v_scale)
