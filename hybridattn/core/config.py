"""Limits of an engine, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hybridattn.core.errors import InputError
from hybridattn.core.params import as_integer
from hybridattn.core.stages import CPU_TIER, TIERS

PAGE_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine may hold and how long it waits.

    Attributes
    ----------
    gpu_kv_blocks, cpu_kv_blocks : int
        Pages per tier; all of them can be used.
    page_size : int
        Tokens per page: 16, 32, 64 or 128.
    max_model_len : int
        Prompt plus output tokens of one request.
    max_num_seqs : int
        Requests admitted at a time (both tiers).
    max_num_batched_tokens : int
        GPU rows of one step; longer prompts are prefilled in chunks.
    run_ahead : int
        Layers by which the driver may be ahead of the GPU; more makes its polls stale.
    op_timeout_ns : int
        Longest wait for any op; past it a StallError names op, lane and requests.
    pause_tier : str
        Where K,V of a session rest between its turns: ``cpu`` moves them down while the CPU tier has room, ``gpu``
        leaves them where they are.
    share_prefixes : bool
        Requests that begin with the same tokens share whole pages of them, as far as their ``cache_salt`` is the same.
    """

    gpu_kv_blocks: int
    cpu_kv_blocks: int
    page_size: int = 32
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    run_ahead: int = 2
    op_timeout_ns: int = 60_000_000_000
    pause_tier: str = CPU_TIER
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        if self.pause_tier not in TIERS:
            raise InputError(f"pause_tier must be {' or '.join(TIERS)}, got {self.pause_tier!r}")
        if not isinstance(self.share_prefixes, bool):
            raise InputError(f"share_prefixes must be True or False, got {self.share_prefixes!r}")
        for f in fields(self):
            if f.name in ("pause_tier", "share_prefixes"):
                continue
            value = as_integer(given := getattr(self, f.name))
            if value is None:
                raise InputError(f"{f.name} must be an integer, got {given!r}")
            object.__setattr__(self, f.name, value)
        if self.page_size not in PAGE_SIZES:
            raise InputError(f"page_size must be one of {', '.join(map(str, PAGE_SIZES))}, got {self.page_size}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "run_ahead", "op_timeout_ns"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.gpu_kv_blocks < 0 or self.cpu_kv_blocks < 0 or self.gpu_kv_blocks + self.cpu_kv_blocks == 0:
            raise InputError(
                f"gpu_kv_blocks and cpu_kv_blocks must be >= 0 and not both 0, got {self.gpu_kv_blocks} and "
                f"{self.cpu_kv_blocks}"
            )
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise InputError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request decodes one token per step"
            )
