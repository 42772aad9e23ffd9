"""Launch configurations: explicit, per shape class and compute capability. No autotuning.

Everything that makes Triton compile another variant is decided here, so the compile gate can list all of them
(``variants.py``).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from gpu_kernels.capability import Capability

HEAD_DIMS = range(16, 257, 16)
PAGE_SIZES = (16, 32, 64, 128)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALED = (torch.int8, torch.float8_e4m3fn)  # cache dtypes with a scale per token and kv head
SPLIT_MULTIPLE = 64  # no decode tile is longer, so a split always begins on a tile
MAX_HIDDEN = 16_384
HEADS_PER_PROGRAM = 4  # append, rope
ROWS_PER_PROGRAM = 4  # merge
PARTS_PER_STEP = 32  # combine
SILU_BLOCK = 1024
DECODE_TILES = ((64, 2), (64, 3), (32, 3), (32, 5), (64, 5))  # keys, stages: what a sweep tries
COPY_PROGRAMS = 32  # 4 KB under way in each fill any bus, and the other multiprocessors go on with the step


@dataclass(frozen=True, slots=True)
class Config:
    """Compile-time constants and launch options of one kernel variant."""

    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8, 16) or self.num_stages < 1:
            raise ValueError(f"num_warps, num_stages: {self.num_warps}, {self.num_stages} is no launch configuration")


def block_of(columns: int) -> int:
    """The power of two that holds this many columns, at least 16."""
    return max(16, triton.next_power_of_2(columns))


def tensor_cores(dtype: torch.dtype, capability: Capability) -> bool:
    """Whether ``tl.dot`` becomes matrix instructions: 16-bit types from 8.0 on.

    Elsewhere (float32 in full precision, and all of 7.5, for which Triton 3.9 emits no ``mma``) it becomes
    multiply-adds that hold their operands in registers, so tiles must be small.
    """
    return dtype is not torch.float32 and (capability.bf16 or capability.interpreter)


def group_blocks(dtype: torch.dtype, quantised: bool, capability: Capability) -> tuple[int, ...]:
    """Rows a decode program may have for the query heads of a kv head; larger groups take several programs.

    Tensor cores take 16 rows at least; multiply-adds pay for padding. Widening int8 codes beside 32 rows would spill.
    """
    if not tensor_cores(dtype, capability):
        return (4, 16)
    return (16,) if quantised else (16, 32)


def decode_config(
    dtype: torch.dtype, quantised: bool, extras: bool, group: int, head_dim: int, capability: Capability,
    tile: tuple[int, int] | None = None,
) -> Config:  # fmt: skip
    """``bodies.decode.attend_split``, with ``tile`` (keys, stages) where a sweep on the card found that one best.

    Of three stages, two tiles of K and V are on their way while the third is computed with; they fit the 99 KiB of 8.6
    and 8.9.
    """
    block_d, blocks = block_of(head_dim), group_blocks(dtype, quantised, capability)
    block_g = next((block for block in blocks if group <= block), blocks[-1])
    if not tensor_cores(dtype, capability):
        block_n = 32 if block_d <= 64 else 16
        warps, stages = 4 if block_d <= 128 else 8, 1
    elif quantised:  # widening the codes takes registers, so more threads share a tile, but for what spills with them
        block_n, warps, stages = 64 if block_d < 128 else 32, 4 if block_d == 64 else 8, 4 if block_d == 128 else 3
    else:
        large = block_g == 16 and capability.shared_bytes >= 160_000
        block_n = 64 if 16 < block_d < 128 or (block_d == 128 and large) else 32
        warps, stages = 8 if block_g == 32 and block_d == 64 else 4, 3
        if tile is not None and swept(dtype, quantised, extras, group, head_dim, capability):
            block_n, stages = tile
    constants = {
        "QUANTISED": quantised,
        "EXTRAS": extras,
        "BLOCK_G": block_g,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
    }
    return Config(constants, warps, stages)


def swept(dtype: torch.dtype, quantised: bool, extras: bool, group: int, head_dim: int, capability: Capability) -> bool:
    """Whether decode may have a tile of ``DECODE_TILES``: the common case, for which a card's sweep is short."""
    common = not quantised and not extras and group <= 16 and head_dim in (64, 128)
    return common and tensor_cores(dtype, capability)


def tiles_of(head_dim: int, capability: Capability) -> tuple[tuple[int, int], ...]:
    """Those of ``DECODE_TILES`` whose stages fit this device beside what else a program needs (6 KiB)."""
    stage = 4 * head_dim  # bytes of a key and a value
    return tuple((n, s) for n, s in DECODE_TILES if n * (s - 1) * stage + 6144 <= capability.shared_bytes)


def combine_config(head_dim: int) -> Config:
    """``bodies.decode.combine``."""
    return Config({"BLOCK_P": PARTS_PER_STEP, "BLOCK_D": block_of(head_dim)}, num_warps=4)


def prefill_config(dtype: torch.dtype, quantised: bool, extras: bool, head_dim: int, capability: Capability) -> Config:
    """``bodies.prefill.attend_tile``. The sizes are the largest that the compile gate finds free of spills."""
    block_d = block_of(head_dim)
    if not tensor_cores(dtype, capability):
        block_m, block_n, warps, stages = 32 if block_d <= 128 else 16, 16, 8, 1
    elif block_d > 128:
        block_m, block_n, warps, stages = 64, 32, 8, 2
    elif capability.sm >= 90 and not (quantised and block_d == 128):
        block_m, block_n, warps, stages = 64, 64, 4, 3
    elif quantised and capability.sm >= 100:
        block_m, block_n, warps, stages = 64, 32, 4, 2
    elif quantised:
        roomy = block_d == 64 and capability.shared_bytes >= 160_000  # with two stages a register spills there
        block_m, block_n, warps, stages = 64, 32, 8, 3 if roomy else 2
    else:
        block_m, block_n, warps, stages = 64, 64, 4 if block_d <= 64 else 8, 2
        if block_d <= 64 and capability.shared_bytes >= 160_000:
            stages = 3
    constants = {
        "QUANTISED": quantised,
        "EXTRAS": extras,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
    }
    return Config(constants, warps, stages)


def append_config(quantised: bool, head_dim: int) -> Config:
    """``bodies.cache.append``."""
    constants = {"QUANTISED": quantised, "BLOCK_H": HEADS_PER_PROGRAM, "BLOCK_D": block_of(head_dim)}
    return Config(constants, num_warps=2)


def merge_config(head_dim: int) -> Config:
    """``bodies.merge.merge``."""
    return Config({"BLOCK_R": ROWS_PER_PROGRAM, "BLOCK_D": block_of(head_dim)}, num_warps=2)


def rms_norm_config(add: bool, hidden: int) -> Config:
    """``bodies.fused.rms_norm``: one row in registers, at most 32 elements per thread."""
    block = max(1024, triton.next_power_of_2(hidden))
    return Config({"ADD": add, "BLOCK": block}, num_warps=min(16, max(4, block // 1024)))


def rope_config(interleaved: bool, half_dim: int) -> Config:
    """``bodies.fused.rope``."""
    constants = {"INTERLEAVED": interleaved, "BLOCK_H": HEADS_PER_PROGRAM, "BLOCK_D": block_of(half_dim)}
    return Config(constants, num_warps=2)


def silu_mul_config() -> Config:
    """``bodies.fused.silu_mul``."""
    return Config({"BLOCK": SILU_BLOCK}, num_warps=4)


def pack_config(dtype: torch.dtype, head_dim: int) -> Config:
    """``bodies.pack``: all kernels there."""
    share = {torch.float32: 1, torch.float16: 1, torch.bfloat16: 2}.get(dtype, 4)
    block_d = block_of(head_dim)
    constants = {
        "SHARE": share,
        "SCALES": dtype in SCALED,
        "BLOCK_W": max(4, block_d // share),
        "BLOCK_D": block_d,
    }
    return Config(constants, num_warps=4)
