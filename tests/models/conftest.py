"""Models for the tests of this room: the embedded one, and tiny ones of every architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridattn.models.decoder import Decoder
from hybridattn.models.load import LoadedModel

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Two torch threads wait for each other at every small product, which is slow beside another busy process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference(real_model: LoadedModel) -> Any:
    """The same weights as a transformers model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(real_model.source.folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def full_forward() -> Callable[[Decoder, torch.Tensor], torch.Tensor]:
    """Logits of every position from the stages, with plain attention between them."""

    def forward(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
        s, positions = decoder.shape, torch.arange(len(ids))
        x = decoder.embed(ids)
        distance = positions[:, None] - positions[None, :]
        for layer in range(s.num_layers):
            q, k, v = (t.transpose(0, 1).float() for t in decoder.pre_attention(layer, x, positions))
            k, v = (t.repeat_interleave(s.num_q_heads // s.num_kv_heads, 0) for t in (k, v))
            window = decoder.config.layer_windows[layer]
            allowed = (distance >= 0) & (distance < (window or len(ids)))
            scores = (q @ k.transpose(1, 2)) * s.head_dim**-0.5
            weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
            x = decoder.post_attention(layer, (weights @ v).transpose(0, 1).to(x.dtype), x)
        return decoder.head(x)

    return forward


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """Makes a transformers model of an architecture with weights that exercise every term, and saves it."""

    def make(architecture: str, shard_size: str = "1GB", **settings: Any) -> tuple[Any, Path]:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture, **{**TINY, **settings})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
        folder = tmp_path / architecture
        model.save_pretrained(folder, max_shard_size=shard_size)
        return model, folder

    return make
