"""Row-wise work around the matrix products, one pass over memory each."""

import torch

from gpu_kernels.bodies import fused as bodies
from gpu_kernels.capability import capability_of
from gpu_kernels.checks import check_contiguous, check_rows, check_tensor, first_where, refuse
from gpu_kernels.config import DTYPES, MAX_HIDDEN, rms_norm_config, rope_config, silu_mul_config
from gpu_kernels.launch import launch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``y / sqrt(mean(y**2) + eps) * (weight + weight_offset)`` per row, in float32, rounded once.

    Parameters
    ----------
    x
        [num_tokens, hidden], hidden a multiple of 16 up to 16,384; float32, float16 or bfloat16.
    weight
        [hidden], dtype of ``x``.
    residual
        Shape and dtype of ``x``; when given, ``residual += x`` happens in place first and y is the new residual.
        Otherwise y is ``x``.
    weight_offset
        0, or 1 for models that store the weight minus one (Gemma).
    out
        Where to write; made when absent, may be ``x``.

    Raises
    ------
    ValueError
        where shapes, dtypes, strides or devices don't fit.
    """
    if x.dim() != 2 or x.shape[1] % 16 or not 16 <= x.shape[1] <= MAX_HIDDEN:
        refuse("x", f"shape {tuple(x.shape)} is not [num_tokens, a multiple of 16 up to {MAX_HIDDEN}]")
    shape, device = tuple(x.shape), x.device
    capability_of(device).refuse_dtype("x", x.dtype)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=device)
    check_rows("x", x, shape, DTYPES, device)
    check_rows("out", out, shape, (x.dtype,), device)
    check_rows("weight", weight, shape[1:], (x.dtype,), device)
    if residual is not None:
        check_rows("residual", residual, shape, (x.dtype,), device)
    if not eps >= 0.0:
        refuse("eps", f"{eps} is not a number from 0 on")
    sums = x if residual is None else residual
    launch(
        bodies.rms_norm, (shape[0],), rms_norm_config(residual is not None, shape[1]), device,
        x, sums, weight, out, x.stride(0), sums.stride(0), out.stride(0), shape[1], float(eps), float(weight_offset),
    )  # fmt: skip
    return out


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    check_ids: bool = True,
) -> torch.Tensor:
    """Rotate the first ``2 * cos.shape[1]`` columns of every head in place.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin).

    Parameters
    ----------
    x
        [num_tokens, num_heads, head_dim], queries or keys; may be a view into a fused QKV matrix.
    cos, sin
        [max_positions, rotary_dim / 2] float32, contiguous.
    positions
        [num_tokens] int32 or int64.
    interleaved
        Pairs are (2d, 2d + 1) instead of (d, d + rotary_dim / 2).
    check_ids
        Check that the positions are in the table. On a CUDA tensor that waits for the device; pass False where the
        caller knows.

    Raises
    ------
    ValueError
        one sentence that names the argument, the row and the numbers.
    """
    if x.dim() != 3 or cos.dim() != 2:
        refuse("x, cos", f"shapes {tuple(x.shape)}, {tuple(cos.shape)} are not 3- and 2-dimensional")
    tokens, heads, head_dim = x.shape
    device, half = x.device, cos.shape[1]
    capability_of(device).refuse_dtype("x", x.dtype)
    check_rows("x", x, (tokens, heads, head_dim), DTYPES, device)
    if not 1 <= half <= head_dim // 2 or half > 128:
        refuse("cos", f"{half} columns rotate {2 * half} of a head's {head_dim}; at most those and 256 are possible")
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, tuple(cos.shape), (torch.float32,), device)
        check_contiguous(name, table)
    check_tensor("positions", positions, (tokens,), (torch.int32, torch.int64), device)
    if check_ids:
        _check_positions(positions, cos.shape[0])
    config = rope_config(interleaved, half)
    launch(
        bodies.rope, (tokens, -(-heads // config.constants["BLOCK_H"])), config, device,
        x, cos, sin, positions, x.stride(0), x.stride(1), heads, half,
    )  # fmt: skip
    return x


def _check_positions(positions: torch.Tensor, limit: int) -> None:
    host = positions.detach().cpu()
    bad = first_where((host < 0) | (host >= limit))
    if bad:
        refuse("positions", f"row {bad[0]} is at position {int(host[bad])}, the table goes from 0 to {limit - 1}")


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up`` -> [num_tokens, width], in float32, rounded once.

    Parameters
    ----------
    gate_up
        [num_tokens, 2 * width], the gate first, width a multiple of 16; float32, float16 or bfloat16.
    out
        [num_tokens, width] of the same dtype; made when absent.

    Raises
    ------
    ValueError
        where shapes, dtypes, strides or devices don't fit.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 32 or not gate_up.shape[1]:
        refuse("gate_up", f"shape {tuple(gate_up.shape)} is not [num_tokens, twice a multiple of 16]")
    rows, width, device = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.device
    capability_of(device).refuse_dtype("gate_up", gate_up.dtype)
    if out is None:
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=device)
    check_rows("gate_up", gate_up, tuple(gate_up.shape), DTYPES, device)
    check_rows("out", out, (rows, width), (gate_up.dtype,), device)
    config = silu_mul_config()
    grid = (rows, -(-width // config.constants["BLOCK"]))
    launch(bodies.silu_mul, grid, config, device, gate_up, out, gate_up.stride(0), out.stride(0), width)
    return out
