"""One attention contract, two packages: the same tokens, appended and attended to by each, against the oracle."""

from typing import Any

import numpy as np
import pytest
import torch

import cpu_kernels
import gpu_kernels
from cpu_kernels.reference import decode_reference, merge_reference

HEADS = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 20},
    "cap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": np.linspace(0.01, 0.3, HEADS, dtype=np.float32)},
    "sinks": {"sinks": np.linspace(-2, 2, HEADS, dtype=np.float32)},
    "scale": {"sm_scale": 0.05},
    "all": {
        "window_left": 40,
        "logits_soft_cap": 3.0,
        "alibi_slopes": np.linspace(0.0, 0.1, HEADS, dtype=np.float32),
        "sinks": np.linspace(1, -1, HEADS, dtype=np.float32),
    },
}
LENS = np.array([1, 0, 54, 97], np.int32)
PAGES = 16


class Tokens:
    """Random rows for every slot of the batch's pages, its table, and the plain pages they make."""

    def __init__(self, kv_heads: int, dim: int, page: int) -> None:
        draw = np.random.default_rng(4)
        self.kv_heads, self.dim, self.page = kv_heads, dim, page
        self.table = np.full((len(LENS), 8), -1, np.int32)
        free = draw.permutation(PAGES).astype(np.int32)
        slots = []
        for row, length in enumerate(LENS):
            count = -(-int(length) // page)
            self.table[row, :count], free = free[:count], free[count:]
            at = np.arange(length)
            slots.append(self.table[row, at // page].astype(np.int64) * page + at % page)
        self.slots = np.concatenate(slots)
        shape = (len(self.slots), kv_heads, dim)
        self.k, self.v = (draw.standard_normal(shape).astype(np.float32) for _ in range(2))
        self.q = draw.standard_normal((len(LENS), HEADS, dim)).astype(np.float32)

    def pages(self, rows: np.ndarray) -> np.ndarray:
        pages = np.full((PAGES, self.kv_heads, self.page, self.dim), np.nan)
        pages[self.slots // self.page, :, self.slots % self.page] = rows
        return pages


def by_triton(
    tokens: Tokens, store: str, device: torch.device, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(store, torch.float32)
    shape = (PAGES, tokens.kv_heads, tokens.page, tokens.dim)
    caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
    scales = {}
    if store in ("int8", "fp8"):
        scales = {name: torch.zeros(shape[:3], device=device) for name in ("k_scale", "v_scale")}
    k, v, q = (torch.from_numpy(x).to(device) for x in (tokens.k, tokens.v, tokens.q))
    gpu_kernels.append_kv(k, v, *caches, torch.from_numpy(tokens.slots).to(device), **scales)
    table, lens = torch.from_numpy(tokens.table), torch.from_numpy(LENS)
    out, lse = gpu_kernels.paged_decode_attention(q, *caches, table, lens, **scales, **options)
    return out.cpu().numpy(), lse.cpu().numpy()


def by_cpu(tokens: Tokens, store: str, device: torch.device, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    pages = cpu_kernels.KVPages(PAGES, tokens.kv_heads, tokens.dim, page_size=tokens.page, dtype=store)
    cpu_kernels.append_kv(pages, 0, tokens.k, tokens.v, tokens.slots)
    plan = cpu_kernels.plan_decode(pages, tokens.table, LENS, HEADS, **options)
    out, lse = np.full_like(tokens.q, np.nan), np.full(tokens.q.shape[:2], np.nan, np.float32)
    plan.run(tokens.q, out, lse)
    return out, lse


RUNS = {"triton": by_triton, "cpu_kernels": by_cpu}


@pytest.mark.parametrize("store", ["fp32", "int8", "fp8"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("package", RUNS)
def test_decode(device: torch.device, package: str, name: str, store: str) -> None:
    tokens = Tokens(2, 64, 16)
    out, lse = RUNS[package](tokens, store, device, OPTIONS[name])
    pages = tokens.pages(tokens.k), tokens.pages(tokens.v)
    truth, lse_truth = decode_reference(tokens.q, *pages, tokens.table, LENS, **OPTIONS[name])
    bound = {"fp32": 5e-6, "int8": 5e-2, "fp8": 0.3}[store]
    assert np.abs(out - truth).max() < bound
    assert np.allclose(lse, lse_truth, rtol=0, atol=max(bound, 1e-5))
    assert np.all(out[1] == 0) and np.all(lse[1] == -np.inf)


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("store", ["int8", "fp8"])
def test_both_packages_agree_more_closely_than_codes_with_the_truth(
    device: torch.device, kv_heads: int, store: str
) -> None:
    """Codes and scales follow the same rule, so what quantising costs is the same on both."""
    tokens = Tokens(kv_heads, 48, 32)
    (gpu, gpu_lse), (cpu, cpu_lse) = (run(tokens, store, device, {}) for run in RUNS.values())
    assert np.abs(gpu - cpu).max() < 2e-2
    assert np.allclose(gpu_lse, cpu_lse, rtol=0, atol=2e-2)


def test_halves_from_both_packages_merge_to_the_whole(device: torch.device) -> None:
    """The first tokens of a sequence on one side, the last on the other."""
    draw = np.random.default_rng(0)
    k, v = (draw.standard_normal((80, 2, 64)).astype(np.float32) for _ in range(2))
    q = draw.standard_normal((1, 4, 64)).astype(np.float32)
    pages = cpu_kernels.KVPages(3, 2, 64, page_size=16, dtype="fp32")
    cpu_kernels.append_kv(pages, 0, k[:37], v[:37], np.arange(37))
    out_cpu, lse_cpu = np.empty_like(q), np.empty((1, 4), np.float32)
    cpu_kernels.plan_decode(pages, [[0, 1, 2]], [37], 4).run(q, out_cpu, lse_cpu)
    caches = [torch.zeros(3, 2, 16, 64, device=device) for _ in range(2)]
    rows = [torch.from_numpy(x[37:]).to(device) for x in (k, v)]
    gpu_kernels.append_kv(*rows, *caches, torch.arange(43, device=device))
    table, lens = torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.tensor([43], dtype=torch.int32)
    out, lse = gpu_kernels.paged_decode_attention(torch.from_numpy(q).to(device), *caches, table, lens)
    cpu = [torch.from_numpy(x).to(device) for x in (out_cpu, lse_cpu)]
    merged, _ = gpu_kernels.merge_state(out, lse, *cpu)
    whole = [np.swapaxes(x.reshape(5, 16, 2, 64), 1, 2) for x in (k, v)]
    truth, _ = decode_reference(q, *whole, np.arange(5)[None], np.array([80]))
    assert np.abs(merged.cpu().numpy() - truth).max() < 3e-6
    by_reference, _ = merge_reference([out.cpu().numpy(), out_cpu], [lse.cpu().numpy(), lse_cpu])
    assert np.abs(by_reference - merged.cpu().numpy()).max() < 1e-6
