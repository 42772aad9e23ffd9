"""Where files are kept between runs, and folders that are being written."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from hybridattn.core.errors import InputError

CACHE_VARIABLE = "HYBRIDATTN_CACHE"
NO_CACHE = f"no home folder is known for uid {os.getuid()}: set {CACHE_VARIABLE} to a folder that can be written"
_LOCK = ".lock"
_STALE_S = 3600.0  # a folder without a lock is left alone this long: its owner may be about to take one


def cache_dir() -> Path | None:
    """``$HYBRIDATTN_CACHE``, else the user's cache folder of the system (``$XDG_CACHE_HOME`` or ``~/.cache`` on Linux).

    None for a user without a home folder (no HOME, and no entry in the password file). InputError where the variable
    begins with the home of somebody who has none.
    """
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        try:
            return Path(own).expanduser()
        except RuntimeError as error:
            raise InputError(f"{CACHE_VARIABLE} '{own}': {error}") from error
    try:
        found = platformdirs.user_cache_path("hybridattn")
    except RuntimeError:
        return None
    return None if str(found).startswith("~") else found  # what earlier versions of the library say


def why_unwritable(folder: Path | None) -> str | None:
    """Why nothing can be kept in ``folder``, in one clause; None where it can, also where it need only be made."""
    if folder is None:
        return NO_CACHE
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        return f"{nearest} cannot be written ({error.strerror})"


@contextmanager
def folder_in_work(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder below ``parent``, removed at the end unless it was published; what killed processes left goes first.

    It is locked while this process lives, so that another one can tell it from a leftover.
    """
    remove_leftovers(parent, prefix)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with (work / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def publish(work: Path, final: Path) -> None:
    """Give a folder in work its name; where somebody else was faster, his copy stays and this one goes."""
    (work / _LOCK).unlink()
    os.chmod(work, 0o755)  # mkdtemp makes it private
    try:
        os.rename(work, final)
    except OSError:
        if not final.is_dir():  # not another writer: a real failure
            raise


def leftovers(parent: Path, prefix: str) -> list[Path]:
    """Folders that processes which are gone left in work."""
    return [path for path in parent.glob(prefix + "*") if _is_leftover(path)]


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove `leftovers`, as far as they may be."""
    for path in leftovers(parent, prefix):
        shutil.rmtree(path, ignore_errors=True)


def _is_leftover(work: Path) -> bool:
    try:
        with (work / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        with suppress(OSError):
            return time.time() - work.stat().st_mtime > _STALE_S
    except OSError:  # somebody holds it, or it is not ours to open
        return False
    return False
