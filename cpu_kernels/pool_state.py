"""The memory that a pool shares with its native workers, and its threads."""

from __future__ import annotations

import ctypes
import mmap
import platform
import threading
import time
from functools import lru_cache
from typing import Any

import numpy as np

from cpu_kernels import isa, jit
from cpu_kernels.codegen.fields import CTL_WORDS, JOB_WORDS, RING_SLOTS, Ctl
from cpu_kernels.codegen.worker import EVERYBODY, FUTEX_WAKE_PRIVATE, build_worker
from cpu_kernels.memory import pin_this_thread

JOB_BYTES = 8 * JOB_WORDS
MAX_JOBS = RING_SLOTS - 64  # the ring keeps room for jobs that ended but that no worker has passed yet
SLICE_S = 0.05  # longest sleep before looking again
_FUTEX_NUMBER = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98}


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


@lru_cache(maxsize=1)
def natives() -> tuple[Any, Any, int, Any]:
    """Return (worker, push, address of push, arm)."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    loaded = jit.load(build_worker(x86), ("worker", "push", "arm"), jit.Target(isa.target_cpu("portable")))
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
    push = loaded.addresses["push"]
    # A push takes well under a microsecond: keeping the GIL (PYFUNCTYPE) is cheaper than giving it away and back.
    quick = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
    return call(loaded.addresses["worker"]), quick(push), push, quick(loaded.addresses["arm"])


class PoolState:
    """Memory and threads of a pool; the threads hold this, never the pool, so that an unused pool can go away."""

    def __init__(self, spin_us: float, nodes: int) -> None:
        machine = platform.machine()
        if platform.system() != "Linux" or machine not in _FUTEX_NUMBER:
            raise OSError(f"WorkerPool needs Linux on x86-64 or AArch64, this is {platform.system()} on {machine}")
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.futex_number = _FUTEX_NUMBER[machine]
        # Pages of their own, so that a device can lock them; not shared with a forked process.
        count = CTL_WORDS + MAX_JOBS * JOB_WORDS
        self.all: np.ndarray = np.frombuffer(
            mmap.mmap(-1, 8 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.int64, count
        )
        self.ctl: np.ndarray = self.all[:CTL_WORDS]
        self.slab: np.ndarray = self.all[CTL_WORDS:]
        self.ctl[Ctl.SPIN_NS] = int(spin_us * 1000)
        self.ctl[Ctl.CLOCK] = ctypes.cast(self.libc.clock_gettime, ctypes.c_void_p).value
        self.ctl[Ctl.SYSCALL] = ctypes.cast(self.libc.syscall, ctypes.c_void_p).value
        self.ctl[Ctl.FUTEX], self.ctl[Ctl.NODES] = self.futex_number, nodes
        # Plain memory views read and write single words faster than NumPy indexing does.
        self.bytes = memoryview(self.slab.data).cast("B")
        self.words = self.bytes.cast("q")
        self.slab_at, self.ctl_at = self.slab.ctypes.data, self.ctl.ctypes.data
        self.control = memoryview(self.ctl.data).cast("B").cast("q")
        self.threads: list[threading.Thread] = []
        self.kept: list[Any] = []

    def futex(self, address: int, operation: int, value: int, timeout_s: float | None = None) -> None:
        limit = None
        if timeout_s is not None:
            limit = ctypes.byref(_TimeSpec(int(timeout_s), int(timeout_s % 1 * 1e9)))
        self.libc.syscall(
            ctypes.c_long(self.futex_number), ctypes.c_void_p(address), ctypes.c_long(operation),
            ctypes.c_long(value & 0xFFFFFFFF), limit, None, ctypes.c_long(0),
        )  # fmt: skip

    def ring_bell(self, word: Ctl) -> None:
        """Change a control word and wake its sleepers; the change comes first, so no wake-up is lost."""
        self.control[word] += 1
        self.futex(self.ctl_at + 8 * word, FUTEX_WAKE_PRIVATE, EVERYBODY)

    def stop(self, timeout_s: float) -> bool:
        """Tell all workers to end and wait for them; False if one is still running."""
        self.control[Ctl.STOP] = 1
        limit = time.monotonic() + timeout_s
        self.ring_bell(Ctl.SIGNAL)
        self.ring_bell(Ctl.RELEASE)
        for thread in self.threads:
            while thread.is_alive() and time.monotonic() < limit:
                # Python adds to these words without an atomic operation, so a push at the same instant may hide a ring.
                self.ring_bell(Ctl.SIGNAL)
                self.ring_bell(Ctl.RELEASE)
                thread.join(min(SLICE_S, max(0.0, limit - time.monotonic())))
        self.threads = [t for t in self.threads if t.is_alive()]  # the objects of the others go here
        return not self.threads

    def living(self) -> bool:
        """Whether a worker is there to run anything; after a fork there is none in the child."""
        for thread in self.threads:
            if thread.is_alive():
                return True
        return False


def worker_thread(shared: PoolState, cpu: int | None, node: int) -> None:
    if cpu is not None:
        pin_this_thread(cpu)
    natives()[0](shared.ctl_at, node)


def close_forgotten(shared: PoolState) -> None:
    shared.stop(5.0)
