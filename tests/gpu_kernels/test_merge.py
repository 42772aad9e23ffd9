"""The central claim: however the keys are split, merging the parts equals the whole."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpu_kernels.reference import attend
from gpu_kernels import merge_state, merge_states, paged_decode_attention

NONE = -torch.inf


def parts(num: int, device: torch.device, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    outs = [torch.randn(3, 5, 32, generator=draw).to(device) for _ in range(num)]
    return outs, [torch.randn(3, 5, generator=draw).mul(4).to(device) for _ in range(num)]


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(1, 90),
    cuts=st.lists(st.integers(0, 90), max_size=4),
    order=st.randoms(use_true_random=False),
    empties=st.integers(0, 2),
    kernels=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_any_split_of_the_keys_merges_to_the_whole(
    make_batch: Callable[..., Any], device: torch.device, length: int, cuts: list[int], order: Any, empties: int,
    kernels: list[bool],
) -> None:  # fmt: skip
    """Each part is computed by the decode kernel or by the oracle; the order of merging is drawn as well."""
    q = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(length)).to(device)
    edges = [0, *sorted(min(cut, length) for cut in cuts), length]
    spans = [*zip(edges[:-1], edges[1:], strict=True), *[(0, 0)] * empties]
    whole = make_batch([length], 2, 32, seed=length)
    k, v = whole.keys(0)
    outs, lses = [], []
    for (begin, end), by_kernel in zip(spans, kernels, strict=False):
        if by_kernel:
            cache = make_batch([end - begin], 2, 32)
            for rows, target in ((k, cache.k_cache), (v, cache.v_cache)):
                for i in range(begin, end):
                    page = int(cache.block_table[0, (i - begin) // 16])
                    target[page, :, (i - begin) % 16] = torch.from_numpy(rows[i]).to(target)
            out, lse = paged_decode_attention(q, *cache.tensors())
        else:
            answer = attend(q[0].double().cpu().numpy(), k[begin:end], v[begin:end], end - begin - 1)
            out, lse = (torch.from_numpy(x).float()[None].to(device) for x in answer)
        outs.append(out)
        lses.append(lse)
    places = list(range(len(outs)))
    order.shuffle(places)
    out, lse = merge_states([outs[i] for i in places], [lses[i] for i in places])
    truth, lse_truth = whole.decode_truth(q)
    assert np.allclose(out.cpu().numpy(), truth, atol=3e-6)
    assert np.allclose(lse.cpu().numpy(), lse_truth, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_an_empty_part_changes_nothing(device: torch.device, dtype: torch.dtype) -> None:
    (a, b), (lse_a, lse_b) = parts(2, device)
    a, b = a.to(dtype), b.to(dtype)
    a[0, 0, 0] = -0.0
    lse_b[:2] = NONE
    b[:2] = torch.nan  # the values of an empty part don't matter
    for out, lse in (merge_state(a, lse_a, b, lse_b), merge_state(b, lse_b, a, lse_a)):
        assert torch.equal(out[:2].view(torch.uint8), a[:2].view(torch.uint8)) and torch.equal(lse[:2], lse_a[:2])
        assert not torch.equal(out[2], a[2])


def test_writes_in_place_and_through_strides(device: torch.device) -> None:
    (a, b), (lse_a, lse_b) = parts(2, device)
    want, want_lse = merge_state(a, lse_a, b, lse_b)
    wide = torch.zeros(3, 10, 32, device=device)
    wide[:, 5:] = a
    got, got_lse = merge_state(wide[:, 5:], lse_a, b, lse_b, wide[:, 5:], lse_a)
    assert torch.equal(got, want) and torch.equal(got_lse, want_lse)
    assert torch.equal(wide[:, 5:], want) and torch.all(wide[:, :5] == 0) and got_lse is lse_a


def test_refuses(device: torch.device) -> None:
    (a, b), (lse_a, lse_b) = parts(2, device)
    for message, arguments in (
        ("out_b: shape", (a, lse_a, b[:2], lse_b)),
        ("out_b: dtype", (a, lse_a, b.half(), lse_b)),
        ("lse_b: dtype", (a, lse_a, b, lse_b.double())),
        ("lse_a: shape", (a, lse_a[:, :2], b, lse_b)),
        ("out_a: 24 is not supported", (a[..., :24], lse_a, b[..., :24], lse_b)),
        ("out_a: shape", (a[0], lse_a, b, lse_b)),
    ):
        with pytest.raises(ValueError, match=message):
            merge_state(*arguments)
    with pytest.raises(ValueError, match="outs: 0 parts"):
        merge_states([], [])
    with pytest.raises(ValueError, match="lse_b: strides"):
        merge_state(a, lse_a, b, lse_b.T.contiguous().T)


def test_parts_may_come_stacked(device: torch.device) -> None:
    outs, lses = parts(2, device)
    one_by_one, stacked = merge_states(outs, lses), merge_states(torch.stack(outs), torch.stack(lses))
    assert all(torch.equal(a, b) for a, b in zip(one_by_one, stacked, strict=True))
