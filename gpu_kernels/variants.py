"""Every kernel variant that ships: what the launchers can make Triton compile, listed without a GPU.

A variant is a body, the types of its arguments, and a launch configuration; ``config.py`` makes the latter, here as
in the launchers. A test holds the launchers against this list.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpu_kernels import config as configs
from gpu_kernels.bodies import cache, decode, fused, merge, pack, prefill
from gpu_kernels.capability import Capability
from gpu_kernels.config import Config

TARGETS = (75, 80, 86, 89, 90, 100)
BLOCK_DIMS = (16, 32, 64, 128, 256)  # head dims in between share the next one's code
_F32, _F16, _BF16, _I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
_FP8 = torch.uint8  # as kernels see it
_CODES = (_I8, _FP8)
_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
}
_FLOATS = ("sm_scale", "cap", "eps", "weight_offset", "unit")
_INT_POINTERS = (
    "item_seq_ptr",
    "item_split_ptr",
    "item_tile_ptr",
    "part_start_ptr",
    "table_ptr",
    "span_ptr",
    "reach_ptr",
    "q_start_ptr",
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One thing to compile: ``types`` maps the pointer arguments that are not float32 or int32 to their dtype."""

    kernel: str
    name: str
    body: Any
    config: Config
    types: tuple[tuple[str, torch.dtype], ...]
    head_dim: int
    half: bool

    def __post_init__(self) -> None:
        unknown = [name for name, _ in self.types if name not in self.body.arg_names]
        if unknown:
            raise ValueError(f"types: {self.kernel} has no argument {', '.join(unknown)}")

    @property
    def uses_bf16(self) -> bool:
        return any(dtype is torch.bfloat16 for _, dtype in self.types)

    @property
    def signature(self) -> dict[str, str]:
        """Argument types in Triton's notation."""
        types = dict(self.types)
        return {name: self._type_of(name, types) for name in self.body.arg_names}

    def _type_of(self, name: str, types: dict[str, torch.dtype]) -> str:
        if name in self.config.constants:
            return "constexpr"
        if name in types:
            return "*" + _NAMES[types[name]]
        if name.endswith("_ptr"):
            return "*i32" if name in _INT_POINTERS else "*fp32"
        return "fp32" if name in _FLOATS else "i32"

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes Triton compile anew."""
        constants = tuple(sorted(self.config.constants.items()))
        return self.kernel, tuple(self.signature.items()), constants, self.config.num_warps, self.config.num_stages


def variants(sm: int) -> list[Variant]:
    """All variants for one compute capability; bf16 ones only where the device has it."""
    makers = (_decode, _combine, _prefill, _append, _merge, _rms_norm, _rope, _silu_mul, _pack)
    listed = [variant for make in makers for variant in make(Capability(sm))]
    return [variant for variant in listed if Capability(sm).bf16 or not variant.uses_bf16]


def _label(dtype: torch.dtype) -> str:
    return "fp8" if dtype is _FP8 else _NAMES[dtype]


def _flavours() -> Iterator[tuple[torch.dtype, torch.dtype, bool, int]]:
    """Query dtype, cache dtype, extras, block of head dims."""
    for dtype in (_F32, _F16, _BF16):
        for store in (dtype, *_CODES):
            for extras in (False, True):
                for dim in BLOCK_DIMS:
                    yield dtype, store, extras, dim


def _decode(capability: Capability) -> Iterator[Variant]:
    for dtype, store, extras, dim in _flavours():
        for group in configs.group_blocks(dtype, store in _CODES, capability):
            arguments = (dtype, store in _CODES, extras, group, dim, capability)
            plain = configs.decode_config(*arguments)
            tiles = configs.tiles_of(dim, capability) if configs.swept(*arguments) else ()
            others = [(f"-n{n}x{stages}", configs.decode_config(*arguments, (n, stages))) for n, stages in tiles]
            chosen = [("", plain), *((name, config) for name, config in others if config != plain)]
            for out in dict.fromkeys((dtype, _F32)):
                types = (("q_ptr", dtype), ("k_ptr", store), ("v_ptr", store), ("out_ptr", out))
                name = f"q_{_label(dtype)}-kv_{_label(store)}-out_{_label(out)}-g{group}-d{dim}{'-extras' * extras}"
                for tile, config in chosen:
                    yield Variant(
                        "attend_split", name + tile, decode.attend_split, config, types, dim, dtype is not _F32
                    )


def _combine(capability: Capability) -> Iterator[Variant]:
    for dtype in (_F32, _F16, _BF16):
        for dim in BLOCK_DIMS:
            config = configs.combine_config(dim)
            name = f"out_{_label(dtype)}-d{dim}"
            yield Variant("combine", name, decode.combine, config, (("out_ptr", dtype),), dim, dtype is not _F32)


def _prefill(capability: Capability) -> Iterator[Variant]:
    for dtype, store, extras, dim in _flavours():
        config = configs.prefill_config(dtype, store in _CODES, extras, dim, capability)
        types = (("q_ptr", dtype), ("k_ptr", store), ("v_ptr", store), ("out_ptr", dtype))
        name = f"q_{_label(dtype)}-kv_{_label(store)}-d{dim}{'-extras' * extras}"
        yield Variant("attend_tile", name, prefill.attend_tile, config, types, dim, dtype is not _F32)


def _append(capability: Capability) -> Iterator[Variant]:
    for dtype in (_F32, _F16, _BF16):
        for store in (_F32, _F16, _BF16, *_CODES):
            for dim in BLOCK_DIMS:
                types: tuple[tuple[str, torch.dtype], ...] = (
                    ("k_ptr", dtype), ("v_ptr", dtype), ("k_cache_ptr", store), ("v_cache_ptr", store),
                    ("slot_ptr", torch.int64),
                )  # fmt: skip
                if store not in _CODES:
                    types += (("k_scale_ptr", torch.int64), ("v_scale_ptr", torch.int64))
                name = f"kv_{_label(dtype)}-cache_{_label(store)}-d{dim}"
                config = configs.append_config(store in _CODES, dim)
                yield Variant("append", name, cache.append, config, types, dim, dtype is not _F32)


def _merge(capability: Capability) -> Iterator[Variant]:
    for dtype in (_F32, _F16, _BF16):
        for dim in BLOCK_DIMS:
            types = (("a_ptr", dtype), ("b_ptr", dtype), ("out_ptr", dtype))
            name = f"{_label(dtype)}-d{dim}"
            yield Variant("merge", name, merge.merge, configs.merge_config(dim), types, dim, dtype is not _F32)


def _rms_norm(capability: Capability) -> Iterator[Variant]:
    for dtype in (_F32, _F16, _BF16):
        for add in (False, True):
            for hidden in (1024, 2048, 4096, 8192, 16384):
                types = tuple((name, dtype) for name in ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"))
                name = f"{_label(dtype)}-h{hidden}{'-add' * add}"
                config = configs.rms_norm_config(add, hidden)
                yield Variant("rms_norm", name, fused.rms_norm, config, types, 0, dtype is not _F32)


def _rope(capability: Capability) -> Iterator[Variant]:
    for dtype in (_F32, _F16, _BF16):
        for interleaved in (False, True):
            for half in (16, 32, 64, 128):
                for position in (torch.int32, torch.int64):
                    types = (("x_ptr", dtype), ("position_ptr", position))
                    name = f"{_label(dtype)}-half{half}-{_label(position)}{'-interleaved' * interleaved}"
                    config = configs.rope_config(interleaved, half)
                    yield Variant("rope", name, fused.rope, config, types, 0, dtype is not _F32)


def _silu_mul(capability: Capability) -> Iterator[Variant]:
    for dtype in (_F32, _F16, _BF16):
        types = (("gate_up_ptr", dtype), ("out_ptr", dtype))
        yield Variant("silu_mul", _label(dtype), fused.silu_mul, configs.silu_mul_config(), types, 0, dtype is not _F32)


def _pack(capability: Capability) -> Iterator[Variant]:
    words = {_F32: (torch.int32, torch.int32), _F16: (torch.int16, torch.int16), _BF16: (torch.int32, torch.uint16)}
    words[_I8] = (torch.int32, torch.uint8)  # fp8 moves as int8 does
    for store, (word, element) in words.items():
        for dim in BLOCK_DIMS:
            for ids in (torch.int32, torch.int64):
                scale = torch.int32 if store is _I8 else word
                types = (
                    ("k_ptr", word), ("v_ptr", element), ("block_ptr", word), ("id_ptr", ids), ("k_scale_ptr", scale),
                    ("v_scale_ptr", scale),
                )  # fmt: skip
                name, config = f"{_label(store)}-d{dim}-{_label(ids)}", configs.pack_config(store, dim)
                yield Variant("pack", name, pack.pack, config, types, dim, store is not _F32)
                yield Variant("unpack", name, pack.unpack, config, types, dim, store is not _F32)
                if ids is torch.int64:
                    homes = (*types, ("home_ptr", ids))
                    yield Variant("copy_down", name, pack.copy_down, config, homes, dim, store is not _F32)
                    yield Variant("copy_up", name, pack.copy_up, config, homes, dim, store is not _F32)
