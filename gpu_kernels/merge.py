"""Merging partial attention results over disjoint key sets, by their LSE."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from gpu_kernels.bodies import merge as bodies
from gpu_kernels.capability import capability_of
from gpu_kernels.checks import check_contiguous, check_head_dim, check_is_tensor, check_rows, check_tensor, refuse
from gpu_kernels.config import DTYPES, merge_config
from gpu_kernels.launch import launch
from gpu_kernels.overlap import check_result, refuse_overlap


def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *,
    mask: Any = None,
    base2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the union of two disjoint key sets from the results over each.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b``. A part with
    lse -inf (or +inf, as some libraries write it) is empty: the other comes back bit for bit, and two empty parts give
    0 and -inf.

    Parameters
    ----------
    out_a, out_b
        [num_seqs, num_heads, head_dim], float32, float16 or bfloat16, of one dtype.
    lse_a, lse_b
        [num_seqs, num_heads] float32, natural log, contiguous.
    out, lse
        Where to write; made when absent, and may be exactly one of the inputs.
    mask
        [num_seqs] bool: rows to merge; the others keep part a.
    base2
        The LSEs, given and returned, are logs to base 2.

    Raises
    ------
    ValueError
        where shapes, dtypes, strides or devices don't fit.
    """
    check_is_tensor("out_a", out_a)
    if out_a.dim() != 3:
        refuse("out_a", f"shape {tuple(out_a.shape)} is not [num_seqs, num_heads, head_dim]")
    device, shape = out_a.device, tuple(out_a.shape)
    capability = capability_of(device)
    check_head_dim("out_a", shape[2])
    if out is None:
        out = torch.empty(shape, dtype=out_a.dtype, device=device)
    if lse is None:
        lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
    for name, tensor in (("out_a", out_a), ("out_b", out_b), ("out", out)):
        check_rows(name, tensor, shape, DTYPES if name == "out_a" else (out_a.dtype,), device)
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        check_tensor(name, tensor, shape[:2], (torch.float32,), device)
        check_contiguous(name, tensor)
    for result, name, parts in ((out, "out", ("out_a", "out_b")), (lse, "lse", ("lse_a", "lse_b"))):
        check_result(name, result)
        pair = (out_a, out_b) if name == "out" else (lse_a, lse_b)
        refuse_overlap(name, result, list(zip(parts, pair, strict=True)))
    refuse_overlap("lse", lse, [("out", out), ("out_a", out_a), ("out_b", out_b)], in_place=False)
    if mask is not None:
        rows = torch.as_tensor(mask, device=device)
        check_tensor("mask", rows, shape[:1], (torch.bool,), device)
        lse_b = torch.where(rows[:, None], lse_b, -math.inf)
    capability.refuse_dtype("out_a", out_a.dtype)
    config, count = merge_config(shape[2]), shape[0] * shape[1]
    launch(
        bodies.merge, (-(-count // config.constants["BLOCK_R"]),), config, device,
        out_a, lse_a, out_b, lse_b, out, lse, count, shape[1], shape[2], out_a.stride(0), out_a.stride(1),
        out_b.stride(0), out_b.stride(1), out.stride(0), out.stride(1),
        math.log(2.0) if base2 else 1.0,
    )  # fmt: skip
    return out, lse


def merge_states(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *,
    mask: Any = None,
    base2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_state` over any number of parts, from the first to the last; a single part is copied."""
    if not len(outs) or len(outs) != len(lses):
        refuse("outs", f"{len(outs)} parts and {len(lses)} LSEs; at least one part and as many LSEs are needed")
    total, sums = outs[0].clone(), lses[0].clone()
    others = list(zip(outs[1:], lses[1:], strict=True)) or [(outs[0], torch.full_like(sums, -math.inf))]
    for part, part_lse in others:
        merge_state(total, sums, part, part_lse, total, sums, mask=mask, base2=base2)
    for name, given, made in (("out", out, total), ("lse", lse, sums)):
        if given is not None:
            check_tensor(name, given, tuple(made.shape), (made.dtype,), made.device)
            check_result(name, given)
            given.copy_(made)
    return total if out is None else out, sums if lse is None else lse
