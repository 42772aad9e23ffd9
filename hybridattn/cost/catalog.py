"""Shapes of well-known decoders, for plans and simulations that load no weights."""

from __future__ import annotations

from hybridattn.core.errors import InputError
from hybridattn.core.shapes import ModelShape

# name, layers, hidden, intermediate, query heads, KV heads, head_dim, vocabulary, max_model_len, tied embeddings:
# from the config.json that each model is published with. The last is nobody's: for measurements of attention.
_SHAPES = (
    ModelShape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, 8192, True),
    ModelShape("llama2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096, False),
    ModelShape("llama3.2-3b", 28, 3072, 8192, 24, 8, 128, 128256, 131072, True),
    ModelShape("llama3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072, False),
    ModelShape("llama3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072, False),
    ModelShape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, 32768, False),
    ModelShape("attention-heavy", 8, 256, 512, 8, 8, 128, 512, 16384, True),
)
SHAPES = {s.name: s for s in _SHAPES}


def shape(name: str) -> ModelShape:
    """The shape called ``name``; InputError listing what is known."""
    if name not in SHAPES:
        raise InputError(f"model shape '{name}' is unknown; known are {', '.join(SHAPES)}")
    return SHAPES[name]
