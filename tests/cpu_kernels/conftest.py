"""A paged problem with its float64 answer, and the error bound that kernels are held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import cpu_kernels as ck

LEVELS = ck.isa.detect(override="").available


@dataclass(frozen=True, slots=True)
class Problem:
    """Pages filled with known values, a shuffled block table, poisoned outputs."""

    pages: ck.KVPages
    k: np.ndarray  # plain [pages, kv_heads, page_size, head_dim], as stored
    v: np.ndarray
    table: np.ndarray
    lens: np.ndarray
    q: np.ndarray
    out: np.ndarray
    lse: np.ndarray

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    def plan(self, **options: Any) -> ck.DecodePlan:
        return ck.plan_decode(self.pages, self.table, self.lens, self.heads, **options)

    def run(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        self.out[...], self.lse[...] = np.nan, np.nan
        self.plan(**options).run(self.q, self.out, self.lse)
        return self.out.copy(), self.lse.copy()

    def want(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        return ck.reference.decode_reference(self.q, self.k, self.v, self.table, self.lens, **options)

    def coarse(self, isa: str) -> bool:
        """Whether a level's kernel has queries and weights of 16 bits."""
        kind = self.pages.layout.kind
        pairs = kind.multiplies_pairs(isa, kind.extras(isa))
        return pairs or (kind.bytes_dot and isa in ("avx512_bf16", "amx_bf16"))

    def bound(self, isa: str, **options: Any) -> float:
        """Twice the error of the plain computation in the kernel's precision, plus a small floor.

        On ``avx512_bf16`` and ``amx_bf16`` bf16 and fp8 kernels round queries and weights to bf16, and an int8 kernel
        to 16-bit fixed point (held to the same bound); everything else computes in float32.
        """
        want, _ = self.want(**options)
        plain = plain_decode(self, self.coarse(isa), **options)
        return 2 * float(np.abs(plain - want).max(initial=0)) + 2e-6 * max(1.0, float(np.abs(self.v).max()))


def plain_decode(p: Problem, coarse: bool, **options: Any) -> np.ndarray:
    """The textbook computation in float32, with bf16 queries and weights where `coarse`."""

    def narrow(x: np.ndarray) -> np.ndarray:
        return ck.from_bf16(ck.to_bf16(x)) if coarse else x

    scale = np.float32(options.get("sm_scale") or p.q.shape[2] ** -0.5)
    cap, window = np.float32(options.get("logits_soft_cap", 0.0)), options.get("window_left", -1)
    out = np.zeros(p.q.shape, np.float32)
    group, size = p.heads // p.pages.num_kv_heads, p.pages.page_size
    for i, n in enumerate(p.lens.tolist()):
        first = 0 if window < 0 else max(0, n - 1 - window)
        if n == 0:
            continue
        used = p.table[i, : -(-n // size)]
        k, v = (np.swapaxes(x[used], 1, 2).reshape(-1, x.shape[1], x.shape[3])[first:n] for x in (p.k, p.v))
        for h in range(p.heads):
            s = (k[:, h // group] @ narrow(p.q[i, h])) * scale
            if cap > 0:
                s = cap * np.tanh(s / cap)
            if options.get("alibi_slopes") is not None:
                s = s + np.float32(options["alibi_slopes"][h]) * np.arange(first - n + 1, 1, dtype=np.float32)
            sink = options.get("sinks")
            top = s.max() if sink is None else max(s.max(), np.float32(sink[h]))
            w = np.exp(s - top)
            mass = w.sum() + (0 if sink is None else np.exp(np.float32(sink[h]) - top))
            out[i, h] = (narrow(w) @ v[:, h // group]) / mass
    return out


def make_problem(
    lens: Any,
    *,
    heads: int = 2,
    group: int = 2,
    dim: int = 64,
    page: int = 32,
    dtype: str = "bf16",
    seed: int = 0,
    spare_pages: int = 2,
    num_layers: int = 1,
    poison: bool = True,
    layout: str = "tiles",
) -> Problem:
    """Fill a pool with random values; slots past each row's length, and unused pages, hold NaN (and NaN scales)."""
    rng = np.random.default_rng(seed)
    lens = np.asarray(lens, np.int32)
    width = max(1, -(-int(lens.max(initial=1)) // page))
    count = len(lens) * width + spare_pages
    pages = ck.KVPages(count, heads, dim, page, dtype, num_layers, huge_pages=False, layout=layout)
    k, v = (rng.standard_normal((count, heads, page, dim)).astype(np.float32) for _ in range(2))
    table = rng.permutation(count)[: len(lens) * width].reshape(len(lens), width).astype(np.int32)
    for layer in range(num_layers):
        ck.pack(pages, layer, np.arange(count), k, v)
    k, v = ck.unpack(pages, 0, np.arange(count))
    if poison:
        poison_unused(pages, table, lens)
    q = ck.from_bf16(ck.to_bf16(rng.standard_normal((len(lens), heads * group, dim)).astype(np.float32)))
    return Problem(
        pages, k, v, table, lens, q, np.full(q.shape, np.nan, np.float32), np.full(q.shape[:2], np.nan, np.float32)
    )


def poison_unused(pages: ck.KVPages, table: np.ndarray, lens: np.ndarray) -> None:
    """Overwrite everything that no row may read."""
    size = pages.page_size
    free = set(range(pages.num_pages)) - {int(x) for i, n in enumerate(lens) for x in table[i, : -(-n // size)]}
    for layer in range(pages.num_layers):
        for page in free:
            pages.buffer[layer, page] = 0xFF  # NaN in every float format, also of the scales
    nan_row = np.full((1, pages.num_kv_heads, pages.head_dim), np.nan, np.float32)
    for i, n in enumerate(lens.tolist()):
        if n % size == 0:
            continue
        page = int(table[i, n // size])
        for offset in range(n % size, size):
            for layer in range(pages.num_layers):
                ck.append_kv(pages, layer, nan_row, nan_row, [page * size + offset])
                if pages.layout.kind.limit:
                    scales = pages.buffer[layer, page, :, 2 * pages.layout.k_bytes :].view(np.float32)
                    scales[:, [offset, size + offset]] = np.nan


@pytest.fixture
def problem() -> Callable[..., Problem]:
    return make_problem


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def levels() -> tuple[str, ...]:
    return LEVELS
