"""What a card's primitives cost: ``python -m hybridattn.calibration.card --out FILE``, half a minute on a new machine.

One JSON line for each as it is known; FILE is a profile of the link, which experiments take (``hardware.link=FILE``),
with the other prices beside it. Without ``--out`` it becomes the profile of this machine's card, and the engine takes
from it the tile of the decode kernel that was fastest. ``--dry-run`` goes the same way where nothing is a card, and
writes no profile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpu_kernels.bench
from cpu_kernels import KVPages, plan_decode
from cpu_kernels.memory import available_bytes
from gpu_kernels.capability import capability_of
from gpu_kernels.config import tiles_of
from hybridattn.core.errors import InputError
from hybridattn.core.op import D2H, GPU
from hybridattn.cost.here import TILE, card_path
from hybridattn.cost.profile import Profile, Quantity, save_profile
from hybridattn.cost.roofline import Efficiency
from hybridattn.devices.bench import NullRuntime
from hybridattn.devices.cuda import CudaDevice
from hybridattn.devices.cuda_presence import why_no_cuda

COPY_BYTES, LOCKED_BYTES = 64 << 20, 10**10
CALLS, HANDOVERS = 500, 40
WAIT_S = 2.0
TILE_SEQS, TILE_TOKENS, TILE_GROUP, TILE_ROUNDS = 32, 4096, 4, 7

Priced = tuple[str, Quantity]


def prices(device: CudaDevice, copy_bytes: int = COPY_BYTES, locked_bytes: int = LOCKED_BYTES) -> Iterator[Priced]:
    """Every primitive in turn, the quick ones first."""
    runtime, stream = device.runtime, device.stream(GPU)
    yield (
        "event",
        _called(CALLS, lambda: runtime.record(runtime.event(), stream), "a record of an event, in the driver"),
    )
    tensor = torch.zeros(16, device=device.torch_device)
    with device.on(GPU):
        (replay,) = runtime.capture(stream, [partial(_add_one, tensor)])
        yield "replay", _called(CALLS, replay, "a replay of a graph of one kernel, in the driver")
    for way in ("host_call", "bell"):
        if way == "bell" and device.handover != "bell" or way == "host_call" and runtime.why_no_host_call():
            continue
        for state, rest_s in (("awake", 0.0), ("asleep", 0.01)):
            yield f"{way}_{state}", _handover(device, way, rest_s)
    yield from _copies(device, copy_bytes)
    yield "register", _registered(device, min(locked_bytes, (available_bytes() or locked_bytes) // 4))


def _add_one(tensor: torch.Tensor) -> None:
    tensor += 1.0


def _ns(values: Sequence[float], what: str) -> Quantity:
    return Quantity(max(1.0, statistics.median(values)), "ns", "measured", f"median of {len(values)}: {what}")


def _called(count: int, call: Callable[[], Any], what: str) -> Quantity:
    """What one call takes, as the median over ten runs of calls."""
    means = []
    for _ in range(10):
        start = time.perf_counter_ns()
        for _ in range(count // 10):
            call()
        means.append((time.perf_counter_ns() - start) / (count // 10))
    return _ns(means, what)


def _handover(device: CudaDevice, way: str, rest_s: float) -> Quantity:
    """From the driver's call on an idle stream to a worker's start; with a rest before, the workers sleep by then."""
    runtime, pool, stream = device.runtime, device.pool, device.stream(D2H)
    pages = KVPages(1, 1, 16, 16, "fp32")
    plan = plan_decode(pages, np.zeros((1, 1), np.int32), np.ones(1, np.int32), 1)
    q = np.zeros((1, 1, 16), np.float32)
    took = []
    for _ in range(HANDOVERS):
        time.sleep(rest_s)
        job = pool.prepare(plan, q, np.zeros_like(q))
        start = time.perf_counter_ns()
        if way == "bell":
            runtime.write_word(stream, *pool.arm(job))
        else:
            runtime.host_call(stream, pool.push_address, pool.descriptor(job))
        job.wait(WAIT_S)
        took.append((job.start_ns or start) - start)
    state = "asleep" if rest_s else "awake"
    return _ns(took, f"from a {way.replace('_', ' ')} on an idle stream to the start of CPU attention, workers {state}")


def _copies(device: CudaDevice, num_bytes: int) -> Iterator[Priced]:
    """Bandwidth of page-locked and pageable copies down, and what a small one takes."""
    runtime, stream = device.runtime, device.stream(D2H)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
    for name, locked in (("bandwidth", True), ("pageable", False)):
        target = torch.zeros(num_bytes, dtype=torch.uint8)
        if locked and not device.pin(target, target.data_ptr(), num_bytes, "a buffer"):
            raise InputError("host memory cannot be page-locked: copies here are no measure of a card")
        sizes = (num_bytes, 4096) if locked else (num_bytes,)
        for size in sizes:
            took = [_copied(runtime, stream, source[:size], target[:size]) for _ in range(10)]
            if size == num_bytes:
                rate = num_bytes / max(1.0, statistics.median(took)) * 1e9
                kind = "page-locked" if locked else "pageable"
                yield name, Quantity(rate, "B/s", "measured", f"median of 10 {kind} copies of {num_bytes} bytes down")
            else:
                yield "launch", _ns(took, f"a page-locked copy of {size} bytes down")


def _copied(runtime: Any, stream: Any, source: torch.Tensor, target: torch.Tensor) -> int:
    first, last = runtime.event(), runtime.event()
    runtime.record(first, stream)
    runtime.enqueue(stream, lambda: target.copy_(source, non_blocking=True))
    runtime.record(last, stream)
    deadline = time.perf_counter() + 10 * WAIT_S
    while not runtime.query(last):
        if time.perf_counter() > deadline:
            raise InputError(f"a copy of {len(source)} bytes did not end within {10 * WAIT_S:g} s")
    return runtime.elapsed_ns(first, last)


def _registered(device: CudaDevice, num_bytes: int) -> Quantity:
    memory = np.empty(num_bytes, np.uint8)
    start = time.perf_counter_ns()
    device.runtime.pin(memory.ctypes.data, num_bytes)
    took = time.perf_counter_ns() - start
    device.runtime.unpin(memory.ctypes.data)
    return Quantity(num_bytes / max(1, took) * 1e9, "B/s", "measured", f"registering {num_bytes} bytes, once")


def tile(on: torch.device) -> tuple[dict[tuple[int, int], float], tuple[int, int]]:
    """Median ns of decode attention for each tile that fits this card, and the fastest."""
    capability = capability_of(on)
    took = {
        one: float(statistics.median(gpu_kernels.bench.measure(
            TILE_SEQS, TILE_TOKENS, TILE_GROUP, on, capability.half, TILE_ROUNDS, gpu_kernels.bench.FLUSH_BYTES, one
        ).decode_ns))
        for one in tiles_of(gpu_kernels.bench.HEAD_DIM, capability)
    }  # fmt: skip
    return took, min(took, key=lambda one: took[one])


def tile_prices(on: torch.device) -> Iterator[Priced]:
    took, best = tile(on)
    listed = ", ".join(f"{n} keys in {stages} stages {ns / 1e3:.0f} us" for (n, stages), ns in took.items())
    for name, value in zip(TILE, best, strict=True):
        yield name, Quantity(value, "keys" if name == TILE[0] else "stages", "measured", listed)


def card_profile(device: CudaDevice, found: dict[str, Quantity]) -> Profile:
    """The link as the simulator reads it: ``bandwidth`` and ``launch`` of copies; the rest says what it is."""
    copy = {"copy": (Efficiency(1.0, 1.0), "measured: the bandwidth is what copies reach")}
    name = f"{device.runtime.gpu_name.replace(' ', '_')}-link"
    return Profile(name, "link", "measured", device.profile, quantities=found, efficiency=copy)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hybridattn.calibration.card", description=__doc__)
    parser.add_argument("--out", type=Path, help="file of the profile (default: this card's, in the cache folder)")
    parser.add_argument("--dry-run", action="store_true", help="on a runtime that does nothing; no figure, no profile")
    options = parser.parse_args(arguments)
    reason = None if options.dry_run else why_no_cuda()
    if reason is not None:
        print(f"card: device 'cuda' cannot be used: {reason}; --dry-run tries the way", file=sys.stderr)
        return 2
    null: Any = NullRuntime() if options.dry_run else None
    device = CudaDevice(runtime=null, record=False)
    if null is not None:
        null.pool = device.pool
    found: dict[str, Quantity] = {}
    try:
        sizes = (1 << 20, 1 << 20) if options.dry_run else (COPY_BYTES, LOCKED_BYTES)
        tiles = iter(()) if options.dry_run else tile_prices(torch.device(device.torch_device))
        for parts in (prices(device, *sizes), tiles):
            for name, quantity in parts:
                found[name] = quantity
                line = {"name": name, "value": quantity.value, "unit": quantity.unit, "source": quantity.source}
                print(json.dumps(line | {"kind": device.kind}), flush=True)
            if not options.dry_run:  # with the prices alone, then with the tile
                save_profile(card_profile(device, found), options.out or card_path())
        print(json.dumps({"handover": device.handover, "why_handover": device.why_handover, "kind": device.kind}))
    finally:
        device.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
