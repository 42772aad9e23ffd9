"""CPU decode attention on this machine beside its read loop: the point of ``kernels``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cpu_kernels import WorkerPool, backends
from cpu_kernels.bench.cases import Case
from cpu_kernels.bench.measure import measure
from experiments.schema import App
from experiments.settings import experiment
from hybridattn.core.errors import InputError
from hybridattn.devices.fingerprint import fingerprint


@dataclass
class KernelSettings:
    """``settings`` of ``kernels``.

    total_tokens : keys of all sequences together, so that every point reads as many bytes
    backend : native, numba, numba_topk_approx, torch, ...; what leaves keys out says so in the column ``approximate``
    tokens : keys of each sequence; threads : null: one per usable core; rounds : paired, alternating rounds
    """

    group: int = 4
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 32
    dtype: str = "bf16"
    tokens: int = 4096
    total_tokens: int = 65536
    threads: int | None = None
    rounds: int = 30
    backend: str = "native"

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.total_tokens < self.tokens:
            raise InputError(f"settings: total_tokens {self.total_tokens} must hold a sequence of {self.tokens} tokens")


@experiment(KernelSettings)
def point(app: App, settings: KernelSettings) -> dict[str, Any]:
    """One row: bandwidth of K and V read, alone and as a share of what the read loop reaches in the same rounds."""
    s = settings
    lens = (s.tokens,) * (s.total_tokens // s.tokens)
    case = Case(app.name, s.group, s.kv_heads, s.head_dim, s.page_size, s.dtype, lens, backend=s.backend)
    if reason := backends.why_absent(s.backend):
        raise InputError(reason)
    with WorkerPool(s.threads) as pool:
        row = measure(case, pool, s.rounds, None, None)
    samples = row.pop("samples_ns")
    return {
        "kind": "measured",
        "device": "host",
        "profile": fingerprint(),
        **row,
        "group": f"group {s.group}",
        "group_size": s.group,
        "samples_ns": " ".join(map(str, samples)),
    }
