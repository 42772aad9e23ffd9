"""What a checkpoint says about its decoder, read from the JSON files of a transformers folder."""

from __future__ import annotations

import json
import math
import warnings
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


class UnusedSettingWarning(UserWarning):
    """A checkpoint declares what none of its layers uses."""


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

    @property
    def widest_window(self) -> int | None:
        """Last positions that any layer attends to; None where one attends to all."""
        widest = [w for w in self.layer_windows if w is not None]
        return max(widest) if len(widest) == len(self.layer_windows) else None

    @property
    def fused_on_disk(self) -> bool:
        """Checkpoints hold q, k and v as one tensor, and gate and up as another."""
        return self.architecture == "phi3"


def read_config(folder: Path, tokenizer_eos: int | None = None, name: str | None = None) -> DecoderConfig:
    """The config of a transformers checkpoint folder; InputError if it is absent, unreadable or not supported.

    ``tokenizer_eos`` joins the end-of-sequence ids; ``name`` (default: the folder's) becomes the shape's name.
    """
    raw = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    return parse_config(raw, generation, tokenizer_eos, name=name or folder.name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; InputError naming the file if it is missing, is no JSON object, or has a key twice."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=each_key_once)
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}") from e
    except (_TwiceError, json.JSONDecodeError, UnicodeDecodeError) as e:
        raise InputError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object, got a {type(value).__name__}")
    return value


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads(object_pairs_hook=...)``: of two values of a key, the second would win in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:i]))
        raise _TwiceError(f"the key '{twice}' is there twice")
    return found


class _TwiceError(ValueError):
    pass


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
    windows = _layer_windows(arch, c, shape.num_layers, name)
    _say_unused_window(raw, windows, name)
    bias = bool(c.get("attention_bias", False)) and arch in ("llama", "qwen3")
    return DecoderConfig(
        architecture=arch,
        shape=shape,
        rms_norm_eps=float(c["rms_norm_eps"]),
        rope=_rope(c, name),
        layer_windows=windows,
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


# Keys by which related architectures change the arithmetic; here they may only say that they do not.
_OTHER_ARITHMETIC = (
    "alibi", "attention_multiplier", "attention_sink", "attn_logit_softcapping", "clip_qkv", "embedding_multiplier",
    "final_logit_softcapping", "layer_norm_type", "logit_scale", "logits_scaling", "no_rope_layers",
    "num_experts", "num_experts_per_tok", "num_local_experts", "query_pre_attn_scalar", "residual_multiplier",
    "use_parallel_residual", "use_qk_norm",
)  # fmt: skip


def _refuse_unsupported(c: Mapping[str, Any], name: str) -> None:
    """What would change the arithmetic and is not computed here is refused, never ignored."""
    if c.get("hidden_act", "silu") != "silu":
        raise InputError(f"{name}: hidden_act '{c['hidden_act']}' is not supported, only 'silu'")
    for key in _OTHER_ARITHMETIC:
        if c.get(key) not in (None, False, 0, 1, []):
            raise InputError(f"{name}: {key} {c[key]!r} is not supported")
    if c.get("mlp_bias"):
        raise InputError(f"{name}: mlp_bias=true is not supported")
    for key in ("rope_parameters", "rope_scaling", "quantization_config"):
        if c.get(key) and not isinstance(c[key], Mapping):
            raise InputError(f"{name}: {key} must be an object, got {c[key]!r}")
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    partial = rope.get("partial_rotary_factor", c.get("partial_rotary_factor"))
    if partial is not None and partial != 1.0:
        raise InputError(f"{name}: partial_rotary_factor {partial} is not supported, only 1.0")
    quantization = c.get("quantization_config")
    if quantization:
        raise InputError(f"{name}: quantised weights ('{quantization.get('quant_method')}') are not supported")


# What the arithmetic of each rope type reads. What may stand beside it without meaning anything: _SILENT_ROPE_KEYS.
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_SILENT_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_TOP_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def _rope(c: Mapping[str, Any], name: str) -> RopeConfig:
    """Reads both spellings: ``rope_parameters`` and the older ``rope_theta`` beside ``rope_scaling``."""
    p = _rope_entries(c, name)
    kind = _one_of(p, "rope_type", "type", name)
    if kind is None:
        given = [key for key in p if key not in _SILENT_ROPE_KEYS]
        if given:
            raise InputError(
                f"{name}: the rope settings have {given[0]} {p[given[0]]!r}, but no rope_type that reads it"
            )
        kind = "default"
    theta = _one_of({"rope_parameters": p.get("rope_theta"), "rope_theta": c.get("rope_theta")}, *_THETAS, name)
    base = RopeConfig(theta=10000.0 if theta is None else float(theta))
    if kind not in ROPE_KINDS:
        raise InputError(f"{name}: rope type '{kind}' is not supported; known types: {', '.join(ROPE_KINDS)}")
    for key in p:
        if key not in (*_ROPE_KEYS[kind], *_SILENT_ROPE_KEYS):
            raise InputError(f"{name}: rope type '{kind}' has no setting '{key}' (got {p[key]!r})")
    if kind == "default":
        return base
    for key in _ROPE_KEYS[kind][:3]:
        if isinstance(p.get(key), bool) or not isinstance(p.get(key), (int, float)):
            raise InputError(f"{name}: rope type '{kind}' needs a number {key}, got {p.get(key)!r}")
    if kind == "linear":
        return RopeConfig(theta=base.theta, kind=kind, factor=float(p["factor"]))
    top = c.get("original_max_position_embeddings") or c["max_position_embeddings"]
    return RopeConfig(
        theta=base.theta,
        kind=kind,
        factor=float(p["factor"]),
        low_freq_factor=float(p["low_freq_factor"]),
        high_freq_factor=float(p["high_freq_factor"]),
        original_max_position=int(p.get("original_max_position_embeddings") or top),
    )


_THETAS = ("rope_parameters", "rope_theta")


def _rope_entries(c: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings of either spelling; InputError for two that differ, and for rope keys beside them."""
    for key, value in c.items():
        if key.startswith(("rope", "rotary")) and key not in _TOP_ROPE_KEYS and value not in (None, False):
            raise InputError(f"{name}: the key '{key}' of config.json is not understood (got {value!r})")
    both = [dict(c[key]) for key in ("rope_parameters", "rope_scaling") if c.get(key)]
    if len(both) == 2:
        for key in both[1]:
            if both[0].get(key, both[1][key]) != both[1][key] or key not in both[0]:
                raise InputError(f"{name}: rope_parameters {both[0]} and rope_scaling {both[1]} differ")
    return both[0] if both else {}


def _one_of(values: Mapping[str, Any], first: str, second: str, name: str) -> Any:
    """The value under either key; InputError if both have one and they differ."""
    a, b = values.get(first), values.get(second)
    if a is not None and b is not None and a != b:
        raise InputError(f"{name}: {first} {a!r} and {second} {b!r} differ")
    return b if a is None else a


def _layer_windows(arch: str, c: Mapping[str, Any], num_layers: int, name: str) -> tuple[int | None, ...]:
    window, kinds = c.get("sliding_window"), c.get("layer_types")
    if kinds is not None:
        unknown = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != num_layers:
            raise InputError(
                f"{name}: layer_types has {len(kinds)} entries for {num_layers} layers"
                + (f", unknown: {', '.join(unknown)}" if unknown else "")
            )
    found = _windows(arch, c, num_layers, window)
    slid = [i for i, kind in enumerate(kinds or ()) if kind == "sliding_attention"]
    for layer in slid:
        if found[layer] is None:
            raise InputError(f"{name}: layer_types makes layer {layer} a sliding one, but it has no sliding window")
    return found


def _windows(arch: str, c: Mapping[str, Any], num_layers: int, window: Any) -> tuple[int | None, ...]:
    full = (None,) * num_layers
    if arch == "llama" or window is None:
        return full
    kinds = c.get("layer_types")
    if arch in ("mistral", "phi3"):
        return (int(window),) * num_layers
    if not c.get("use_sliding_window", False):
        return full
    if kinds is None:
        return tuple(int(window) if i >= c["max_window_layers"] else None for i in range(num_layers))
    return tuple(int(window) if k == "sliding_attention" else None for k in kinds)


def _say_unused_window(raw: Mapping[str, Any], windows: tuple[int | None, ...], name: str) -> None:
    """A window that the file declares, does not switch off, and that none of its layers uses."""
    window = raw.get("sliding_window")
    if window is not None and raw.get("use_sliding_window") is not False and not any(windows):
        warnings.warn(
            f"{name}: config.json declares sliding_window {window}, which no layer uses: all attend to everything",
            UnusedSettingWarning,
            stacklevel=3,
        )


def _eos_union(*sources: Any) -> tuple[int, ...]:
    """Every end-of-sequence id that any source names, each once, in order of first mention."""
    found: dict[int, None] = {}
    for source in sources:
        for token in source if isinstance(source, list | tuple) else [source]:
            if token is not None:
                if isinstance(token, bool) or not isinstance(token, int):
                    raise InputError(f"eos_token_id must be an id or a list of ids, got {source!r}")
                found[token] = None
    return tuple(found)
