"""Shapes of a decoder and the bytes and flops that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hybridattn.core.errors import InputError

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}


def dtype_bytes(dtype: str) -> int:
    """Bytes per element of ``fp32``, ``bf16``, ``fp16``, ``int8`` or ``fp8``; InputError for another name."""
    if dtype not in DTYPE_BYTES:
        raise InputError(f"dtype '{dtype}' is unknown; choose one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a Llama-family decoder."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and value < 1:
                raise InputError(f"model shape {self.name}: {f.name} must be at least 1, got {value}")
        if self.num_q_heads % self.num_kv_heads:
            raise InputError(
                f"model shape {self.name}: num_q_heads {self.num_q_heads} is not a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )

    @property
    def layer_params(self) -> int:
        """Weights of one layer's linear stages (QKV, output projection, gated MLP)."""
        qkv = self.hidden_size * self.head_dim * (self.num_q_heads + 2 * self.num_kv_heads)
        return qkv + self.num_q_heads * self.head_dim * self.hidden_size + 3 * self.hidden_size * self.intermediate_size

    @property
    def head_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        return self.num_layers * self.layer_params + self.head_params * (1 if self.tied_embeddings else 2)

    def kv_bytes_per_token_layer(self, dtype: str) -> int:
        """K and V of one token in one layer: ``2 * num_kv_heads * head_dim * element size`` bytes."""
        return 2 * self.num_kv_heads * self.head_dim * dtype_bytes(dtype)

    def kv_bytes_per_token(self, dtype: str) -> int:
        return self.num_layers * self.kv_bytes_per_token_layer(dtype)
