"""The weights of a decoder, fused for execution, from a checkpoint or from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch

from hybridattn.core.errors import InputError
from hybridattn.models.arena import Arena
from hybridattn.models.checkpoint import Checkpoint
from hybridattn.models.config import DecoderConfig
from hybridattn.models.expected import EMBED, FINAL_NORM, HEAD, Parts, compare, expected_tensors, layer_parts, size_of
from hybridattn.models.rope import inverse_frequencies

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LayerWeights:
    """One decoder layer. H = hidden_size, I = intermediate_size, D = head_dim; rows of a matrix are its outputs."""

    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(num_q_heads + 2 num_kv_heads) D, H]: q rows, then k, then v
    o: torch.Tensor  # [H, num_q_heads D]
    post_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2 I, H]: gate rows, then up
    down: torch.Tensor  # [H, I]
    qkv_bias: torch.Tensor | None = None  # [(num_q_heads + 2 num_kv_heads) D]
    o_bias: torch.Tensor | None = None  # [H]
    q_norm: torch.Tensor | None = None  # [D]
    k_norm: torch.Tensor | None = None  # [D]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DecoderWeights:
    """All weights, of one dtype on one device. With tied embeddings ``head`` is ``embed`` itself."""

    embed: torch.Tensor  # [vocab_size, H]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [H]
    head: torch.Tensor  # [vocab_size, H]

    def __repr__(self) -> str:
        return f"DecoderWeights({len(self.layers)} layers, {self.dtype}, {self.device}, {self.num_bytes()} bytes)"

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def num_bytes(self) -> int:
        """Bytes of all storages, tied ones counted once."""
        return sum({t.data_ptr(): t.nbytes for t in self.tensors()}.values())

    def tensors(self) -> list[torch.Tensor]:
        """All of them, in a fixed order."""
        found = [self.embed, self.final_norm, self.head]
        for layer in self.layers:
            found += [t for f in fields(layer) if (t := getattr(layer, f.name)) is not None]
        return found


def torch_dtype(dtype: str) -> torch.dtype:
    """``fp32`` or ``bf16`` as torch spells it; InputError for another name."""
    if dtype not in TORCH_DTYPES:
        raise InputError(f"dtype '{dtype}' is not supported for weights; choose one of {', '.join(TORCH_DTYPES)}")
    return TORCH_DTYPES[dtype]


def load_weights(folder: Path, config: DecoderConfig, dtype: str = "fp32", device: str = "cpu") -> DecoderWeights:
    """Weights of a transformers safetensors folder, converted to ``dtype`` and copied: the files can go afterwards.

    InputError names the file or the tensor that is missing, damaged, of the wrong shape or not read by such a model
    (see ``Checkpoint``); all names and shapes are compared before the first tensor is read.
    """
    to = torch_dtype(dtype)
    with Checkpoint(folder) as checkpoint:
        _check_tensors(checkpoint, config)
        return _assembled(config, partial(_read, checkpoint, to, Arena(device)))


def random_weights(config: DecoderConfig, seed: int = 0, dtype: str = "fp32", device: str = "cpu") -> DecoderWeights:
    """Random weights of the right shapes: matrices normal with standard deviation 0.02, norms 1, biases normal.

    The same seed, dtype and device give the same weights.
    """
    to, generator = torch_dtype(dtype), torch.Generator(device=device).manual_seed(seed)
    arena = Arena(device)

    def draw(parts: Parts, columns: int | None = None) -> torch.Tensor:
        out = arena.empty(size_of(parts, columns), to)
        return out.fill_(1.0) if "norm" in parts[0][0] else out.normal_(0.0, 0.02, generator=generator)

    return _assembled(config, draw)


def _check_tensors(checkpoint: Checkpoint, config: DecoderConfig) -> None:
    """Names and shapes that the config means are those that the files hold, both ways.

    Two things may be there besides: a copy of the embedding as the head of a tied model, and rotary frequencies, which
    files of before 2023 carry; each must be what the config says.
    """
    where, s = f"checkpoint {checkpoint.folder}", config.shape
    tied_head = [HEAD] if s.tied_embeddings and HEAD in checkpoint.names else []
    frequencies = [name for name in checkpoint.names if name.endswith(".rotary_emb.inv_freq")]
    compare(where, expected_tensors(config), checkpoint.shapes, {*tied_head, *frequencies})
    size = (s.vocab_size, s.hidden_size)
    if tied_head and not torch.equal(checkpoint.read(HEAD, size), checkpoint.read(EMBED, size)):
        raise InputError(
            f"{where}: config.json says tie_word_embeddings, but '{HEAD}' differs from '{EMBED}'; one of them is wrong"
        )
    expected = inverse_frequencies(replace(config.rope, kind="default"), s.head_dim)
    for name in frequencies:
        if not torch.allclose(checkpoint.read(name, tuple(expected.shape)).float(), expected, rtol=1e-2, atol=1e-6):
            raise InputError(f"{where}: '{name}' is not what rope theta {config.rope.theta:g} gives")


def _read(
    checkpoint: Checkpoint, dtype: torch.dtype, arena: Arena, parts: Parts, columns: int | None = None
) -> torch.Tensor:
    """Copies of the named tensors, one below the other."""
    out, at = arena.empty(size_of(parts, columns), dtype), 0
    for name, rows in parts:
        out[at : at + rows].copy_(checkpoint.read(name, (rows, *out.shape[1:])))
        at += rows
    return out


def _assembled(config: DecoderConfig, stack: Callable[..., torch.Tensor]) -> DecoderWeights:
    """All weights from ``stack(parts, columns=None)``, which gives ``[sum of rows]`` or ``[sum of rows, columns]``."""
    s = config.shape
    embed = stack([(EMBED, s.vocab_size)], s.hidden_size)
    layers = tuple(
        LayerWeights(**{name: stack(parts, columns) for name, (parts, columns) in layer_parts(config, i).items()})
        for i in range(s.num_layers)
    )
    head = embed if s.tied_embeddings else stack([(HEAD, s.vocab_size)], s.hidden_size)
    return DecoderWeights(embed, layers, stack([(FINAL_NORM, s.hidden_size)]), head)
