"""What only a GPU can show: bf16 at size, races (many repeats, bit-equal), several streams at once, big shapes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gpu_kernels as g

pytestmark = pytest.mark.gpu


def big_batch(seqs: int, length: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A cache of random pages, every sequence with its own, in a random order."""
    per_seq = -(-length // 32)
    caches = [torch.randn(seqs * per_seq, 8, 32, 128, device=device, dtype=dtype) for _ in range(2)]
    table = torch.randperm(seqs * per_seq).int().view(seqs, per_seq)
    return *caches, table, torch.full((seqs,), length, dtype=torch.int32)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_big_decode_matches_torch(device: torch.device, dtype: torch.dtype, group: int) -> None:
    k, v, table, lens = big_batch(8, 8192, device, dtype)
    q = torch.randn(8, 8 * group, 128, device=device, dtype=dtype)
    out, lse = g.paged_decode_attention(q, k, v, table, lens)
    for row in range(8):
        keys, values = (x[table[row].long()].transpose(0, 1).reshape(8, -1, 128).double() for x in (k, v))
        score = q[row].double().view(8, group, 128) @ keys.transpose(1, 2) * 128**-0.5
        truth = (torch.softmax(score, -1) @ values).view(-1, 128)
        assert (out[row].double() - truth).abs().max() < 4 * torch.finfo(dtype).eps
        assert torch.allclose(lse[row].double(), torch.logsumexp(score, -1).view(-1), atol=1e-3)


def test_many_runs_are_bit_equal(device: torch.device) -> None:
    k, v, table, lens = big_batch(16, 2000, device, torch.bfloat16)
    q = torch.randn(16, 32, 128, device=device, dtype=torch.bfloat16)
    plan = g.plan_decode(k, v, table, lens, 32, split_tokens=128)
    out, lse = plan.run(q, k, v)
    starts = torch.arange(17, dtype=torch.int32)
    chunk = g.plan_prefill(k, v, table, starts, lens, 32)
    tile, tile_lse = chunk.run(q, k, v)
    for _ in range(300):
        again, lse_again = plan.run(q, k, v, workspace=plan.make_workspace().fill_(torch.nan))
        assert torch.equal(out, again) and torch.equal(lse, lse_again)
        again, lse_again = chunk.run(q, k, v)
        assert torch.equal(tile, again) and torch.equal(tile_lse, lse_again)


def test_one_plan_on_two_streams(device: torch.device) -> None:
    k, v, table, lens = big_batch(16, 2000, device, torch.bfloat16)
    queries = [torch.randn(16, 32, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
    plan = g.plan_decode(k, v, table, lens, 32, split_tokens=128)
    want = [plan.run(q, k, v)[0] for q in queries]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    workspaces = [plan.make_workspace() for _ in range(2)]
    for _ in range(50):
        got = []
        for q, stream, workspace in zip(queries, streams, workspaces, strict=True):
            with torch.cuda.stream(stream):
                got.append(plan.run(q, k, v, workspace=workspace)[0])
        torch.cuda.synchronize()
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_append_and_pack_of_a_whole_pool(device: torch.device) -> None:
    rows = torch.randn(65_536, 8, 128, device=device, dtype=torch.bfloat16)
    caches = [torch.zeros(2048, 8, 32, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.randperm(65_536).to(device)
    g.append_kv(rows, -rows, *caches, slots)
    assert torch.equal(caches[0][slots // 32, :, slots % 32], rows) and torch.equal(caches[0], -caches[1])
    ids = torch.randperm(2048, device=device)
    copies = [torch.zeros_like(x) for x in caches]
    g.unpack_from_cpu(g.pack_for_cpu(*caches, ids), *copies, ids)
    assert torch.equal(copies[0], caches[0]) and torch.equal(copies[1], caches[1])


def test_long_prefill_matches_torch(device: torch.device) -> None:
    length, group = 3000, 4
    k, v, table, lens = big_batch(1, length, device, torch.bfloat16)
    q = torch.randn(length, 8 * group, 128, device=device, dtype=torch.bfloat16)
    out, _ = g.prefill_attention(q, k, v, table, torch.tensor([0, length], dtype=torch.int32), lens)
    keys, values = (x[table[0].long()].transpose(0, 1).reshape(8, -1, 128)[:, :length].float() for x in (k, v))
    for head in (0, 13, 31):
        score = q[:, head].float() @ keys[head // group].T * 128**-0.5
        score = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -torch.inf)
        truth = torch.softmax(score, -1) @ values[head // group]
        assert (out[:, head].float() - truth).abs().max() < 2e-2


def test_bf16_int8_cache(make_batch: Callable[..., Any], device: torch.device) -> None:
    batch = make_batch([577, 1, 0, 257], 2, 128, 32, torch.int8)
    q = torch.randn(4, 14, 128, device=device, dtype=torch.bfloat16)
    out, _ = g.paged_decode_attention(q, *batch.tensors(), **batch.scales)
    truth, _ = batch.decode_truth(q)
    assert np.abs(out.double().cpu().numpy() - truth).max() < 2e-2
