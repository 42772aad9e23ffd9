"""Appending tokens: every slot in its place, nothing else touched, int8 codes and scales by the stated rule."""

import numpy as np
import pytest
import torch

import cpu_kernels
from gpu_kernels import append_kv, pack_for_cpu

TYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def tokens(count: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(count, heads, dim, generator=draw).to(dtype).to(device) for _ in range(2)]


@pytest.mark.parametrize("store", TYPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "dim", "page"), [(3, 80, 16), (5, 16, 128), (8, 64, 32)])
def test_rows_land_in_their_slots(
    device: torch.device, dtype: torch.dtype, store: torch.dtype, heads: int, dim: int, page: int
) -> None:
    k, v = tokens(5, heads, dim, dtype, device)
    k_cache, v_cache = (torch.full((4, heads, page, dim), 7.0, dtype=store, device=device) for _ in range(2))
    slots = torch.tensor([4 * page - 1, 0, -1, page, page + 5], device=device)
    append_kv(k, v, k_cache, v_cache, slots)
    for rows, cache in ((k, k_cache), (v, v_cache)):
        want = torch.full_like(cache, 7.0)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want[slot // page, :, slot % page] = rows[row].to(store)
        assert torch.equal(cache, want)


@pytest.mark.parametrize("dtype", TYPES)
def test_int8_codes_are_within_half_a_step(device: torch.device, dtype: torch.dtype) -> None:
    k, v = tokens(6, 5, 48, dtype, device)
    k[1], v[2] = k[1] * 1e-3, 0.0
    k_cache, v_cache = (torch.zeros(2, 5, 16, 48, dtype=torch.int8, device=device) for _ in range(2))
    scales = [torch.full((2, 5, 16), torch.nan, device=device) for _ in range(2)]
    slots = torch.tensor([31, 0, 5, -1, 16, 17], device=device)
    append_kv(k, v, k_cache, v_cache, slots, k_scale=scales[0], v_scale=scales[1])
    for rows, cache, scale in ((k, k_cache, scales[0]), (v, v_cache, scales[1])):
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            at = (slot // 16, slice(None), slot % 16)
            largest = rows[row].float().abs().amax(-1)
            assert torch.equal(scale[at], largest / 127)
            error = (cache[at].float() * scale[at][:, None] - rows[row].float()).abs()
            assert torch.all(error <= scale[at][:, None] * 0.50001)
            assert torch.all(cache[at].abs().amax(-1) == torch.where(largest > 0, 127, 0))
        assert int(torch.isfinite(scale).sum()) == 5 * 5


def test_fp8_codes_and_scales_are_those_of_the_cpu_package(device: torch.device) -> None:
    """Largest values of every size, ties, subnormal codes, zeros, infinities and NaN."""
    draw = torch.Generator().manual_seed(9)
    k, v = (torch.randn(9, 2, 32, generator=draw) * 10.0 ** torch.arange(-36, 36, 8)[:, None, None] for _ in range(2))
    k[0, 0, :5] = torch.tensor([448.0, 0.0, torch.nan, -torch.inf, 1e-3])
    k[1], v[2, 1, :3] = 0.0, torch.tensor([448.0, 2.0**-10, 3 * 2.0**-10])
    caches = [torch.zeros(1, 2, 16, 32, dtype=torch.float8_e4m3fn, device=device) for _ in range(2)]
    scales = {name: torch.zeros(1, 2, 16, device=device) for name in ("k_scale", "v_scale")}
    append_kv(k.to(device), v.to(device), *caches, torch.arange(9, device=device), **scales)
    own = cpu_kernels.KVPages(1, 2, 32, 16, "fp8", huge_pages=False)
    cpu_kernels.append_kv(own, 0, k.numpy(), v.numpy(), np.arange(9))
    blocks = pack_for_cpu(*caches, torch.zeros(1, dtype=torch.int32, device=device), **scales)
    assert np.array_equal(blocks.cpu().numpy().reshape(-1), own.buffer.reshape(-1))


def test_reads_views_of_a_fused_matrix(device: torch.device) -> None:
    fused = torch.randn(3, 6, 32, device=device)
    caches = [torch.zeros(1, 2, 16, 32, device=device) for _ in range(2)]
    append_kv(fused[:, 2:4], fused[:, 4:], *caches, torch.tensor([0, 1, 2], device=device))
    assert torch.equal(caches[0][0, :, :3], fused[:, 2:4].transpose(0, 1))
    assert torch.equal(caches[1][0, :, :3], fused[:, 4:].transpose(0, 1))


def test_refuses(device: torch.device) -> None:
    k, v = tokens(3, 2, 32, torch.float32, device)
    caches = [torch.zeros(2, 2, 16, 32, device=device) for _ in range(2)]

    def slots(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    for message, arguments in (
        ("slot_mapping: row 1 names slot 32; slots go from 0 to 31", (k, v, *caches, slots(0, 32, 1))),
        ("slot_mapping: row 2 names slot -2", (k, v, *caches, slots(0, 3, -2))),
        (r"slot_mapping: slot 4 is named by rows \[0, 2\]", (k, v, *caches, slots(4, 3, 4))),
        ("slot_mapping: dtype torch.float32", (k, v, *caches, slots(0, 1, 2).float())),
        (r"k: shape \(3, 2, 32\) is not the needed \(2, 2, 32\)", (k, v, *caches, slots(0, 1))),
        ("v: dtype", (k, v.half(), *caches, slots(0, 1, 2))),
        ("k_scale, v_scale: an int8 cache", (k, v, *[c.to(torch.int8) for c in caches], slots(0, 1, 2))),
    ):
        with pytest.raises(ValueError, match=message):
            append_kv(*arguments)
    assert all(torch.all(cache == 0) for cache in caches)


def test_two_skipped_rows_are_no_duplicate(device: torch.device) -> None:
    k, v = tokens(3, 2, 32, torch.float32, device)
    caches = [torch.zeros(2, 2, 16, 32, device=device) for _ in range(2)]
    append_kv(k, v, *caches, torch.tensor([-1, -1, 2], device=device))
    assert torch.equal(caches[0][0, :, 2], k[2]) and int((caches[0] != 0).sum()) == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_no_tokens_are_appended_as_nothing(device: torch.device, dtype: torch.dtype) -> None:
    caches = [torch.full((2, 2, 16, 32), 7, dtype=dtype, device=device) for _ in range(2)]
    scales = {name: torch.ones(2, 2, 16, device=device) for name in ("k_scale", "v_scale")}
    none, slots = torch.empty(0, 2, 32, device=device), torch.empty(0, dtype=torch.int64, device=device)
    fused, odd = torch.empty(5, 6, 32, device=device), torch.empty(32, 2, 0, device=device).permute(2, 1, 0)
    for k, v in ((none, none), (fused[5:, 2:4], fused[:0, 4:]), (odd, odd)):
        append_kv(k, v, *caches, slots, **(scales if dtype is torch.int8 else {}))
    assert all(torch.all(cache == 7) for cache in caches)
    with pytest.raises(ValueError, match=r"k: shape \(0, 2, 32\) is not the needed \(1, 2, 32\)"):
        append_kv(none, none, *caches, torch.tensor([0], device=device))
