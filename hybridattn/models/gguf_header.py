"""A walk over a GGUF header that refuses counts and lengths which the file cannot hold.

Layout (the GGUF specification of the ggml project, versions 2 and 3): magic, u32 version, u64 tensors, u64 entries; an
entry is a key (u64 length and bytes), a u32 type and a value; a tensor is a name, u32 dimensions, that many u64, a u32
type and a u64 offset. A reader that believes a damaged count goes on for minutes and takes all memory, so this walk
comes before it; its time is bounded by the size of the file.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from hybridattn.core.errors import InputError

VERSIONS = (2, 3)
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of the scalar types
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the header lists it.

    ``shape`` is in row-major order (the file has the fastest dimension first), ``kind`` the number of its type,
    ``offset`` the bytes from the start of the data.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a walk over the header found. ``data_start`` and ``alignment`` are bytes."""

    tensors: tuple[TensorEntry, ...]
    data_start: int
    alignment: int


def check_header(path: Path) -> GgufHeader:
    """The header; InputError, naming the file and the place, unless every length in it lies within the file.

    A key or a tensor that is there twice is refused too: a reader would take either of the two.
    """
    if path.stat().st_size < 24:
        raise InputError(f"{path.name} is not a readable GGUF file: it has {path.stat().st_size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Walk(path.name, data).header()


class _Walk:
    """A position in the file that never passes its end."""

    def __init__(self, name: str, data: mmap.mmap) -> None:
        self._name, self._data, self._at, self._size = name, data, 0, len(data)

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise InputError(f"{self._name} is not a readable GGUF file: it does not begin with GGUF")
        version = self._number(4)
        if version not in VERSIONS:
            raise InputError(f"{self._name}: GGUF version {version} is not supported; known: 2, 3")
        count, entries = self._count("tensors", 24), self._count("entries", 13)
        alignment, keys = 32, set[bytes]()
        for _ in range(entries):
            key = self._string()
            self._once(key, keys, "entry")
            kind, start = self._number(4), self._at
            self._value(kind)
            if key == b"general.alignment":
                alignment = int.from_bytes(self._data[start : self._at], "little")
        if alignment < 1 or alignment & (alignment - 1):
            raise InputError(f"{self._name}: general.alignment is {alignment}, a power of two is needed")
        names = set[bytes]()
        tensors = tuple(self._tensor(names) for _ in range(count))
        return GgufHeader(tensors, -(-self._at // alignment) * alignment, alignment)

    def _once(self, name: bytes, seen: set[bytes], what: str) -> None:
        if name in seen:
            raise InputError(f"{self._name}: the {what} '{name.decode()}' is there twice")
        seen.add(name)

    def _tensor(self, names: set[bytes]) -> TensorEntry:
        name = self._string()
        self._once(name, names, "tensor")
        dimensions = self._number(4)
        if dimensions > _MAX_DIMENSIONS:
            raise InputError(f"{self._name}: a tensor at byte {self._at} has {dimensions} dimensions, above 4")
        shape = tuple(self._number(8) for _ in range(dimensions))
        return TensorEntry(name.decode(), shape[::-1], self._number(4), self._number(8))

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind in _SIZES:
            self._take(_SIZES[kind])
        elif kind == _ARRAY:
            self._array()
        else:
            raise InputError(f"{self._name}: an entry before byte {self._at} has the unknown type {kind}")

    def _array(self) -> None:
        kind = self._number(4)
        if kind in _SIZES:
            self._take(self._count("array elements", _SIZES[kind]) * _SIZES[kind])
        elif kind == _STRING:
            for _ in range(self._count("strings", 8)):
                self._string()
        else:
            raise InputError(f"{self._name}: an array before byte {self._at} has elements of the unknown type {kind}")

    def _string(self) -> bytes:
        """A text; refused unless it is one, or the library that reads it would fail on it."""
        text = self._take(self._number(8))
        try:
            text.decode()
        except UnicodeDecodeError as error:
            at = self._at - len(text) + error.start
            raise InputError(f"{self._name} is damaged: the text at byte {at} is no UTF-8 ({error.reason})") from error
        return text

    def _count(self, what: str, least: int) -> int:
        """A count of things of at least ``least`` bytes each, all of which are still to come."""
        count, left = self._number(8), self._size - self._at
        if count * least > left:
            raise InputError(f"{self._name} is damaged: {count} {what} at byte {self._at - 8}, but {left} bytes follow")
        return count

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def _take(self, num_bytes: int) -> bytes:
        start, self._at = self._at, self._at + num_bytes
        if self._at > self._size:
            raise InputError(
                f"{self._name} is damaged: {num_bytes} bytes at byte {start} end past its {self._size} bytes"
            )
        return self._data[start : self._at]
