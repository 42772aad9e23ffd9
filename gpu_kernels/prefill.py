"""Prefill attention over paged keys: variable lengths, chunks, causal or not, window."""

import math
from dataclasses import dataclass

import torch

from gpu_kernels.bodies import prefill as bodies
from gpu_kernels.capability import capability_of
from gpu_kernels.checks import (
    CacheShape,
    cache_shape,
    ceil_div,
    check_lengths,
    check_rows,
    check_scalars,
    check_scales,
    check_table,
    check_tensor,
    first_keys_of,
    first_where,
    host_integers,
    owners,
    per_head,
    refuse,
    upload,
)
from gpu_kernels.config import Config, prefill_config
from gpu_kernels.decode import check_query_dtype
from gpu_kernels.launch import launch


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What the prefill attention of a batch of chunks does, the same for every layer. Made by `plan_prefill`."""

    cache: CacheShape
    config: Config
    q_dtype: torch.dtype
    num_tokens: int
    num_q_heads: int
    num_items: int
    sm_scale: float
    window_left: int
    causal: bool
    logits_soft_cap: float
    item_seq: torch.Tensor
    item_tile: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    alibi_slopes: torch.Tensor
    sinks: torch.Tensor

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
            For an int8 cache: [num_pages, num_kv_heads, page_size] float32.

        Returns
        -------
        out, lse

        Raises
        ------
        ValueError
            where a tensor does not fit the plan.
        """
        cache, device = self.cache, self.cache.device
        shape = (self.num_tokens, self.num_q_heads, cache.head_dim)
        cache.check(k_cache, v_cache)
        k_scale, v_scale = check_scales(cache, k_scale, v_scale) or (self.sinks, self.sinks)  # never followed
        check_rows("q", q, shape, (self.q_dtype,), device)
        if out is None:
            out = torch.empty(shape, dtype=self.q_dtype, device=device)
        check_rows("out", out, shape, (self.q_dtype,), device)
        if lse is None:
            lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
        check_tensor("lse", lse, shape[:2], (torch.float32,), device)
        launch(
            bodies.attend_tile, (self.num_items, cache.num_kv_heads), self.config, device,
            q, k_cache, v_cache, k_scale, v_scale, self.alibi_slopes, self.sinks, self.item_seq, self.item_tile,
            self.block_table, self.query_start_loc, self.seq_lens, out, lse, q.stride(0), q.stride(1), cache.stride,
            cache.stride_head, cache.num_kv_heads * cache.page_size, cache.page_size, out.stride(0), out.stride(1),
            lse.stride(0), self.block_table.stride(0), self.sm_scale, self.logits_soft_cap, self.window_left,
            int(self.causal), self.num_q_heads // cache.num_kv_heads, cache.head_dim, cache.page_shift,
        )  # fmt: skip
        return out, lse


def plan_prefill(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_q_heads: int,
    *,
    q_dtype: torch.dtype | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> PrefillPlan:
    """Check a batch of chunks and lay out its work. Everything that can be refused is refused here.

    Parameters
    ----------
    query_start_loc
        [num_seqs + 1] int32: sequence i's query tokens are rows ``query_start_loc[i]`` to ``query_start_loc[i + 1]``.
    seq_lens
        [num_seqs] int32: keys per sequence, this chunk's included. The chunk's tokens are its last positions.
    causal
        Token at position p attends to keys up to p; otherwise to all keys of its sequence.

    The others are those of `plan_decode`.

    Raises
    ------
    ValueError
        one sentence that names the argument, the sequence and the numbers.
    """
    cache = cache_shape(k_cache, v_cache)
    capability = capability_of(cache.device)
    dtype = q_dtype or (capability.half if cache.quantised else cache.dtype)
    scale = cache.head_dim**-0.5 if sm_scale is None else float(sm_scale)
    check_query_dtype(dtype, cache, capability)
    check_scalars(num_q_heads, cache.num_kv_heads, scale, window_left, logits_soft_cap)
    table = host_integers("block_table", block_table, torch.int32, 2)
    starts = host_integers("query_start_loc", query_start_loc, torch.int32, 1).to(torch.int64)
    lens = host_integers("seq_lens", seq_lens, torch.int32, 1).to(torch.int64)
    check_lengths("seq_lens", lens)
    q_lens = _query_lengths(starts, lens)
    # a chunk reads from the window of its first token on, and a sequence without a chunk reads nothing
    first_keys = first_keys_of(lens - q_lens + 1, window_left)
    check_table(table, torch.where(q_lens > 0, lens, 0), first_keys, cache)
    extras = logits_soft_cap > 0.0 or alibi_slopes is not None
    config = prefill_config(dtype, cache.quantised, extras, cache.head_dim, capability)
    item_seq, item_tile = _work(q_lens, lens, num_q_heads // cache.num_kv_heads, config.constants["BLOCK_M"])
    num_tokens = int(starts[-1])
    item_seq, item_tile, starts, table, lens = upload(cache.device, item_seq, item_tile, starts, table, lens)
    return PrefillPlan(
        cache=cache,
        config=config,
        q_dtype=dtype,
        num_tokens=num_tokens,
        num_q_heads=num_q_heads,
        num_items=len(item_seq),
        sm_scale=scale,
        window_left=window_left,
        causal=causal,
        logits_soft_cap=float(logits_soft_cap),
        item_seq=item_seq,
        item_tile=item_tile,
        query_start_loc=starts,
        block_table=table,
        seq_lens=lens,
        alibi_slopes=per_head("alibi_slopes", alibi_slopes, num_q_heads, 0.0, cache.device),
        sinks=per_head("sinks", sinks, num_q_heads, -math.inf, cache.device),
    )


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
    long = first_where(q_lens > lens)
    if long:
        refuse(
            "seq_lens",
            f"sequence {long[0]} has {lens[long].item()} keys, fewer than its {q_lens[long].item()} query tokens",
        )
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
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    causal: bool = True,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`plan_prefill` and `PrefillPlan.run` in one call, for a caller with one layer. Returns ``out, lse``."""
    plan = plan_prefill(
        k_cache, v_cache, block_table, query_start_loc, seq_lens, q.shape[1], q_dtype=q.dtype, causal=causal,
        sm_scale=sm_scale, window_left=window_left, logits_soft_cap=logits_soft_cap, alibi_slopes=alibi_slopes,
        sinks=sinks,
    )  # fmt: skip
    return plan.run(q, k_cache, v_cache, out, lse, k_scale=k_scale, v_scale=v_scale)
