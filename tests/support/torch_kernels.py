"""The launchers of ``gpu_kernels`` in plain torch, with the arguments that the framework gives them.

They let the stages of a CUDA card run quickly on the CPU. That the real launchers take the same calls is shown by the
test that runs the same stages through Triton's interpreter.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import wraps

import torch

import cpu_kernels
from cpu_kernels.layout import Layout, pack_k, pack_v, unpack_k, unpack_v
from gpu_kernels import Calls, DecodeIntegers, do, kept  # noqa: F401  # what is no launcher is the same

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "int8"}
NAMES[torch.float8_e4m3fn] = "fp8"
DEFAULT_SPLIT_TOKENS = 16


def launcher(function):
    """Kept where launches are kept."""

    @wraps(function)
    def call(*args, **kwargs):
        made = deque(maxlen=1)
        do(lambda: made.append(function(*args, **kwargs)))
        return made[0]

    return call


class capability_of:  # noqa: N801  # stands for the launcher of that name
    def __init__(self, device):
        pass

    def refuse_dtype(self, name, dtype):
        pass


@launcher
def rms_norm(x, weight, eps, *, residual=None, out=None):
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()
    made = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
    return made if out is None else out.copy_(made)


@launcher
def rope(x, cos, sin, positions, *, check_ids):
    half = cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    x[..., :half], x[..., half : 2 * half] = a * c - b * s, b * c + a * s
    return x


@launcher
def silu_mul(gate_up, *, out=None):
    gate, up = gate_up.float().chunk(2, -1)
    made = (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
    return made if out is None else out.copy_(made)


@launcher
def append_kv(k, v, k_cache, v_cache, slot_mapping, *, check_ids, k_scale=None, v_scale=None):
    rows = torch.nonzero(slot_mapping >= 0).flatten()
    page, inside = slot_mapping[rows] // k_cache.shape[2], slot_mapping[rows] % k_cache.shape[2]
    for x, cache, scales in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        values = x[rows].float()
        if scales is not None:
            fp8 = cache.dtype is torch.float8_e4m3fn
            scale = values.abs().amax(-1) / (448 if fp8 else 127)
            scale = torch.exp2(torch.log2(scale).ceil()) if fp8 else scale
            scales[page, :, inside] = scale
            values = torch.where(scale[..., None] > 0, values / scale[..., None], 0.0)
            values = values if fp8 else values.round()
        cache[page, :, inside] = values.to(cache.dtype)


def _keys(cache, scales, table, count):
    """[count, num_kv_heads, head_dim] float32 of one sequence."""
    pages = table[: -(-count // cache.shape[2])].long()
    x = cache[pages].float()
    if scales is not None:
        x = x * scales[pages][..., None]
    return x.transpose(1, 2).flatten(0, 1)[:count]


def _attend(q, k, v, scale, window_left, first):
    """q [n, heads, dim] at the positions from ``first`` on, counted from the first key; out and lse."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    distance = torch.arange(first, first + len(q))[:, None] - torch.arange(len(k))[None]
    allowed = distance >= 0 if window_left < 0 else (distance >= 0) & (distance <= window_left)
    scores = scores.masked_fill(~allowed, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v).to(q.dtype)
    return out, scores.logsumexp(-1).T


class _Plan:
    def __init__(self, table, starts, lens, q_dtype, sm_scale, window_left, key_start, query_pos):
        self.table, self.starts, self.lens = table.clone(), starts, lens.tolist()
        counts = torch.as_tensor(starts).diff()
        begin = torch.zeros_like(counts) if key_start is None else key_start
        self.first = (lens - counts if query_pos is None else query_pos - begin).tolist()
        self.q_dtype, self.scale, self.window_left = q_dtype, sm_scale, window_left
        seen = [n if window_left < 0 else min(n, window_left + 1) for n in self.lens]
        self.workspace_size = sum(seen)  # more keys, more partial results

    def make_workspace(self):
        return torch.empty(self.workspace_size)

    def run(self, q, k_cache, v_cache, out=None, *, k_scale=None, v_scale=None, workspace=None):
        assert q.dtype is self.q_dtype and (workspace is None or workspace.numel() >= self.workspace_size)
        out, lse = torch.empty_like(q) if out is None else out, torch.empty(q.shape[:2])
        for i, length in enumerate(self.lens):
            rows = slice(self.starts[i], self.starts[i + 1])
            k, v = (_keys(c, s, self.table[i], length) for c, s in ((k_cache, k_scale), (v_cache, v_scale)))
            out[rows], lse[rows] = _attend(q[rows], k, v, self.scale, self.window_left, self.first[i])
        return out, lse


@dataclass(frozen=True)
class _Resident:
    """A decode plan over integers that change under it. Looks at all that the kernels would look at."""

    integers: DecodeIntegers
    num_seqs: int
    num_parts: int
    q_dtype: torch.dtype
    scale: float
    workspace_size: int = 1

    def run(self, *args, **kwargs):
        do(self._run, *args, **kwargs)

    def _run(self, q, k_cache, v_cache, out, lse, *, k_scale=None, v_scale=None, workspace=None):
        assert q.dtype is self.q_dtype and len(q) == self.num_seqs
        mine = self.integers
        starts, spans = mine.part_start.tolist(), mine.spans.tolist()
        items = list(zip(mine.item_seq.tolist(), mine.item_split.tolist(), strict=True))
        assert starts[self.num_seqs] <= self.num_parts <= len(items)
        direct = self.num_parts == self.num_seqs
        for i in range(self.num_seqs):
            begin, end, position = spans[i]
            splits = [split for seq, split in items[starts[i] : starts[i + 1]] if seq == i]
            first = begin // DEFAULT_SPLIT_TOKENS
            want = list(range(first, max(-(-end // DEFAULT_SPLIT_TOKENS), first + 1)))
            assert splits == want and (len(want) == 1 or not direct), (splits, want, spans[i])
            assert position == max(end - 1, 0)
            k, v = (_keys(c, s, mine.block_table[i], end)[begin:] for c, s in ((k_cache, k_scale), (v_cache, v_scale)))
            row = slice(i, i + 1)
            out[row], lse[row] = _attend(q[row], k, v, self.scale, -1, len(k) - 1)
        for seq, split in items[starts[self.num_seqs] : self.num_parts]:
            assert split * DEFAULT_SPLIT_TOKENS >= spans[seq][1], "an item behind those of the rows finds keys"


def plan_resident(k_cache, v_cache, integers, num_q_heads, *, split_tokens, q_dtype, sm_scale, tile=None):
    assert split_tokens == DEFAULT_SPLIT_TOKENS
    return _Resident(integers, len(integers.spans), len(integers.item_seq), q_dtype, sm_scale)


def plan_prefill(
    k_cache, v_cache, block_table, starts, seq_lens, num_q_heads, *, key_start=None, query_pos=None, **options
):
    return _Plan(block_table, starts.tolist(), seq_lens, key_start=key_start, query_pos=query_pos, **options)


def merge_state(out_a, lse_a, out_b, lse_b, out, lse):
    merged = cpu_kernels.merge_state(out_a, lse_a, out_b, lse_b)
    out.copy_(merged[0])
    lse.copy_(merged[1])


def _parts(k_cache, v_cache, k_scale, v_scale):
    layout = Layout(NAMES[k_cache.dtype], k_cache.shape[3], k_cache.shape[2])
    return layout, ((k_cache, pack_k, unpack_k, 0), (v_cache, pack_v, unpack_v, 1)), (k_scale, v_scale)


def _bits(x):
    if x.dtype is torch.float8_e4m3fn:
        return x.view(torch.uint8).numpy()
    return x.view(torch.int16).numpy().view("uint16") if x.dtype is torch.bfloat16 else x.numpy()


def pack_for_cpu(k_cache, v_cache, page_ids, out, *, check_ids, k_scale=None, v_scale=None):
    layout, parts, scales = _parts(k_cache, v_cache, k_scale, v_scale)
    for cache, pack, _, which in parts:
        block = torch.from_numpy(pack(_bits(cache[page_ids]), layout).view("uint8"))
        out[..., which * layout.k_bytes : (which + 1) * layout.k_bytes] = block
        if scales[which] is not None:
            at = 2 * layout.k_bytes + which * 4 * layout.page_size
            out[..., at : at + 4 * layout.page_size] = scales[which][page_ids].view(torch.uint8)
    return out


def unpack_from_cpu(blocks, k_cache, v_cache, page_ids, *, check_ids, k_scale=None, v_scale=None):
    layout, parts, scales = _parts(k_cache, v_cache, k_scale, v_scale)
    for cache, _, unpack, which in parts:
        block = blocks[..., which * layout.k_bytes : (which + 1) * layout.k_bytes].contiguous().numpy()
        plain = torch.from_numpy(unpack(block.view(layout.numpy_dtype), layout).view("uint8")).view(cache.dtype)
        cache[page_ids] = plain.view(len(page_ids), *cache.shape[1:])
        if scales[which] is not None:
            at = 2 * layout.k_bytes + which * 4 * layout.page_size
            scales[which][page_ids] = blocks[..., at : at + 4 * layout.page_size].contiguous().view(torch.float32)


def _layers(copy, k_cache, v_cache, page_ids, blocks, block_ids, scales):
    for i in range(len(k_cache)):
        copy(blocks[i], k_cache[i], v_cache[i], page_ids, block_ids, {name: s[i] for name, s in scales.items()})


def _down(blocks, k, v, ids, homes, scales):
    blocks[homes] = pack_for_cpu(k, v, ids, torch.empty_like(blocks[homes]), check_ids=False, **scales)


def copy_down(k_cache, v_cache, page_ids, blocks, block_ids, **scales):
    _layers(_down, k_cache, v_cache, page_ids, blocks, block_ids, scales)


def _up(blocks, k, v, ids, homes, scales):
    unpack_from_cpu(blocks[homes], k, v, ids, check_ids=False, **scales)


def copy_up(k_cache, v_cache, page_ids, blocks, block_ids, **scales):
    _layers(_up, k_cache, v_cache, page_ids, blocks, block_ids, scales)
