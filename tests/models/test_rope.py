"""Rotary tables: known values, and equality with transformers bit for bit."""

from __future__ import annotations

import pytest
import torch

from hybridattn.core.errors import InputError
from hybridattn.models.config import RopeConfig, parse_config
from hybridattn.models.rope import apply_rope, inverse_frequencies, rope_tables

LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def ratios(head_dim: int, factor: float) -> torch.Tensor:
    scaled = RopeConfig(500000.0, "llama3", factor, 1.0, 4.0, 8192)
    return inverse_frequencies(scaled, head_dim) / inverse_frequencies(RopeConfig(500000.0), head_dim)


def test_L04_llama3_scaling_with_head_dim_128_and_factor_8():
    r = ratios(128, 8.0)
    assert torch.equal(r[:29], torch.ones(29))
    blended = torch.tensor([0.8282, 0.6437, 0.4935, 0.3711, 0.2714, 0.1902])
    torch.testing.assert_close(r[29:35], blended, rtol=0, atol=6e-5)
    assert torch.equal(r[35:], torch.full((29,), 1 / 8))


def test_L04_llama3_scaling_with_head_dim_64_and_factor_32():
    r = ratios(64, 32.0)
    assert torch.equal(r[:15], torch.ones(15))
    torch.testing.assert_close(r[15:18], torch.tensor([0.6056, 0.3037, 0.1034]), rtol=0, atol=6e-5)
    assert torch.equal(r[18:], torch.full((14,), 1 / 32))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", **LLAMA31},
    ],
)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_tables_equal_transformers_bit_for_bit(head_dim, scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32}
    raw |= {"intermediate_size": 32, "max_position_embeddings": 16384}
    raw["rope_parameters"] = {"rope_theta": 500000.0, **scaling}
    positions = torch.arange(10000)
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**raw))(torch.zeros(1, dtype=torch.float32), positions[None])
    ours = rope_tables(parse_config({"model_type": "llama", **raw}).rope, head_dim, len(positions))
    assert torch.equal(ours[0], cos[0, :, : head_dim // 2])
    assert torch.equal(ours[1], sin[0, :, : head_dim // 2])


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    cos, sin = rope_tables(RopeConfig(), 16, 100)
    q, k = torch.randn(1, 1, 16, dtype=torch.float32), torch.randn(1, 1, 16, dtype=torch.float32)

    def at(x: torch.Tensor, position: int) -> torch.Tensor:
        return apply_rope(x, cos[position : position + 1], sin[position : position + 1])

    torch.testing.assert_close(at(q, 57).norm(), q.norm())
    torch.testing.assert_close((at(q, 60) * at(k, 53)).sum(), (at(q, 17) * at(k, 10)).sum(), rtol=1e-4, atol=1e-4)
    assert torch.equal(at(q, 0), q)


def test_an_empty_table_is_refused():
    with pytest.raises(InputError, match="num_positions must be at least 1, got 0"):
        rope_tables(RopeConfig(), 16, 0)
