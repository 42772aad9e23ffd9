"""The tensors that a checkpoint of a decoder must hold, by the names of transformers: no more, no fewer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from hybridattn.core.errors import InputError
from hybridattn.models.config import DecoderConfig

EMBED, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_SHOWN = 3  # names in a message; the rest is counted

Shape = tuple[int, ...]
Parts = list[tuple[str, int]]  # names of tensors, with their rows


def expected_tensors(config: DecoderConfig) -> dict[str, Shape]:
    """Shape of each tensor by name. A tied head is not among them: it is the embedding."""
    s = config.shape
    found: dict[str, Shape] = {EMBED: (s.vocab_size, s.hidden_size), FINAL_NORM: (s.hidden_size,)}
    if not s.tied_embeddings:
        found[HEAD] = (s.vocab_size, s.hidden_size)
    for layer in range(s.num_layers):
        for parts, columns in layer_parts(config, layer).values():
            found |= {name: size_of([(name, rows)], columns) for name, rows in parts}
    return found


def layer_parts(config: DecoderConfig, layer: int) -> dict[str, tuple[Parts, int | None]]:
    """Of each field of ``LayerWeights`` the tensors that lie in it one below the other, and its columns (None: it is a
    vector). Fields that the model does not have are left out."""
    s = config.shape
    q_rows, kv_rows, hidden = s.num_q_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.hidden_size
    at = f"model.layers.{layer}."
    attn, mlp = f"{at}self_attn.", f"{at}mlp."
    qkv = [("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)]
    gate_up = [("gate_proj", s.intermediate_size), ("up_proj", s.intermediate_size)]
    if config.fused_on_disk:
        qkv, gate_up = [("qkv_proj", q_rows + 2 * kv_rows)], [("gate_up_proj", 2 * s.intermediate_size)]
    found: dict[str, tuple[Parts, int | None]] = {
        "input_norm": ([(f"{at}input_layernorm.weight", hidden)], None),
        "qkv": ([(f"{attn}{name}.weight", rows) for name, rows in qkv], hidden),
        "o": ([(f"{attn}o_proj.weight", hidden)], q_rows),
        "post_norm": ([(f"{at}post_attention_layernorm.weight", hidden)], None),
        "gate_up": ([(f"{mlp}{name}.weight", rows) for name, rows in gate_up], hidden),
        "down": ([(f"{mlp}down_proj.weight", hidden)], s.intermediate_size),
    }
    if config.qkv_bias:
        found["qkv_bias"] = [(f"{attn}{name}.bias", rows) for name, rows in qkv], None
    if config.o_bias:
        found["o_bias"] = [(f"{attn}o_proj.bias", hidden)], None
    if config.qk_norm:
        found |= {norm: ([(f"{attn}{norm}.weight", s.head_dim)], None) for norm in ("q_norm", "k_norm")}
    return found


def size_of(parts: Parts, columns: int | None) -> Shape:
    """Of ``parts`` one below the other."""
    rows = sum(rows for _, rows in parts)
    return (rows,) if columns is None else (rows, columns)


def compare(
    where: str, expected: Mapping[str, Shape], found: Mapping[str, Shape], ignored: Collection[str] = ()
) -> None:
    """InputError, naming ``where`` and the tensors, unless both hold the same names with the same shapes.

    ``ignored`` may be found besides.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise InputError(f"{where} lacks {listed(missing)}")
    unread = [name for name in found if name not in expected and name not in ignored]
    if unread:
        raise InputError(f"{where} holds {listed(unread)}, which this model does not read")
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise InputError(f"tensor '{name}' of {where} has shape {tuple(found[name])}, expected {tuple(shape)}")


def listed(names: Iterable[str]) -> str:
    """``tensor 'a'``, or the first few of several and how many more there are."""
    names = list(names)
    shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the tensor{'s' if len(names) > 1 else ''} {shown}{more}"
