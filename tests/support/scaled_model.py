"""A tiny model whose tokens depend on its attention: the usual random weights are so small that they hardly do."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from hybridattn.models.config import DecoderConfig
from hybridattn.models.load import LoadedModel, load
from hybridattn.models.locate import ModelSource
from hybridattn.models.weights import LayerWeights, random_weights


def scaled(
    config: DecoderConfig | None = None, factor: float = 8.0, dtype: str = "fp32", device: str = "cpu"
) -> LoadedModel:
    """Random weights with all matrices times ``factor``, equal on every device; by default of ``dummy:tiny``."""
    config = config or load("dummy:tiny").config
    weights = random_weights(config, 3, dtype)
    for layer in weights.layers:
        for f in fields(LayerWeights):
            tensor: torch.Tensor | None = getattr(layer, f.name)
            if tensor is not None and "norm" not in f.name:
                tensor *= factor
    if device != "cpu":
        layers = tuple(LayerWeights(*(_moved(getattr(w, f.name), device) for f in fields(w))) for w in weights.layers)
        embed = weights.embed.to(device)
        head = embed if weights.head is weights.embed else weights.head.to(device)
        weights = replace(weights, embed=embed, layers=layers, final_norm=weights.final_norm.to(device), head=head)
    source = replace(load("dummy:tiny").source, dummy=config)
    assert isinstance(source, ModelSource)
    return LoadedModel(config, weights, None, source)


def _moved(tensor: torch.Tensor | None, device: str) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)
