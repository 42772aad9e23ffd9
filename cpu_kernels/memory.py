"""Large zeroed buffers: huge pages where the system grants them, touched in parallel, refused when they cannot fit."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

import numpy as np

HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_DONTNEED = 14, 4
_TOUCH_CHUNK = 64 << 20


def available_bytes(meminfo: str | None = None) -> int | None:
    """Return the memory that can be taken without swapping, or None where the system does not say."""
    path = Path("/proc/meminfo")
    if meminfo is None:
        meminfo = path.read_text() if path.exists() else ""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def allocate(
    num_bytes: int,
    what: str,
    *,
    huge_pages: bool = True,
    cpus: tuple[int, ...] = (),
    touch: bool = True,
    pieces: int = 1,
) -> np.ndarray:
    """Return `num_bytes` zero bytes as a uint8 array aligned to 64 bytes (2 MiB with huge pages).

    Parameters
    ----------
    num_bytes : int
        Size.
    what : str
        Named in the refusal.
    huge_pages : bool
        Ask for transparent huge pages (a request; the system may decline).
    cpus : tuple of int
        Touch the buffer in equal parts from threads pinned to these CPUs, so that each part lies on its NUMA node.
    pieces : int
        Equal pieces that are each divided among the CPUs, such as layers.
    touch : bool
        Commit the memory now. Without it pages are committed when first written.

    Raises
    ------
    MemoryError
        If more is asked for than the system has available, or grants this process.
    """
    have = available_bytes()
    if touch and have is not None and num_bytes > have:
        raise MemoryError(f"{what} needs {num_bytes} bytes, but only {have} bytes of memory are available")
    align = HUGE_PAGE if huge_pages else 4096
    # private: shared memory, Python's default, is small pages unless the system's shmem_enabled says otherwise
    try:
        memory = mmap.mmap(-1, max(num_bytes, 1) + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # a limit of this process, or of all that are there
        raise MemoryError(f"{what} needs {num_bytes} bytes, which the system refuses: {error.strerror}") from error
    if huge_pages and hasattr(memory, "madvise"):
        try:
            memory.madvise(_MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without transparent huge pages: small pages are correct, only slower
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % align
    out = raw[start : start + num_bytes]
    if touch and num_bytes:
        _touch(out, cpus, pieces)
    return out


def give_back(buffer: np.ndarray) -> None:
    """Return the memory of an array of `allocate` to the system at once, whoever still refers to it: it reads as zeros
    from now on. Where the system cannot, it goes with the last reference."""
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:
        advise(ctypes.c_void_p(buffer.ctypes.data), ctypes.c_size_t(buffer.nbytes), _MADV_DONTNEED)


def _touch(buffer: np.ndarray, cpus: tuple[int, ...], pieces: int) -> None:
    """Write zeros everywhere; each CPU of `cpus` takes one contiguous part of each piece.

    Ctrl-C ends it within a chunk: the threads hold the buffer that they write to, and stop by themselves.
    """
    size, enough = buffer.nbytes, threading.Event()
    if not touched_by(size, cpus):
        _write_zeros(buffer, 0, size, enough)
        return

    def work(number: int, cpu: int) -> None:
        pin_this_thread(cpu)
        for piece in range(pieces):
            start, length = size * piece // pieces, size * (piece + 1) // pieces - size * piece // pieces
            first, last = length * number // len(cpus), length * (number + 1) // len(cpus)
            _write_zeros(buffer, start + first, start + last, enough)

    crew = [threading.Thread(target=work, args=pair) for pair in enumerate(cpus)]
    try:
        for t in crew:
            t.start()
        for t in crew:
            t.join()
    finally:
        enough.set()


def _write_zeros(buffer: np.ndarray, first: int, last: int, enough: threading.Event) -> None:
    """Zeros from byte `first` to `last` unless `enough` is set meanwhile; each memset runs without the GIL."""
    at = first
    while at < last and not enough.is_set():
        count = min(last - at, _TOUCH_CHUNK)
        ctypes.memset(buffer.ctypes.data + at, 0, count)
        at += count


def touched_by(num_bytes: int, cpus: tuple[int, ...]) -> bool:
    """Whether a buffer of this size is touched by its CPUs, each its part, and not by the calling thread."""
    return num_bytes >= _TOUCH_CHUNK and bool(cpus)


def may_pin() -> bool:
    """Whether this system lets a thread choose its CPUs: sandboxes refuse even the choice it has already."""
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except (OSError, AttributeError):
        return False
    return True


def pin_this_thread(cpu: int) -> bool:
    """Bind the calling thread to one CPU; where the system refuses, it runs unpinned and False is returned."""
    try:
        os.sched_setaffinity(0, {cpu})
    except (OSError, AttributeError):
        return False
    return True
