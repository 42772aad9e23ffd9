"""Merging partial attention results over disjoint key sets, by their LSE."""

from collections.abc import Sequence

import torch

from gpu_kernels.bodies import merge as bodies
from gpu_kernels.capability import capability_of
from gpu_kernels.checks import check_contiguous, check_head_dim, check_rows, check_tensor, refuse
from gpu_kernels.config import DTYPES, merge_config
from gpu_kernels.launch import launch


def merge_state(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the union of two disjoint key sets from the results over each.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b``. A part with
    lse -inf is empty: the other comes back bit for bit, and two empty parts give 0 and -inf.

    Parameters
    ----------
    out_a, out_b
        [num_seqs, num_heads, head_dim], float32, float16 or bfloat16, of one dtype.
    lse_a, lse_b
        [num_seqs, num_heads] float32, natural log, contiguous.
    out, lse
        Where to write; made when absent, and may be one of the inputs.

    Raises
    ------
    ValueError
        where shapes, dtypes, strides or devices don't fit.
    """
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
    capability.refuse_dtype("out_a", out_a.dtype)
    config, rows = merge_config(shape[2]), shape[0] * shape[1]
    launch(
        bodies.merge, (-(-rows // config.constants["BLOCK_R"]),), config, device,
        out_a, lse_a, out_b, lse_b, out, lse, rows, shape[1], shape[2], out_a.stride(0), out_a.stride(1),
        out_b.stride(0), out_b.stride(1), out.stride(0), out.stride(1),
    )  # fmt: skip
    return out, lse


def merge_states(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_state` over any number of parts, from the first to the last; a single part is copied."""
    if not outs or len(outs) != len(lses):
        refuse("outs", f"{len(outs)} parts and {len(lses)} LSEs; at least one part and as many LSEs are needed")
    out, lse = outs[0].clone(), lses[0].clone()
    for part, part_lse in zip(outs[1:], lses[1:], strict=True):
        merge_state(out, lse, part, part_lse, out, lse)
    return out, lse
