"""Whether a GGUF file holds the tensors of its model: all of them, no other, each where its header says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridattn.core.errors import InputError
from hybridattn.models.config import DecoderConfig
from hybridattn.models.expected import Shape, compare, expected_tensors
from hybridattn.models.gguf_header import GgufHeader, TensorEntry

ROPE_FREQS = "rope_freqs.weight"  # rotary divisors; what they mean is checked where they are read


def check_tensors(path: Path, header: GgufHeader, config: DecoderConfig) -> None:
    """InputError, naming the file and the tensors, for one that is missing, unread, misshapen or misplaced."""
    compare(path.name, _names_in_gguf(config), {tensor.name: tensor.shape for tensor in header.tensors}, {ROPE_FREQS})


def _names_in_gguf(config: DecoderConfig) -> dict[str, Shape]:
    import gguf  # here, because a start from the cache needs no gguf package

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[config.architecture], config.shape.num_layers)
    found: dict[str, Shape] = {}
    for name, shape in expected_tensors(config).items():
        in_file = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert in_file is not None, name  # the architectures that are supported here are all in the table
        found[in_file] = shape
    return found


def check_places(path: Path, header: GgufHeader) -> None:
    """InputError unless the tensors lie one behind the other, aligned, from the header to the end of the file."""
    size, step = path.stat().st_size, header.alignment
    at = header.data_start
    for tensor in sorted(header.tensors, key=lambda t: t.offset):
        begin = header.data_start + tensor.offset
        if tensor.offset % step:
            raise InputError(
                f"{path.name}: tensor '{tensor.name}' begins at {begin}, which is not aligned to {step} bytes"
            )
        if begin < at:
            raise InputError(f"{path.name}: tensor '{tensor.name}' begins at byte {begin}, inside the one before it")
        if begin - at >= step:
            raise InputError(f"{path.name}: {begin - at} bytes before tensor '{tensor.name}' belong to no tensor")
        at = begin + _num_bytes(path, tensor)
        if at > size:
            raise InputError(f"{path.name} is damaged: tensor '{tensor.name}' ends at byte {at} of {size}")
    if size - at >= step:
        raise InputError(f"{path.name}: {size - at} bytes after the last tensor belong to no tensor")


def _num_bytes(path: Path, tensor: TensorEntry) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        elements, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    except (ValueError, KeyError):
        raise InputError(f"{path.name}: tensor '{tensor.name}' has the unknown type {tensor.kind}") from None
    count = math.prod(tensor.shape)
    if tensor.shape and tensor.shape[-1] % elements:
        raise InputError(
            f"{path.name}: tensor '{tensor.name}' has rows of {tensor.shape[-1]} elements, its type needs multiples of "
            f"{elements}"
        )
    return count // elements * num_bytes


def check_whole(path: Path, metadata: Mapping[str, object], tensors: Sequence[TensorEntry]) -> None:
    """InputError for one shard of a split file."""
    shards, before = metadata.get("split.count", 1), metadata.get("split.no", 0)
    if isinstance(shards, int) and shards > 1:
        number = before + 1 if isinstance(before, int) else before
        raise InputError(
            f"{path.name} is shard {number} of {shards} of a split GGUF; join the shards into one file first "
            f"(llama-gguf-split --merge)"
        )
    total = metadata.get("split.tensors.count")
    if isinstance(total, int) and total != len(tensors):
        raise InputError(f"{path.name} holds {len(tensors)} tensors of {total}: it is a shard of a split GGUF")
