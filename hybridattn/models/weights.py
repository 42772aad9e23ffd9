"""The weights of a decoder, fused for execution, from a checkpoint or from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from hybridattn.core.errors import InputError
from hybridattn.models.checkpoint import Checkpoint
from hybridattn.models.config import DecoderConfig
from hybridattn.models.expected import EMBED, FINAL_NORM, HEAD, compare, expected_tensors
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
        return _Loader(checkpoint, config, to, device).load()


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


class _Loader:
    """Copies parts of a checkpoint into fused tensors that own their storage."""

    def __init__(self, checkpoint: Checkpoint, config: DecoderConfig, dtype: torch.dtype, device: str) -> None:
        self.checkpoint, self.config, self.dtype, self.device = checkpoint, config, dtype, device
        self.fused_on_disk = config.fused_on_disk

    def load(self) -> DecoderWeights:
        s = self.config.shape
        embed = self._stack([(EMBED, s.vocab_size)], s.hidden_size)
        layers = tuple(self._layer(f"model.layers.{i}.") for i in range(s.num_layers))
        head = embed if self._tied() else self._stack([(HEAD, s.vocab_size)], s.hidden_size)
        return DecoderWeights(embed, layers, self._vector(FINAL_NORM, s.hidden_size), head)

    def _tied(self) -> bool:
        return self.config.shape.tied_embeddings

    def _layer(self, at: str) -> LayerWeights:
        c, s = self.config, self.config.shape
        q_rows, kv_rows = s.num_q_heads * s.head_dim, s.num_kv_heads * s.head_dim
        qkv_parts = [("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)]
        gate_up_parts = [("gate_proj", s.intermediate_size), ("up_proj", s.intermediate_size)]
        if self.fused_on_disk:
            qkv_parts = [("qkv_proj", q_rows + 2 * kv_rows)]
            gate_up_parts = [("gate_up_proj", 2 * s.intermediate_size)]
        attn, mlp = at + "self_attn.", at + "mlp."
        return LayerWeights(
            input_norm=self._vector(at + "input_layernorm.weight", s.hidden_size),
            qkv=self._stack([(f"{attn}{p}.weight", rows) for p, rows in qkv_parts], s.hidden_size),
            o=self._stack([(attn + "o_proj.weight", s.hidden_size)], q_rows),
            post_norm=self._vector(at + "post_attention_layernorm.weight", s.hidden_size),
            gate_up=self._stack([(f"{mlp}{p}.weight", rows) for p, rows in gate_up_parts], s.hidden_size),
            down=self._stack([(mlp + "down_proj.weight", s.hidden_size)], s.intermediate_size),
            qkv_bias=self._stack([(f"{attn}{p}.bias", rows) for p, rows in qkv_parts]) if c.qkv_bias else None,
            o_bias=self._vector(attn + "o_proj.bias", s.hidden_size) if c.o_bias else None,
            q_norm=self._vector(attn + "q_norm.weight", s.head_dim) if c.qk_norm else None,
            k_norm=self._vector(attn + "k_norm.weight", s.head_dim) if c.qk_norm else None,
        )

    def _vector(self, name: str, size: int) -> torch.Tensor:
        return self._stack([(name, size)])

    def _stack(self, parts: list[tuple[str, int]], columns: int | None = None) -> torch.Tensor:
        """The named parts one below the other: ``[sum of rows]`` or ``[sum of rows, columns]``."""
        tail = () if columns is None else (columns,)
        out = torch.empty((sum(rows for _, rows in parts), *tail), dtype=self.dtype, device=self.device)
        at = 0
        for name, rows in parts:
            out[at : at + rows].copy_(self.checkpoint.read(name, (rows, *tail)))
            at += rows
        return out


def random_weights(config: DecoderConfig, seed: int = 0, dtype: str = "fp32", device: str = "cpu") -> DecoderWeights:
    """Random weights of the right shapes: matrices normal with standard deviation 0.02, norms 1, biases normal.

    The same seed, dtype and device give the same weights.
    """
    s, c, to = config.shape, config, torch_dtype(dtype)
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=to, device=device).normal_(0.0, 0.02, generator=generator)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=to, device=device)

    embed = normal(s.vocab_size, s.hidden_size)
    layers = tuple(_random_layer(c, normal, ones) for _ in range(s.num_layers))
    head = embed if s.tied_embeddings else normal(s.vocab_size, s.hidden_size)
    return DecoderWeights(embed, layers, ones(s.hidden_size), head)


def _random_layer(
    c: DecoderConfig, normal: Callable[..., torch.Tensor], ones: Callable[[int], torch.Tensor]
) -> LayerWeights:
    s = c.shape
    qkv_rows = (s.num_q_heads + 2 * s.num_kv_heads) * s.head_dim
    return LayerWeights(
        input_norm=ones(s.hidden_size),
        qkv=normal(qkv_rows, s.hidden_size),
        o=normal(s.hidden_size, s.num_q_heads * s.head_dim),
        post_norm=ones(s.hidden_size),
        gate_up=normal(2 * s.intermediate_size, s.hidden_size),
        down=normal(s.hidden_size, s.intermediate_size),
        qkv_bias=normal(qkv_rows) if c.qkv_bias else None,
        o_bias=normal(s.hidden_size) if c.o_bias else None,
        q_norm=ones(s.head_dim) if c.qk_norm else None,
        k_norm=ones(s.head_dim) if c.qk_norm else None,
    )
