"""Sizes of the engine parts: those of the real run, and tiny ones of the same form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """Part e. ``ratios``: CPU requests per GPU request. ``window_s``: how long decoding is measured at each point."""

    model: str
    dtype: str
    gpu_requests: int
    ratios: tuple[float, ...]
    prompt_tokens: int
    max_model_len: int
    max_num_batched_tokens: int
    page_size: int
    window_s: float
    repeats: int
    gpu_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens >= self.max_model_len:
            raise ValueError(f"prompt_tokens {self.prompt_tokens} leaves no room in max_model_len {self.max_model_len}")

    @property
    def most_cpu_requests(self) -> int:
        return round(self.gpu_requests * max(self.ratios))


# 16 GB of weights, 8 requests of up to 2048 tokens on the card (2.1 GB of K,V): a card with about 24 GB.
REAL = PolicyRun(
    model="dummy:llama3.1-8b",
    dtype="bf16",
    gpu_requests=8,
    ratios=(0.5, 1, 2, 4, 8, 16),
    prompt_tokens=512,
    max_model_len=2048,
    max_num_batched_tokens=2048,
    page_size=32,
    window_s=3.0,
    repeats=3,
    gpu_memory_bytes=24_000_000_000,
)
TINY = PolicyRun(
    model="dummy:tiny",
    dtype="fp32",
    gpu_requests=2,
    ratios=(0.5, 2),
    prompt_tokens=20,
    max_model_len=512,
    max_num_batched_tokens=32,
    page_size=16,
    window_s=0.15,
    repeats=1,
)


def policy_run(dry_run: bool) -> PolicyRun:
    return TINY if dry_run else REAL
