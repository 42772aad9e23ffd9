"""The read loop that kernels are held against: 64-byte loads, eight accumulators, the same bytes, pages and threads.

Variants: without software prefetch, and with one prefetch per line at several distances into L2. The best one counts.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np

from cpu_kernels import isa, jit
from cpu_kernels.codegen.emit import Module
from cpu_kernels.codegen.fields import JOB_WORDS, MAX_NODES, Job
from cpu_kernels.codegen.values import I32, I64, PTR, vec
from cpu_kernels.native import nothing_to_claim
from cpu_kernels.pages import KVPages

UNIT_BYTES = 16 << 10
ACCUMULATORS = 8
DISTANCES = (0, 4 << 10, 16 << 10)  # bytes ahead; 0: no software prefetch
_HALF = struct.Struct(f"{JOB_WORDS - Job.KERNEL}q")


def build_read(distance: int) -> str:
    """Return the IR of ``read(job, first_unit, last_unit)``: sums all 64-byte lines of the units."""
    module = Module()
    f = module.function("read", (PTR, I64, I64))
    job, first, last = f.args
    base, kind = f.load(PTR, job, Job.BASE * 8), vec(16, I32)
    sums = [f.var(kind, 0) for _ in range(ACCUMULATORS)]
    with f.loop(first * UNIT_BYTES, last * UNIT_BYTES, 64 * ACCUMULATORS) as at:
        for i, acc in enumerate(sums):
            line = base.at(at + 64 * i)
            if distance:
                f.prefetch(line.at(distance), 2)
            acc.set(acc.get() + f.load(kind, line, align=64))
    total = sums[0].get()
    for acc in sums[1:]:
        total = total + acc.get()
    f.store(total, f.load(PTR, job, Job.OUT * 8), first * 64)
    return module.text()


@cache
def _address(distance: int, level: str) -> int:
    loaded = jit.load(build_read(distance), ("read",), jit.Target(isa.target_cpu(level)))
    return loaded.addresses["read"]


class ReadLoop:
    """A job that reads a whole pool once; looks like a native plan to `WorkerPool`."""

    def __init__(self, pages: KVPages, level: str, distance: int, chunks: int) -> None:
        self.pages, self.distance = pages, distance
        units = pages.nbytes // UNIT_BYTES
        self.bytes = units * UNIT_BYTES
        self.edges = np.array([units * i // chunks for i in range(chunks + 1)], np.int64)
        self.num_chunks, self.chunk_ends = chunks, (chunks,) * MAX_NODES
        self.claims = nothing_to_claim(self.chunk_ends)
        self.kernel = _address(distance, level)
        self.sink = np.zeros((units + 1) * 16, np.int32)

    @property
    def native(self) -> ReadLoop:
        return self

    def take(self) -> None:
        return None

    def give(self, workspace: None) -> None:
        return None

    def fill(self, words: memoryview, at: int, *_: Any) -> tuple[Any, ...]:
        values = [0] * (JOB_WORDS - Job.KERNEL)
        values[Job.CHUNKS - Job.KERNEL] = self.edges.ctypes.data
        values[0], values[Job.BASE - Job.KERNEL] = self.kernel, self.pages.layer_address(0)
        values[Job.OUT - Job.KERNEL] = self.sink.ctypes.data
        _HALF.pack_into(words, at + 8 * Job.KERNEL, *values)
        return (self,)
