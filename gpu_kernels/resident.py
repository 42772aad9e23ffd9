"""Decode plans whose integers stay on the device, so that one plan, or a graph of it, serves many steps."""

from dataclasses import dataclass, replace

import torch

from gpu_kernels.checks import refuse
from gpu_kernels.decode import DecodePlan, plan_decode


@dataclass(frozen=True, slots=True)
class DecodeIntegers:
    """int32 tensors of ``DecodePlan`` for up to ``len(spans)`` sequences, which their owner brings up to date.

    ``item_seq``, ``item_split`` [items], ``part_start`` [num_seqs + 1], ``block_table`` [num_seqs, max_pages],
    ``spans`` [num_seqs, 3]: first key, one past the last, position of the query. Their owner answers for them: nothing
    checks what lies on a device. Items past those of the plan's sequences may name any sequence, with a split that
    begins behind its last key.
    """

    item_seq: torch.Tensor
    item_split: torch.Tensor
    part_start: torch.Tensor
    block_table: torch.Tensor
    spans: torch.Tensor

    def __post_init__(self) -> None:
        rows = len(self.spans)
        if len(self.part_start) != rows + 1 or len(self.block_table) != rows:
            refuse("part_start, block_table", f"{len(self.part_start)} and {len(self.block_table)} for {rows} rows")


def plan_resident(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    integers: DecodeIntegers,
    num_q_heads: int,
    *,
    split_tokens: int,
    q_dtype: torch.dtype | None = None,
    sm_scale: float | None = None,
    tile: tuple[int, int] | None = None,
) -> DecodePlan:
    """A plan of all sequences and items. ``replace(plan, num_seqs=..., num_parts=...)`` is one of the first of them:
    at least as many parts as the sequences have items; as many as there are sequences where each has one. Items are of
    ``split_tokens`` keys.

    ValueError as of `plan_decode`.
    """
    plan = plan_decode(
        k_cache, v_cache, [[0]], [0], num_q_heads, q_dtype=q_dtype, sm_scale=sm_scale, split_tokens=split_tokens,
        tile=tile,
    )  # fmt: skip
    parts = {name: getattr(integers, name) for name in ("item_seq", "item_split", "part_start", "block_table", "spans")}
    return replace(plan, num_seqs=len(integers.spans), num_parts=len(integers.item_seq), **parts)
