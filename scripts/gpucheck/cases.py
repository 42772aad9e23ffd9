"""Random paged caches for the conformance part, with NaN wherever nothing may be read, and the truth in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cpu_kernels.reference import decode_reference

LENGTHS = (0, 1, 17, 54, 97, 257, 577)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One decode batch. ``scales`` is empty but for int8."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor
    q: torch.Tensor
    scales: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        if len(self.table) != len(self.lens):
            raise ValueError(f"table has {len(self.table)} rows, lens {len(self.lens)}")

    def keys(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V in float64, as the oracle takes them."""
        k, v = self.k_cache.double().cpu().numpy(), self.v_cache.double().cpu().numpy()
        if self.scales:
            k = k * self.scales["k_scale"].double().cpu().numpy()[..., None]
            v = v * self.scales["v_scale"].double().cpu().numpy()[..., None]
        return k, v

    def truth(self, **options: object) -> tuple[np.ndarray, np.ndarray]:
        q = self.q.double().cpu().numpy()
        return decode_reference(q, *self.keys(), self.table.numpy(), self.lens.numpy(), **options)

    def plain(self, scale: float) -> np.ndarray:
        """The same by plain products and softmax in the dtype of q, without options; rows without keys are 0."""
        out = np.zeros(tuple(self.q.shape))
        k_all, v_all = (torch.from_numpy(x).to(self.q) for x in self.keys())
        group, page = self.q.shape[1] // k_all.shape[1], k_all.shape[2]
        for row, length in enumerate(self.lens.tolist()):
            if length:
                ids = self.table[row, : -(-length // page)].long().to(self.q.device)
                k, v = (
                    x[ids].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(group, 1) for x in (k_all, v_all)
                )
                score = torch.matmul(self.q[row][:, None], k.permute(1, 2, 0)) * scale
                out[row] = torch.matmul(torch.softmax(score, -1), v.transpose(0, 1))[:, 0].double().cpu().numpy()
        return out


def make_case(
    dtype: torch.dtype, group: int, head_dim: int, page: int, device: str, kv_dtype: torch.dtype | None = None
) -> Case:
    draw = torch.Generator().manual_seed(group * 1000 + head_dim + page)
    heads, counts = 2, [-(-n // page) for n in LENGTHS]
    ids = torch.randperm(sum(counts) + 2, generator=draw).int()
    table = torch.full((len(LENGTHS), max(counts) + 1), -1, dtype=torch.int32)
    shape = (sum(counts) + 2, heads, page, head_dim)
    live, taken = torch.zeros(shape[0], page, dtype=torch.bool), 0
    for row, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        table[row, :count] = ids[taken : taken + count]
        live[table[row, :count].long()] = (torch.arange(count * page) < length).view(count, page)
        taken += count
    k, v = (torch.randn(shape, generator=draw) for _ in range(2))
    q = torch.randn(len(LENGTHS), heads * group, head_dim, generator=draw).to(dtype).to(device)
    scales = {}
    if kv_dtype is torch.int8:
        k, v = ((x * 40).round().clamp(-127, 127).to(torch.int8) for x in (k, v))
        for name in ("k_scale", "v_scale"):
            scales[name] = (torch.rand(shape[:3], generator=draw) * 0.05 + 0.001).to(device)
    else:
        k, v = (torch.where(live[:, None, :, None], x, torch.nan).to(dtype) for x in (k, v))
    return Case(k.to(device), v.to(device), table, torch.tensor(LENGTHS, dtype=torch.int32), q, scales)


def worst(got: torch.Tensor, truth: np.ndarray, plain: np.ndarray | None) -> tuple[float, float]:
    """Largest error, and the largest allowed: twice the plain computation's, plus two units of the dtype."""
    error = np.abs(got.double().cpu().numpy() - truth)
    unit = torch.finfo(got.dtype).eps * max(1.0, float(np.abs(truth).max(initial=0.0)))
    allowed = 2 * unit + (0.0 if plain is None else 2 * float(np.abs(plain - truth).max(initial=0.0)))
    return (float("inf") if np.isnan(error).any() else float(error.max(initial=0.0))), allowed


def worst_lse(got: torch.Tensor, truth: np.ndarray, dtype: torch.dtype) -> tuple[float, float]:
    """The same for log-sum-exp; the scores come from products of ``dtype``. Empty rows must be minus infinity."""
    values = got.double().cpu().numpy()
    if (np.isneginf(values) != np.isneginf(truth)).any():
        return float("inf"), 0.0
    finite = ~np.isneginf(truth)
    error = np.abs(values[finite] - truth[finite]).max(initial=0.0)
    return float(error), 4 * torch.finfo(dtype).eps * max(1.0, float(np.abs(truth[finite]).max(initial=0.0)))
