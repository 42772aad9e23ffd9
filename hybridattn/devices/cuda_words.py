"""Words of page-locked memory by which a stream and the pool's workers tell each other how far they are.

    gpu.h2d     wait(done word of attention l >= n) |fetch output l|      the driver has gone on long before
    pool            |attention l| done word = n
    gpu.d2h     |send l|
    handover            write(bell = k)                                   instead of a host call
    pool                     |attention l|

These are calls of the driver library; torch has none for them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_WAIT_GEQ = 0  # cyclic: (int32)(word - value) >= 0
_MAPS = Path("/proc/self/maps")
_NAMES = (("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"), ("cuStreamWaitValue32", "cuStreamWriteValue32"))


class Words:
    """``cuStreamWaitValue32`` and ``cuStreamWriteValue32`` of the driver library that this process has loaded.

    Attributes
    ----------
    why_not : why they are not there; None where they are (whether they work, only trying shows)
    """

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        path = loaded_library("libcuda.so")
        if library is None and path is not None:
            library = ctypes.CDLL(path)
        self._pointers: dict[int, int] = {}
        self.why_not: str | None = "libcuda is not loaded in this process"
        if library is None:
            return
        names = next((pair for pair in _NAMES if all(hasattr(library, name) for name in pair)), None)
        if names is None or not hasattr(library, "cuMemHostGetDevicePointer_v2"):
            self.why_not = "this driver library has no waits for memory"
            return
        self.why_not = None
        self._wait, self._write = (getattr(library, name) for name in names)
        for call in (self._wait, self._write):
            call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._pointer = library.cuMemHostGetDevicePointer_v2
        self._pointer.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p, ctypes.c_uint]

    def wait(self, stream: int, address: int, value: int) -> None:
        """What comes on ``stream`` waits until the word counts ``value`` or more."""
        _check("a wait for memory", self._wait(stream, self._on_the_card(address), value, _WAIT_GEQ))

    def write(self, stream: int, address: int, value: int) -> None:
        _check("a write of memory", self._write(stream, self._on_the_card(address), value, 0))

    def _on_the_card(self, address: int) -> int:
        """Where the card sees page-locked memory: mostly at the same address."""
        found = self._pointers.get(address)
        if found is None:
            pointer = ctypes.c_uint64()
            _check("mapping a word", self._pointer(ctypes.byref(pointer), address, 0))
            self._pointers[address] = found = pointer.value
        return found


def _check(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{what} was refused with CUDA error {code}")


def loaded_library(name: str, maps: Path = _MAPS) -> str | None:
    """Path of a shared library that a process has loaded, by the start of its file name (from its memory map)."""
    for line in maps.read_text().splitlines() if maps.exists() else ():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/") and Path(path).name.startswith(name):
            return path
    return None
