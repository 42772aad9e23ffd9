"""Paged decode attention: plan once per batch, run once per layer.

::

    host   plan (checks, work list, one upload)   run(layer 0)   run(layer 1)  ...
    GPU                                             attend_split combine | attend_split combine | ...
"""

import math
from dataclasses import dataclass

import torch

from gpu_kernels.attention import Attention, attention_over
from gpu_kernels.bodies import decode as bodies
from gpu_kernels.checks import (
    ceil_div,
    check_lengths,
    check_table,
    codes,
    first_keys_of,
    host_integers,
    owners,
    per_head,
    refuse,
    upload,
)
from gpu_kernels.config import SPLIT_MULTIPLE, Config, combine_config, decode_config
from gpu_kernels.launch import launch

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
    seq_lens: torch.Tensor
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
        out, lse = attention.results(self.num_seqs, out, lse, torch.float32)
        if self.direct:
            self._attend(q, k_cache, v_cache, scales, attention.sinks, out, lse)
        else:
            parts, part_lse = self._parts(workspace)
            self._attend(q, k_cache, v_cache, scales, self.no_sinks, parts, part_lse)
            self._combine(parts, part_lse, out, lse)
        return out, lse

    def _parts(self, workspace: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if workspace is None:
            workspace = self.make_workspace()
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
        grid = (self.num_parts, cache.num_kv_heads, -(-attention.group // self.config.constants["BLOCK_G"]))
        launch(
            bodies.attend_split, grid, self.config, cache.device,
            q, codes(k_cache), codes(v_cache), *scales, attention.alibi_slopes, sinks, self.item_seq, self.item_split,
            self.block_table, self.seq_lens, out, lse, q.stride(0), q.stride(1), *cache.strides, out.stride(0),
            out.stride(1), lse.stride(0), self.block_table.stride(0), attention.sm_scale, attention.logits_soft_cap,
            attention.window_left, attention.group, cache.head_dim, cache.page_shift, self.split_tokens,
        )  # fmt: skip

    def _combine(self, parts: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        num_heads, head_dim, device = out.shape[1], out.shape[2], out.device
        launch(
            bodies.combine, (self.num_seqs, num_heads), combine_config(head_dim), device,
            parts, part_lse, self.part_start, self.attention.sinks, out, lse, out.stride(0), out.stride(1),
            lse.stride(0), num_heads, head_dim,
        )  # fmt: skip


def plan_decode(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    num_q_heads: int,
    *,
    q_dtype: torch.dtype | None = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    split_tokens: int = DEFAULT_SPLIT_TOKENS,
) -> DecodePlan:
    """Check a batch and lay out its work. Everything that can be refused is refused here.

    Parameters
    ----------
    k_cache, v_cache
        One layer's cache, for its geometry: [num_pages, num_kv_heads, page_size, head_dim], float32, float16, bfloat16,
        int8 or float8_e4m3fn. Contents are not read.
    block_table
        [num_seqs, max_pages] int32. Entries before the window and past a sequence's last page are never read.
    seq_lens
        [num_seqs] int32, keys per sequence; 0 is an empty sequence. Give host tensors: device ones are copied down.
    q_dtype
        dtype of the queries; the cache's by default, and for one with scales the device's 16-bit type.
    sm_scale
        Factor on q.k; ``head_dim ** -0.5`` by default.
    window_left
        The query attends to the last ``window_left + 1`` positions; -1: all.
    logits_soft_cap
        ``cap * tanh(score / cap)`` before bias and mask; 0: none.
    alibi_slopes, sinks
        [num_q_heads]: slope times (key position - query position) is added; a sink is a further logit without a value.
    split_tokens
        Keys per split, a multiple of 64. Results depend on it (by rounding), never on the other rows.

    Raises
    ------
    ValueError
        one sentence that names the argument, the sequence and the numbers.
    """
    attention = attention_over(
        k_cache, v_cache, num_q_heads, q_dtype, sm_scale, window_left, logits_soft_cap, alibi_slopes, sinks
    )
    cache = attention.cache
    if split_tokens < SPLIT_MULTIPLE or split_tokens % SPLIT_MULTIPLE:
        refuse("split_tokens", f"{split_tokens} is not a positive multiple of {SPLIT_MULTIPLE}")
    table = host_integers("block_table", block_table, torch.int32, 2)
    lens = host_integers("seq_lens", seq_lens, torch.int32, 1)
    check_lengths("seq_lens", lens)
    first_keys = first_keys_of(lens, window_left)
    check_table(table, lens, first_keys, cache)
    item_seq, item_split, part_start = _work(lens, first_keys, split_tokens)
    item_seq, item_split, part_start, table, lens = upload(cache.device, item_seq, item_split, part_start, table, lens)
    config = decode_config(
        attention.q_dtype, cache.quantised, attention.extras, attention.group, cache.head_dim, attention.capability
    )
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
        seq_lens=lens,
        no_sinks=per_head("sinks", None, num_q_heads, -math.inf, cache.device),
    )


def _work(
    lens: torch.Tensor, first_keys: torch.Tensor, split_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Work items in sequence order: item -> sequence, item -> split, and each sequence's first item.

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
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    split_tokens: int = DEFAULT_SPLIT_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`plan_decode` and `DecodePlan.run` in one call, for a caller with one layer. Returns ``out, lse``."""
    plan = plan_decode(
        k_cache, v_cache, block_table, seq_lens, q.shape[1], q_dtype=q.dtype, sm_scale=sm_scale,
        window_left=window_left, logits_soft_cap=logits_soft_cap, alibi_slopes=alibi_slopes, sinks=sinks,
        split_tokens=split_tokens,
    )  # fmt: skip
    return plan.run(q, k_cache, v_cache, out, lse, k_scale=k_scale, v_scale=v_scale)
