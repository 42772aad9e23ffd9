"""Rotary position embeddings: frequencies and cos/sin tables in float32, and their application.

The order of the float32 operations is that of transformers, so that the tables are equal bit for bit.
"""

from __future__ import annotations

import math

import torch

from hybridattn.core.errors import InputError
from hybridattn.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair, float32 ``[head_dim / 2]``.

    ``theta ** (-2 i / head_dim)`` (Su et al. 2021, RoFormer, section 3.4.2), stretched as ``rope.kind`` says;
    ``llama3`` is the scaling published with Llama 3.1.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponent)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    wavelength = 2 * math.pi / plain
    turns = rope.original_max_position / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    low = wavelength > rope.original_max_position / rope.low_freq_factor
    high = wavelength < rope.original_max_position / rope.high_freq_factor
    stretched = torch.where(low, plain / rope.factor, plain)
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    return torch.where(low | high, stretched, blended)


def rope_tables(
    rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position below ``num_positions``, float32 ``[num_positions, head_dim / 2]`` each."""
    if num_positions < 1:
        raise InputError(f"num_positions must be at least 1, got {num_positions}")
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    return angles.cos().to(device), angles.sin().to(device)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs ``(i, i + head_dim / 2)`` of every head.

    Parameters
    ----------
    x : ``[num_tokens, num_heads, head_dim]``, fp32 or bf16
    cos, sin : float32 ``[num_tokens, head_dim / 2]``, the table rows of the tokens' positions

    Returns
    -------
    ``[num_tokens, num_heads, head_dim]`` in the dtype of ``x``; computed in float32.
    """
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos[:, None, :], sin[:, None, :]
    out = torch.empty_like(x)
    out[..., :half] = first * cos - second * sin
    out[..., half:] = second * cos + first * sin
    return out
