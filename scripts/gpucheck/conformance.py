"""Part b: every kernel on this device against the float64 oracle, bf16 included, and bit-equal on repeats."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpu_kernels
from cpu_kernels import KVPages, plan_decode
from cpu_kernels.pages import pack
from cpu_kernels.reference import merge_reference, prefill_reference
from scripts.gpucheck.cases import LENGTHS, Case, make_case, worst, worst_lse
from scripts.gpucheck.report import Budget, Report

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
REPEATS = 50
Row = tuple[str, float, float]


def run(report: Report, budget: Budget, dry_run: bool) -> int:
    """A row per case: name, largest error, largest allowed. The kernel tests come last, with what time is left."""
    cases = host_cases() if dry_run else cuda_cases()
    rows, failed = 0, 0
    for name, error, allowed in cases:
        rows += 1
        if not error <= allowed:
            failed += 1
        report.add("rows", {"case": name, "error": error, "allowed": allowed, "ok": error <= allowed})
        if budget.left < 3:
            report.put(cut_short=f"after {rows} cases")
            break
    report.put(cases=rows, failed=failed)
    tests_ok = True if dry_run else run_tests(report, budget)
    return report.done(failed == 0 and tests_ok)


def host_cases() -> Iterator[Row]:
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(dtype, 3, 64, 16, "cpu")
        out, lse = attend_on_cpu(case)
        truth, true_lse = case.truth()
        yield (f"decode {dtype}", *worst(out, truth, case.plain(0.125)))
        yield (f"decode {dtype} lse", *worst_lse(lse, true_lse, dtype))


def attend_on_cpu(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    num_pages, heads, page, dim = case.k_cache.shape
    name = next(n for n, d in DTYPES.items() if d is case.k_cache.dtype)
    pages = KVPages(num_pages, heads, dim, page, name)
    pack(pages, 0, list(range(num_pages)), case.k_cache.float().numpy(), case.v_cache.float().numpy())
    plan = plan_decode(pages, case.table, case.lens, case.q.shape[1])
    out, lse = torch.empty(case.q.shape), torch.empty(case.q.shape[:2])
    plan.run(case.q, out, lse)
    return out.to(case.q.dtype), lse


def cuda_cases(on: str = "cuda") -> Iterator[Row]:
    """All cases on a torch device (``cpu`` where Triton interprets)."""
    half = gpu_kernels.capability_of(torch.device(on)).bf16
    dtypes = [d for name, d in DTYPES.items() if half or name != "bf16"]
    yield from _merges(on)
    yield _repeats(dtypes[-1], on)
    yield from _int8(dtypes[-1], on)
    for dtype in reversed(dtypes):  # bf16 first: if time runs out, it has been seen
        yield from _decodes(dtype, on)
        yield from _prefills(dtype, on)
        yield from _fused(dtype, on)
        yield _packing(dtype, on)


def _decodes(dtype: torch.dtype, on: str) -> Iterator[Row]:
    options: dict[str, dict[str, Any]] = {
        "": {}, "window 33": {"window_left": 33}, "cap 30": {"logits_soft_cap": 30.0},
        "split 64": {"split_tokens": 64},
    }  # fmt: skip
    for group, dim, page in ((1, 64, 16), (4, 128, 64), (7, 128, 32), (8, 256, 16), (3, 80, 128), (71, 64, 32)):
        case = make_case(dtype, group, dim, page, on)
        for name, extra in options.items():
            out, lse = gpu_kernels.paged_decode_attention(
                case.q, case.k_cache, case.v_cache, case.table, case.lens, **extra
            )
            truth, true_lse = case.truth(**{k: v for k, v in extra.items() if k != "split_tokens"})
            label = f"decode {dtype} group {group} dim {dim} page {page} {name}".rstrip()
            yield (label, *worst(out, truth, case.plain(dim**-0.5)))
            yield (label + " lse", *worst_lse(lse, true_lse, dtype))
    yield from _biased(dtype, on)


def _biased(dtype: torch.dtype, on: str) -> Iterator[Row]:
    case = make_case(dtype, 4, 128, 16, on)
    slopes, sinks = (torch.linspace(a, b, 8) for a, b in ((0.01, 0.5), (-1.0, 2.0)))
    for name, values in (("alibi_slopes", slopes), ("sinks", sinks)):
        out, _ = gpu_kernels.paged_decode_attention(
            case.q, case.k_cache, case.v_cache, case.table, case.lens, **{name: values.to(on)}
        )
        yield (f"decode {dtype} {name}", *worst(out, case.truth(**{name: values.numpy()})[0], case.plain(128**-0.5)))


def _int8(dtype: torch.dtype, on: str) -> Iterator[Row]:
    for group in (1, 4):
        case = make_case(dtype, group, 128, 32, on, torch.int8)
        out, _ = gpu_kernels.paged_decode_attention(
            case.q, case.k_cache, case.v_cache, case.table, case.lens, **case.scales
        )
        yield (f"decode int8 {dtype} group {group}", *worst(out, case.truth()[0], case.plain(128**-0.5)))


def _prefills(dtype: torch.dtype, on: str) -> Iterator[Row]:
    for (group, dim), window in itertools.product(((1, 64), (4, 128)), (-1, 40)):
        case = make_case(dtype, group, dim, 16, on)
        counts = [min(33, n) for n in LENGTHS]
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
        q = torch.randn(int(starts[-1]), 2 * group, dim, generator=torch.Generator().manual_seed(1)).to(case.q)
        out, _ = gpu_kernels.prefill_attention(
            q, case.k_cache, case.v_cache, case.table, starts, case.lens, window_left=window
        )
        truth = np.concatenate([_prefill_truth(case, q, starts, row, window) for row in range(len(LENGTHS))])
        plain = case.plain(dim**-0.5) - case.truth()[0]  # how far plain products are off with these keys
        off = 2 * float(np.abs(plain).max())
        error, allowed = worst(out, truth, None)
        yield f"prefill {dtype} group {group} dim {dim} window {window}", error, allowed + off


def _prefill_truth(case: Case, q: torch.Tensor, starts: torch.Tensor, row: int, window: int) -> np.ndarray:
    length, page = LENGTHS[row], case.k_cache.shape[2]
    ids = case.table[row, : -(-length // page)].long().numpy()
    k, v = (np.swapaxes(x[ids], 1, 2).reshape(-1, x.shape[1], x.shape[3])[:length] for x in case.keys())
    rows = q[int(starts[row]) : int(starts[row + 1])].double().cpu().numpy()
    return prefill_reference(rows, k, v, window_left=window)[0]


def _packing(dtype: torch.dtype, on: str) -> Row:
    """Pages packed on the card against those that the CPU packs: equal bytes; and back again."""
    draw = torch.Generator().manual_seed(2)
    k, v = (torch.randn(3, 2, 32, 128, generator=draw).to(dtype) for _ in range(2))
    name = next(n for n, d in DTYPES.items() if d is dtype)
    pages = KVPages(3, 2, 128, 32, name)
    pack(pages, 0, [0, 1, 2], k.float().numpy(), v.float().numpy())
    ids = torch.arange(3, device=on)
    blocks = gpu_kernels.pack_for_cpu(k.to(on), v.to(on), ids)
    back_k, back_v = torch.empty_like(k, device=on), torch.empty_like(v, device=on)
    gpu_kernels.unpack_from_cpu(blocks, back_k, back_v, ids)
    wrong = int((blocks.cpu() != torch.from_numpy(pages.buffer[0])).sum())
    wrong += int((back_k.cpu() != k).sum() + (back_v.cpu() != v).sum())
    return f"pack and unpack {dtype}", float(wrong), 0.0


def _fused(dtype: torch.dtype, on: str) -> Iterator[Row]:
    draw = torch.Generator().manual_seed(3)
    x, residual, weight = (torch.randn(*n, generator=draw).to(dtype) for n in ((17, 4096), (17, 4096), (4096,)))
    total = (x.double() + residual.double()).to(dtype).double()
    want = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = gpu_kernels.rms_norm(x.to(on), weight.to(on), 1e-5, residual=residual.to(on))
    yield (f"rms_norm with residual {dtype}", *worst(got, want.numpy(), None))
    gate_up = torch.randn(17, 2 * 1536, generator=draw).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    want = gate / (1 + (-gate).exp()) * up
    yield (f"silu_mul {dtype}", *worst(gpu_kernels.silu_mul(gate_up.to(on)), want.numpy(), None))
    q, at = torch.randn(17, 8, 128, generator=draw).to(dtype), torch.arange(17) * 5
    angle = torch.arange(100).double()[:, None] * 10000.0 ** (-torch.arange(64).double() / 64)
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = q.double().chunk(2, -1)
    c, s = cos[at][:, None].double(), sin[at][:, None].double()
    want = torch.cat([a * c - b * s, b * c + a * s], -1)
    yield (f"rope {dtype}", *worst(gpu_kernels.rope(q.to(on), cos.to(on), sin.to(on), at.to(on)), want.numpy(), None))


def _merges(on: str) -> Iterator[Row]:
    draw = torch.Generator().manual_seed(4)
    outs = [torch.randn(9, 4, 64, generator=draw) for _ in range(2)]
    lses = [torch.randn(9, 4, generator=draw) for _ in range(2)]
    lses[1][3] = -torch.inf
    outs[1][3] = 0
    got, lse = gpu_kernels.merge_state(outs[0].to(on), lses[0].to(on), outs[1].to(on), lses[1].to(on))
    want, true_lse = merge_reference([x.numpy() for x in outs], [x.numpy() for x in lses])
    yield ("merge_state", *worst(got, want, None))
    yield ("merge_state lse", *worst(lse, true_lse, None))
    yield "merge_state with an empty part", float((got[3].cpu() != outs[0][3]).sum()), 0.0


def _repeats(dtype: torch.dtype, on: str) -> Row:
    case = make_case(dtype, 4, 128, 16, on)
    attend: Callable[[], torch.Tensor] = lambda: gpu_kernels.paged_decode_attention(  # noqa: E731
        case.q, case.k_cache, case.v_cache, case.table, case.lens, split_tokens=64
    )[0]
    first = attend()
    return (
        f"{REPEATS} repeats bit-equal {dtype}",
        float(sum(not torch.equal(attend(), first) for _ in range(REPEATS))),
        0.0,
    )


def run_tests(report: Report, budget: Budget) -> bool:
    """The kernel package's own tests, compiled for this card."""
    if importlib.util.find_spec("pytest") is None:
        report.put(tests="pytest is not installed here")
        return True
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", str(root / "tests/gpu_kernels"), "-o", "addopts=", "-q", "-x",
               "--import-mode=importlib", "-p", "no:cacheprovider", "-m", "not slow and not bench"]  # fmt: skip
    try:
        done = subprocess.run(command, cwd=root, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True,
                              text=True, timeout=max(5.0, budget.left))  # fmt: skip
    except subprocess.TimeoutExpired as error:
        report.put(tests="cut off by the time budget", tests_tail=_tail(error.stdout))
        return True
    report.put(tests=f"exit status {done.returncode}", tests_tail=_tail(done.stdout))
    return done.returncode == 0


def _tail(text: str | bytes | None) -> list[str]:
    plain = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
    return plain.splitlines()[-25:]
