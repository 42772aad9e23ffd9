"""What a checkpoint says about its decoder, read from the JSON files of a transformers folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridattn.core.errors import InputError
from hybridattn.core.shapes import ModelShape

ARCHITECTURES = ("llama", "mistral", "phi3", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3")

# What transformers' config classes assume where config.json is silent. Sizes without a safe default are required.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "phi3": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 32000},
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base and how long contexts stretch it.

    ``kind`` is ``default``, ``linear`` (all frequencies divided by ``factor``) or ``llama3`` (frequencies below
    ``low_freq_factor`` turns per original context divided by ``factor``, those above ``high_freq_factor`` kept, blended
    between).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise InputError(f"rope type '{self.kind}' is not supported; known types: {', '.join(ROPE_KINDS)}")
        if not (self.theta > 0 and math.isfinite(self.theta)):
            raise InputError(f"rope theta must be a positive number, got {self.theta}")
        if not (self.factor > 0 and math.isfinite(self.factor)):
            raise InputError(f"rope factor must be a positive number, got {self.factor}")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise InputError(
                f"rope type llama3 needs 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder as its checkpoint describes it.

    ``layer_windows`` holds per layer the number of last positions, the current one included, that a query attends to,
    or None for all of them. ``eos_ids`` is the union of what config.json, generation_config.json and the tokenizer say.
    """

    architecture: str
    shape: ModelShape
    rms_norm_eps: float
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise InputError(f"architecture '{self.architecture}' is not supported; known: {', '.join(ARCHITECTURES)}")
        if len(self.layer_windows) != self.shape.num_layers:
            raise InputError(f"layer_windows has {len(self.layer_windows)} entries for {self.shape.num_layers} layers")
        for layer, window in enumerate(self.layer_windows):
            if window is not None and window < 1:
                raise InputError(f"sliding window of layer {layer} must be at least 1, got {window}")
        if self.shape.head_dim % 2:
            raise InputError(f"head_dim must be even for rotary embeddings, got {self.shape.head_dim}")
        if not self.rms_norm_eps > 0:
            raise InputError(f"rms_norm_eps must be positive, got {self.rms_norm_eps}")


def read_config(folder: Path, tokenizer_eos: int | None = None, name: str | None = None) -> DecoderConfig:
    """The config of a transformers checkpoint folder; InputError if it is absent, unreadable or not supported.

    ``tokenizer_eos`` joins the end-of-sequence ids; ``name`` (default: the folder's) becomes the shape's name.
    """
    raw = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    return parse_config(raw, generation, tokenizer_eos, name=name or folder.name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; InputError naming the file if it is missing or is no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}") from e
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise InputError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def parse_config(
    raw: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    tokenizer_eos: int | None = None,
    name: str = "model",
) -> DecoderConfig:
    """A DecoderConfig from the content of config.json and generation_config.json.

    Keys that config.json lacks get the value that transformers' config class gives them. InputError for an
    architecture, activation, rotary scaling or bias that the decoder does not compute.
    """
    arch = raw.get("model_type")
    if arch not in ARCHITECTURES:
        raise InputError(f"{name}: architecture '{arch}' is not supported; known: {', '.join(ARCHITECTURES)}")
    c = {**_DEFAULTS[arch], **raw}
    _refuse_unsupported(c, name)
    heads = _integer(c, "num_attention_heads", name)
    hidden = _integer(c, "hidden_size", name)
    if c.get("head_dim") is None and hidden % heads:
        raise InputError(f"{name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    shape = ModelShape(
        name=name,
        num_layers=_integer(c, "num_hidden_layers", name),
        hidden_size=hidden,
        intermediate_size=_integer(c, "intermediate_size", name),
        num_q_heads=heads,
        num_kv_heads=_integer(c, "num_key_value_heads", name) if c.get("num_key_value_heads") is not None else heads,
        head_dim=_integer(c, "head_dim", name) if c.get("head_dim") is not None else hidden // heads,
        vocab_size=_integer(c, "vocab_size", name),
        max_model_len=_integer(c, "max_position_embeddings", name),
        tied_embeddings=bool(c.get("tie_word_embeddings", False)),
    )
    bias = bool(c.get("attention_bias", False)) and arch in ("llama", "qwen3")
    return DecoderConfig(
        architecture=arch,
        shape=shape,
        rms_norm_eps=float(c["rms_norm_eps"]),
        rope=_rope(c, name),
        layer_windows=_layer_windows(arch, c, shape.num_layers, name),
        qkv_bias=bias or arch == "qwen2",
        o_bias=bias,
        qk_norm=arch == "qwen3",
        bos_id=c.get("bos_token_id"),
        eos_ids=_eos_union(c.get("eos_token_id"), (generation or {}).get("eos_token_id"), tokenizer_eos),
    )


def _integer(c: Mapping[str, Any], key: str, name: str) -> int:
    value = c.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}: config.json must give an integer {key}, got {value!r}")
    return value


def _refuse_unsupported(c: Mapping[str, Any], name: str) -> None:
    """What would change the arithmetic and is not computed here is refused, never ignored."""
    if c.get("hidden_act", "silu") != "silu":
        raise InputError(f"{name}: hidden_act '{c['hidden_act']}' is not supported, only 'silu'")
    if c.get("mlp_bias"):
        raise InputError(f"{name}: mlp_bias=true is not supported")
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    partial = rope.get("partial_rotary_factor", c.get("partial_rotary_factor"))
    if partial is not None and partial != 1.0:
        raise InputError(f"{name}: partial_rotary_factor {partial} is not supported, only 1.0")
    quantization = c.get("quantization_config")
    if quantization:
        raise InputError(f"{name}: quantised weights ('{quantization.get('quant_method')}') are not supported")


def _rope(c: Mapping[str, Any], name: str) -> RopeConfig:
    """Reads both spellings: ``rope_parameters`` and the older ``rope_theta`` beside ``rope_scaling``."""
    p = c.get("rope_parameters") or c.get("rope_scaling") or {}
    kind = p.get("rope_type", p.get("type", "default"))
    theta = p.get("rope_theta", c.get("rope_theta"))
    base = RopeConfig(theta=10000.0 if theta is None else float(theta))
    if kind == "default":
        return base
    if kind not in ROPE_KINDS:
        raise InputError(f"{name}: rope type '{kind}' is not supported; known types: {', '.join(ROPE_KINDS)}")
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    for key in needed:
        if not isinstance(p.get(key), (int, float)):
            raise InputError(f"{name}: rope type '{kind}' needs a number {key}, got {p.get(key)!r}")
    if kind == "linear":
        return RopeConfig(theta=base.theta, kind=kind, factor=float(p["factor"]))
    return RopeConfig(
        theta=base.theta,
        kind=kind,
        factor=float(p["factor"]),
        low_freq_factor=float(p["low_freq_factor"]),
        high_freq_factor=float(p["high_freq_factor"]),
        original_max_position=int(p.get("original_max_position_embeddings", c["max_position_embeddings"])),
    )


def _layer_windows(arch: str, c: Mapping[str, Any], num_layers: int, name: str) -> tuple[int | None, ...]:
    window = c.get("sliding_window")
    if arch == "llama" or window is None:
        return (None,) * num_layers
    if arch in ("mistral", "phi3"):
        return (int(window),) * num_layers
    if not c.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = c.get("layer_types")
    if kinds is None:
        return tuple(int(window) if i >= c["max_window_layers"] else None for i in range(num_layers))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise InputError(f"{name}: layer_types has {len(kinds)} entries for {num_layers} layers, unknown {unknown}")
    return tuple(int(window) if k == "sliding_attention" else None for k in kinds)


def _eos_union(*sources: Any) -> tuple[int, ...]:
    """Every end-of-sequence id that any source names, each once, in order of first mention."""
    found: dict[int, None] = {}
    for source in sources:
        for token in source if isinstance(source, list | tuple) else [source]:
            if token is not None:
                found[int(token)] = None
    return tuple(found)
