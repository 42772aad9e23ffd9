"""These tests run the kernels in Triton's interpreter, or compiled with ``TRITON_INTERPRET=0`` on a machine with a GPU.

Whether a kernel is interpreted is decided when ``triton`` and the kernels are imported. Other rooms' tests may have
imported triton by then (transformers does), so it is imported anew, and the variable is put back afterwards: other
rooms and child processes never see it.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from quick_interpreter import patch_once

INTERPRET = os.environ.get("TRITON_INTERPRET", "1") == "1"


def _import_kernels() -> None:
    if not INTERPRET:
        return
    before = os.environ.get("TRITON_INTERPRET")
    for name in list(sys.modules):
        if name.split(".")[0] in ("triton", "gpu_kernels") and not name.startswith("triton._C"):
            del sys.modules[name]
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("gpu_kernels")
    importlib.import_module("triton.experimental.gluon")  # the first launch imports it, and it asks for the variable
    patch_once(importlib.import_module("triton.runtime.interpreter"))
    if before is None:
        del os.environ["TRITON_INTERPRET"]


_import_kernels()

from cpu_kernels.reference import decode_reference, prefill_reference  # noqa: E402
from gpu_kernels.environment import interpreted  # noqa: E402

if interpreted() != INTERPRET:
    raise RuntimeError(f"the kernels were to be {'interpreted' if INTERPRET else 'compiled'} and are not")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse what would pass or fail for the wrong reason: bf16 arithmetic in the interpreter gives wrong numbers."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if item.get_closest_marker("gpu"):
        if INTERPRET:
            pytest.skip("needs a CUDA device and TRITON_INTERPRET=0")
    elif INTERPRET and any(value is torch.bfloat16 for value in parameters.values()):
        pytest.fail("bf16 is wrong in Triton's interpreter: mark the test gpu", pytrace=False)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRET else "cuda")


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@dataclass
class Batch:
    """A paged cache with everything that must not be read filled with NaN, and the truth about it in float64."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    scales: dict[str, torch.Tensor]

    def plain(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V as float64 [num_pages, num_kv_heads, page_size, head_dim], dequantised."""
        k, v = self.k_cache.double().cpu().numpy(), self.v_cache.double().cpu().numpy()
        if not self.scales:
            return k, v
        scales = [self.scales[name].double().cpu().numpy()[..., None] for name in ("k_scale", "v_scale")]
        return k * scales[0], v * scales[1]

    def keys(self, seq: int, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """K and V of one sequence as float64 [tokens, num_kv_heads, head_dim]."""
        length = int(self.seq_lens[seq]) if length is None else length
        pages = self.block_table[seq, : -(-length // self.k_cache.shape[2])].long().numpy()
        rows = [np.swapaxes(x[pages], 1, 2).reshape(-1, x.shape[1], x.shape[3])[:length] for x in self.plain()]
        return rows[0], rows[1]

    def decode_truth(self, q: torch.Tensor, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        k, v = self.plain()
        table = self.block_table.numpy()
        return decode_reference(q.double().cpu().numpy(), k, v, table, self.seq_lens.numpy(), **options)

    def prefill_truth(self, q: torch.Tensor, seq: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        return prefill_reference(q.double().cpu().numpy(), *self.keys(seq), **options)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.k_cache, self.v_cache, self.block_table, self.seq_lens


@pytest.fixture
def make_batch(device: torch.device) -> Callable[..., Batch]:
    """``make_batch(lens, num_kv_heads, head_dim, page_size, dtype, seed)`` -> Batch."""

    def make(
        lens: list[int],
        num_kv_heads: int = 2,
        head_dim: int = 64,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Batch:
        draw = torch.Generator().manual_seed(seed)
        counts = [-(-length // page_size) for length in lens]
        num_pages = sum(counts) + 3
        ids = torch.randperm(num_pages, generator=draw).int()
        table = torch.full((len(lens), max([*counts, 0]) + 2), -1, dtype=torch.int32)
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        k, v = (torch.randn(shape, generator=draw) for _ in range(2))
        live = torch.zeros(num_pages, page_size, dtype=torch.bool)
        taken = 0
        for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
            table[row, :count] = ids[taken : taken + count]
            table[row, count] = 2**31 - 1
            live[table[row, :count].long()] = (torch.arange(count * page_size) < length).view(count, page_size)
            taken += count
        scales: dict[str, torch.Tensor] = {}
        if dtype is torch.int8:
            k, v = ((x * 40).round().clamp(-127, 127) for x in (k, v))
            for name in ("k_scale", "v_scale"):
                values = torch.rand(shape[:3], generator=draw) * 0.05 + 0.001
                scales[name] = torch.where(live[:, None, :], values, torch.nan).to(device)
        else:
            k, v = (torch.where(live[:, None, :, None], x, torch.nan) for x in (k, v))
        if dtype is torch.float8_e4m3fn:
            for name in ("k_scale", "v_scale"):
                values = torch.rand(shape[:3], generator=draw) + 0.1
                scales[name] = torch.where(live[:, None, :], values, torch.nan).to(device)
        k, v = k.to(dtype).to(device), v.to(dtype).to(device)
        return Batch(k, v, table, torch.tensor(lens, dtype=torch.int32), scales)

    return make


def plain_rows(q: torch.Tensor, keys: tuple[np.ndarray, np.ndarray], first: int = 0) -> np.ndarray:
    """The plain computation in q's precision for one sequence, uncapped: matmul, softmax, matmul. q [heads, dim]."""
    k, v = (torch.from_numpy(x[first:]).to(q.dtype) for x in keys)
    group = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = torch.matmul(q[:, None, :], k.permute(1, 2, 0)) * q.shape[1] ** -0.5
    return torch.matmul(torch.softmax(score, -1), v.transpose(0, 1))[:, 0].double().numpy()


@pytest.fixture
def check_error() -> Callable[..., None]:
    """``check_error(got, truth, plain, dtype)``: error <= 2x the plain computation's, plus two units of the dtype."""

    def check(got: torch.Tensor, truth: np.ndarray, plain: np.ndarray | None, dtype: torch.dtype) -> None:
        values = got.double().cpu().numpy()
        assert not np.isnan(values).any()
        unit = torch.finfo(dtype).eps * max(1.0, float(np.abs(truth).max(initial=0.0)))
        allowed = 2 * unit + (0.0 if plain is None else 2 * float(np.abs(plain - truth).max(initial=0.0)))
        assert float(np.abs(values - truth).max(initial=0.0)) <= allowed

    return check


@pytest.fixture
def plain() -> Callable[..., np.ndarray]:
    return plain_rows
