"""The file tier: pages of the CPU tier as plain files, so that a session or a prefix survives the process.

    folder/<fingerprint>/<name of the page>.kv     magic | fingerprint | name | checksum | K,V of the page, all layers

A file holds what was computed by one model in one layout: their fingerprint is in its folder's name and in its head. It
is written beside its place and renamed, so that nobody reads half of one; one that is truncated, of another model,
under another name or changed is refused, removed, and its page computed again. No error of the file system reaches a
request: what cannot be read is computed, what cannot be written is not kept.

Whoever reads the files can read the conversation from them: the folder is made for its owner alone.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from hybridattn.core.errors import InputError

_MAGIC = b"hybridattn kv 1\n"
_log = logging.getLogger(__name__)


class KVStore:
    """Pages by name, at most ``max_bytes`` of them on disk: those that were not used for the longest go first.

    Parameters
    ----------
    folder : where the files are; made when the first is written
    fingerprint : of all that the bytes of a page depend on
    read, write : the content of a page of the CPU tier, and its replacement

    Attributes
    ----------
    saved, loaded, refused, failed : files written, read, refused for their content, and errors of the file system
    """

    def __init__(
        self,
        folder: str | Path,
        fingerprint: bytes,
        max_bytes: int,
        read: Callable[[int], bytes],
        write: Callable[[int, bytes], None],
    ) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise InputError(f"kv_store_bytes must be an integer of at least 1, got {max_bytes!r}")
        self._mark = blake2b(fingerprint, digest_size=16).digest()
        self._folder = Path(folder).expanduser() / self._mark.hex()
        self._max_bytes = max_bytes
        self._read, self._write = read, write
        self._sizes: dict[bytes, int] = {}  # least recently used first
        self._held = 0  # their sum
        self.saved = self.loaded = self.refused = self.failed = 0
        with self._forgiven("list", self._folder):
            found = [(path, path.stat()) for path in self._folder.glob("*.kv")]
            for path, stat in sorted(found, key=lambda entry: entry[1].st_mtime_ns):
                with suppress(ValueError):  # a name of somebody else's
                    self._count(bytes.fromhex(path.stem), stat.st_size)
        self._make_room(0)

    def has(self, name: bytes) -> bool:
        return name in self._sizes

    def save(self, name: bytes, page: int) -> None:
        """Keep the content of a page; one that is kept counts as used now."""
        if name in self._sizes:
            self._count(name, self._sizes[name])
            return
        data = self._read(page)
        whole = self._head(name, data) + data
        if len(whole) > self._max_bytes:
            return
        self._make_room(len(whole))
        with self._forgiven("write", self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, part = tempfile.mkstemp(suffix=".part", dir=self._folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(whole)
                os.replace(part, self._path(name))
            except OSError:
                with suppress(OSError):
                    os.unlink(part)
                raise
            self._count(name, len(whole))
            self.saved += 1

    def load(self, name: bytes, page: int) -> bool:
        """Fill a page; False where there is no such file, or none that can be believed."""
        path = self._path(name)
        with self._forgiven("read", path):
            whole = path.read_bytes()
            size = len(self._head(name, b""))
            data = whole[size:]
            if whole[:size] == self._head(name, data):
                self._count(name, len(whole))
                with suppress(OSError):  # a folder that is only read
                    os.utime(path)
                self._write(page, data)
                self.loaded += 1
                return True
            self.refused += 1
            _log.warning("%s is not what was written there: it is removed, and its tokens are computed again", path)
            with self._forgiven("remove", path):
                path.unlink()
        self._held -= self._sizes.pop(name, 0)
        return False

    def _head(self, name: bytes, data: bytes) -> bytes:
        check = blake2b(self._mark + name + data, digest_size=32).digest()
        return _MAGIC + self._mark + name + check

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{name.hex()}.kv"

    def _count(self, name: bytes, size: int) -> None:
        """A file is there, used just now."""
        self._held += size - self._sizes.pop(name, 0)
        self._sizes[name] = size

    def _make_room(self, wanted: int) -> None:
        while self._sizes and self._held + wanted > self._max_bytes:
            name = next(iter(self._sizes))
            self._held -= self._sizes.pop(name)
            with self._forgiven("remove", self._path(name)):
                self._path(name).unlink()

    @contextmanager
    def _forgiven(self, what: str, path: Path) -> Iterator[None]:
        """Errors of the file system are counted, and the first is told; a file that is gone is none."""
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as error:
            if not self.failed:
                _log.warning("cannot %s %s: %s; requests go on without", what, path, error.strerror or error)
            self.failed += 1
