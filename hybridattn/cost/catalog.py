"""Names: shapes of well-known decoders, what stands beside a card, and how a name may be spelt."""

from __future__ import annotations

import re
from collections.abc import Iterable

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

# CPU and link beside a GPU unless asked for something else: the pairs of well-known instances.
BESIDE = {
    "t4": ("xeon-8259cl-8c", "pcie3-x16"),
    "l4": ("epyc-7r32-16c", "pcie4-x16"),
    "a10": ("epyc-7r32-16c", "pcie4-x16"),
    "a10g": ("epyc-7r32-16c", "pcie4-x16"),
    "a100-80g": ("epyc-7r32-32c", "pcie4-x16"),
    "h100": ("epyc-7r32-32c", "pcie5-x16"),
    "h200": ("epyc-7r32-32c", "pcie5-x16"),
    "gh200": ("grace-72c", "nvlink-c2c"),
}

_NICKNAMES = {
    "genoa": "epyc-9654-96c",
    "turin": "epyc-9755-128c",
    "sapphirerapids": "xeon-8480p-56c",
    "graniterapids": "xeon-6980p-128c",
    "desktop": "ryzen-9950x-16c",
}
_MAKERS = re.compile(r"^(meta|nvidia|amd|intel)(?=[a-z])")
_TUNED = re.compile(r"(-(instruct|chat|hf|base))+$")


def spelt(name: str, known: Iterable[str]) -> str | None:
    """Which of ``known`` is meant: capitals, dots, dashes and spaces don't count, nor do an owner before ``/``, a maker
    or ``-Instruct``; the end may be left out where only one begins so.

    Examples
    --------
    >>> spelt("meta-llama/Llama-3.1-8B-Instruct", SHAPES), spelt("A100", BESIDE), spelt("llama3.1", SHAPES)
    ('llama3.1-8b', 'a100-80g', None)
    """
    names = tuple(known)
    if name in names:
        return name
    plain = _TUNED.sub("", name.lower().rpartition("/")[2])
    key = _MAKERS.sub("", _bare(plain))
    key = _bare(_NICKNAMES.get(key, key))
    same = [n for n in names if _bare(n) == key]
    found = same or [n for n in names if key in _beginnings(n)]
    return found[0] if len(found) == 1 else None


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _beginnings(name: str) -> set[str]:
    parts = name.split("-")
    return {_bare("".join(parts[:i])) for i in range(1, len(parts))}


def shape(name: str) -> ModelShape:
    """The shape called ``name`` (see :func:`spelt`); InputError listing what is known."""
    found = spelt(name, SHAPES)
    if found is None:
        raise InputError(f"model shape '{name}' is unknown; known are {', '.join(SHAPES)}")
    return SHAPES[found]
