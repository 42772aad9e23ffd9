"""What a GGUF file's metadata says beyond what transformers takes from it, and what is refused because of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridattn.core.errors import InputError

GGUF_ARCHITECTURES = ("llama", "phi3", "qwen2", "qwen3")

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = {**_BYTES, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES]}


# tokenizer.ggml.pre -> the `pre_tokenizer` of the model's own tokenizer.json.
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _GPT2,
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _GPT2]},
    "llama-bpe": _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """Checked metadata of a GGUF file.

    ``pre_tokenizer`` replaces that of tokenizer.json (None: keep it). ``rope_scaling`` are entries for the config's
    ``rope_parameters`` (empty: no scaling). ``metadata`` are all entries, of an array its length.
    """

    architecture: str
    pre_tokenizer: dict[str, Any] | None
    rope_theta: float
    rope_scaling: dict[str, Any]
    metadata: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> GgufFacts:
        """Reads and checks; InputError for an unreadable file and for one whose meaning would have to be guessed."""
        meta, rope_freqs = _metadata(path)
        name, arch = path.name, meta.get("general.architecture")
        if arch not in GGUF_ARCHITECTURES:
            known = ", ".join(GGUF_ARCHITECTURES)
            raise InputError(f"{name}: architecture '{arch}' is not supported; known: {known}")
        if f"{arch}.attention.sliding_window" in meta:
            raise InputError(f"{name}: a sliding window in a GGUF is not supported; use the safetensors folder")
        _check_keys(name, arch, meta)
        _check_tokens(name, meta)
        theta = float(meta.get(f"{arch}.rope.freq_base", 10000.0))
        return cls(arch, _pre_tokenizer(name, meta), theta, _rope_scaling(name, arch, meta, rope_freqs), meta)

    def check_heads(self, name: str, head_dim: int) -> None:
        """InputError for a file whose own sizes of a head differ from ``head_dim``."""
        for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
            given = self.metadata.get(f"{self.architecture}.{key}", head_dim)
            if given != head_dim:
                raise InputError(f"{name}: {self.architecture}.{key} is {given}, but a head has {head_dim} dimensions")


# What is read of the entries below the architecture's name. An entry of another name may change the arithmetic.
_NEEDED = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
_READ = (
    *_NEEDED, "vocab_size", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned",
)  # fmt: skip
_COUNTS = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size",
)  # fmt: skip
_NUMBERS = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor")
_NO_EXPERTS = ("expert_count", "expert_used_count")  # 0 in files of models without experts


def _check_keys(name: str, arch: str, meta: Mapping[str, Any]) -> None:
    for key in _NEEDED:
        if f"{arch}.{key}" not in meta:
            raise InputError(f"{name}: {arch}.{key} is missing")
    for key in _COUNTS:
        value = meta.get(f"{arch}.{key}", 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise InputError(f"{name}: {arch}.{key} must be a positive integer of 31 bits, got {value!r}")
    for key in _NUMBERS:
        value = meta.get(f"{arch}.{key}", 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InputError(f"{name}: {arch}.{key} must be a finite number, got {value!r}")
    for key, value in meta.items():
        short = key.removeprefix(f"{arch}.")
        if short == key or short in _READ or (short in _NO_EXPERTS and value == 0):
            continue
        raise InputError(f"{name}: the entry {key} ({value!r}) is not understood")


def _check_tokens(name: str, meta: Mapping[str, Any]) -> None:
    """Ids lie within the list of tokens, and each token has a type."""
    tokens, types = (meta.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(tokens, int):
        return  # the converter refuses it
    if isinstance(types, int) and types != tokens:
        raise InputError(f"{name}: tokenizer.ggml.token_type has {types} entries for {tokens} tokens")
    for kind in ("bos", "eos", "unknown", "padding"):
        key = f"tokenizer.ggml.{kind}_token_id"
        value = meta.get(key, 0)
        if not isinstance(value, int) or not 0 <= value < tokens:
            raise InputError(f"{name}: {key} must be one of the {tokens} tokens, got {value!r}")


def _metadata(path: Path) -> tuple[dict[str, Any], np.ndarray | None]:
    """Scalar metadata by key (of an array only its length) and the rotary divisors, if the file has any."""
    from gguf import GGUFReader  # here, because a start from the cache needs no gguf package

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as e:
        raise InputError(f"{path} is not a readable GGUF file: {e}") from e
    long = {k for k, f in reader.fields.items() if k.startswith("tokenizer.") and len(f.data) > 1}
    meta = {k: len(f.data) if k in long else f.contents() for k, f in reader.fields.items()}
    freqs = [np.array(t.data, dtype=np.float32) for t in reader.tensors if t.name == "rope_freqs.weight"]
    return meta, freqs[0] if freqs else None


def _pre_tokenizer(name: str, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    if meta.get("tokenizer.ggml.model") != "gpt2":
        return None  # SentencePiece files have no pre-tokenizer
    if not meta.get("tokenizer.ggml.merges"):
        raise InputError(f"{name}: tokenizer.ggml.merges is missing, so text would be split wrongly")
    pre = meta.get("tokenizer.ggml.pre")
    if pre is None:
        raise InputError(
            f"{name}: tokenizer.ggml.pre is missing (a file of an old converter), so text would be split by a guess; "
            f"make the GGUF again with a current converter"
        )
    if pre not in PRE_TOKENIZERS:
        raise InputError(f"{name}: tokenizer.ggml.pre '{pre}' is unknown; known: {', '.join(sorted(PRE_TOKENIZERS))}")
    return PRE_TOKENIZERS[pre]


def _rope_scaling(name: str, arch: str, meta: Mapping[str, Any], rope_freqs: np.ndarray | None) -> dict[str, Any]:
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    factor = float(meta.get(f"{arch}.rope.scaling.factor", 1.0))
    if kind not in ("none", "linear"):
        raise InputError(f"{name}: rope scaling '{kind}' is not supported in a GGUF; known: none, linear")
    if kind == "none" and factor not in (0.0, 1.0):
        raise InputError(f"{name}: {arch}.rope.scaling.factor is {factor:g}, but no rope.scaling.type reads it")
    if rope_freqs is not None:
        if kind == "linear" and factor != 1.0:
            raise InputError(f"{name}: it holds both rope_freqs.weight and a linear rope scaling by {factor:g}")
        theta = float(meta.get(f"{arch}.rope.freq_base", 10000.0))
        return _llama3_scaling(name, theta, rope_freqs.astype(np.float64))
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else {}


def _llama3_scaling(name: str, theta: float, divisors: np.ndarray) -> dict[str, Any]:
    """The llama3 parameters whose per-pair divisors a file stores; InputError if no published setting gives them."""
    pairs = len(divisors)
    turns = 8192 * theta ** (-np.arange(pairs) / pairs) / (2 * np.pi)  # per original context of 8192 tokens
    factor = float(round(divisors[-1]))
    blend = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise InputError(f"{name}: rope_freqs.weight is not the llama3 scaling with factor {factor:g} over 8192 tokens")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
