"""A tiny model whose tokens depend on its attention: the usual random weights are so small that they hardly do."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from hybridattn.models.config import DecoderConfig
from hybridattn.models.load import LoadedModel, load
from hybridattn.models.locate import ModelSource
from hybridattn.models.weights import LayerWeights, random_weights


def scaled(config: DecoderConfig | None = None, factor: float = 8.0, dtype: str = "fp32") -> LoadedModel:
    """Random weights with all matrices times ``factor``; the shape of ``dummy:tiny`` by default."""
    config = config or load("dummy:tiny").config
    weights = random_weights(config, 3, dtype)
    for layer in weights.layers:
        for f in fields(LayerWeights):
            tensor: torch.Tensor | None = getattr(layer, f.name)
            if tensor is not None and "norm" not in f.name:
                tensor *= factor
    source = replace(load("dummy:tiny").source, dummy=config)
    assert isinstance(source, ModelSource)
    return LoadedModel(config, weights, None, source)
