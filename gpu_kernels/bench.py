"""Decode bandwidth of this GPU's kernels as a share of its own device copy: ``python -m gpu_kernels.bench --json``.

::

    copy | decode | copy | decode | ...      30 alternating rounds, each timed with events between L2-flushing writes

A round's share is decode GB/s of K and V read over copy GB/s (read plus written); the median of the rounds is printed
with its quartiles, and the result is compared with torch's on the same data in the run that is timed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gpu_kernels.capability import capability_of
from gpu_kernels.decode import plan_decode

SHAPES = ((64, 4096), (8, 32_768))
GROUPS = (1, 4, 8)
PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
ROUNDS = 30
WARM_UP = 5
FLUSH_BYTES = 256_000_000  # more than the last-level cache of any GPU this runs on


@dataclass(frozen=True, slots=True)
class Result:
    """One shape. Bandwidths in GB/s (bytes per ns), shares as fractions; ``error`` is the largest, absolute."""

    device: str
    num_seqs: int
    seq_len: int
    group: int
    dtype: str
    decode_gb_s: float
    copy_gb_s: float
    share: float
    share_quartiles: tuple[float, float]
    error: float
    decode_ns: tuple[int, ...]
    copy_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.decode_ns or len(self.decode_ns) != len(self.copy_ns):
            raise ValueError(
                f"decode_ns, copy_ns: {len(self.decode_ns)} and {len(self.copy_ns)} samples are not paired"
            )


def timed(call: Callable[[], Any], device: torch.device, flush: torch.Tensor) -> int:
    """Nanoseconds of one call with a cold cache: GPU events, or the host clock for a dry run on the CPU."""
    flush.zero_()
    if device.type != "cuda":
        start = time.perf_counter_ns()
        call()
        return time.perf_counter_ns() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    after.synchronize()
    return max(1, round(before.elapsed_time(after) * 1e6))


def reference_error(
    out: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, pages: torch.Tensor, seq_len: int
) -> float:
    """Largest difference of one sequence's result from torch's in float32."""
    keys, values = (x[pages].transpose(0, 1).flatten(1, 2)[:, :seq_len].float() for x in (k_cache, v_cache))
    score = q.float().unflatten(0, (keys.shape[0], -1)) @ keys.transpose(1, 2) * q.shape[1] ** -0.5
    truth = (torch.softmax(score, -1) @ values).flatten(0, 1)
    return float((out.float() - truth).abs().max())


def measure(
    num_seqs: int, seq_len: int, group: int, device: torch.device, dtype: torch.dtype, rounds: int, flush_bytes: int,
    tile: tuple[int, int] | None = None,
) -> Result:  # fmt: skip
    """Time decode attention (in tiles of ``plan_decode``) and a copy of as many bytes, alternating."""
    per_seq = -(-seq_len // PAGE_SIZE)
    shape = (num_seqs * per_seq, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM)
    k, v = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    table = torch.randperm(shape[0]).int().view(num_seqs, per_seq)
    q = torch.randn(num_seqs, NUM_KV_HEADS * group, HEAD_DIM, dtype=dtype, device=device)
    plan = plan_decode(k, v, table, torch.full((num_seqs,), seq_len, dtype=torch.int32), q.shape[1], tile=tile)
    workspace, out, lse = plan.make_workspace(), torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    flush = torch.empty(flush_bytes, dtype=torch.uint8, device=device)
    copy = torch.empty_like(k)

    def decode() -> Any:
        return plan.run(q, k, v, out, lse, workspace=workspace)

    pairs = [
        (timed(decode, device, flush), timed(lambda: copy.copy_(v), device, flush))
        for _ in range(WARM_UP * (rounds > 1) + rounds)
    ][-rounds:]
    kv_bytes = 2 * num_seqs * seq_len * NUM_KV_HEADS * HEAD_DIM * k.element_size()
    speeds = [(kv_bytes / a, 2 * copy.nbytes / b) for a, b in pairs]
    shares = sorted(a / b for a, b in speeds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter: a dry run, not a measurement"
    return Result(
        name, num_seqs, seq_len, group, str(dtype).removeprefix("torch."),
        round(statistics.median(a for a, _ in speeds), 3), round(statistics.median(b for _, b in speeds), 3),
        round(statistics.median(shares), 4),
        (round(shares[len(shares) // 4], 4), round(shares[-1 - len(shares) // 4], 4)),
        reference_error(out[0], q[0], k, v, table[0].long().to(device), seq_len),
        tuple(a for a, _ in pairs), tuple(b for _, b in pairs),
    )  # fmt: skip


def results(dry_run: bool) -> Iterator[Result]:
    """All shapes on the GPU; a tiny one of each group in the interpreter."""
    device = torch.device("cpu" if dry_run else "cuda")
    dtype = capability_of(device).half
    for num_seqs, seq_len in ((2, 70),) if dry_run else SHAPES:
        for group in GROUPS:
            yield measure(
                num_seqs, seq_len, group, device, dtype, 1 if dry_run else ROUNDS, 1 if dry_run else FLUSH_BYTES
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_kernels.bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line, all samples included")
    parser.add_argument("--dry-run", action="store_true", help="the same flow in Triton's interpreter, tiny sizes")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("bench: no CUDA device; --dry-run with TRITON_INTERPRET=1 tries the flow without one", file=sys.stderr)
        return 2
    for result in results(options.dry_run):
        where = f"{result.num_seqs} x {result.seq_len}, group {result.group}, {result.dtype} on {result.device}"
        speed = f"{result.decode_gb_s:.0f} GB/s of {result.copy_gb_s:.0f} copied, share {result.share:.2f}"
        print(json.dumps(asdict(result)) if options.json else f"{where}: {speed}, error {result.error:.1e}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
