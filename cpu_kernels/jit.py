"""Compiling IR for one level, and keeping the result: the one place with compiler policy.

Policy. Floating-point flags are written per instruction and only from `FAST_MATH`: ``nnan`` and ``ninf`` are never
among them, because they delete the guards that make a masked weight exactly 0 and an empty row -inf. In use are only
`SUM_FLAGS`, which let a sum over lanes be a tree. Nothing else may be reordered, so a kernel is bit-equal on re-run.

Cache. The key of an object file is the hash of everything that determines it: IR text, processor name, feature
string, optimisation level, LLVM and llvmlite versions. A changed constant anywhere changes the IR, and another
machine's level changes the processor name, so a stale or foreign object cannot be loaded. The folder is
``$CPU_KERNELS_CACHE``, or ``cpu_kernels`` in the user's cache folder; an unwritable folder, or none, costs speed and
not correctness.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import platformdirs

from cpu_kernels import isa

FAST_MATH = ("contract", "reassoc", "arcp", "nsz")
SUM_FLAGS = "reassoc nsz"
OPT_LEVEL = 3
_PART, _STALE_S = ".part", 3600.0  # names and age of half-written objects


@dataclass(frozen=True, slots=True)
class Target:
    """What an object file is made for: an LLVM processor name and extra features such as ``+amx-bf16``."""

    cpu: str
    features: str = ""


def target_of(level: str, extras: tuple[str, ...] = ()) -> Target:
    """Return the target of an ISA level, with instruction sets beyond it."""
    return Target(isa.target_cpu(level), ",".join("+" + name for name in extras))


def cache_dir() -> Path | None:
    """Return the folder of compiled objects (it need not exist yet); None for a user without a home folder."""
    asked = os.environ.get("CPU_KERNELS_CACHE")
    try:
        found = Path(asked) if asked else platformdirs.user_cache_path("cpu_kernels")
    except RuntimeError:
        return None
    return None if str(found).startswith("~") else found  # what earlier versions of the library say


def object_key(ir: str, target: Target) -> str:
    """Return the name of the object file that `ir` becomes on `target`."""
    version = ".".join(map(str, llvm.llvm_version_info))
    parts = (llvmlite.__version__, version, str(OPT_LEVEL), llvm.get_process_triple(), target.cpu, target.features, ir)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


_setup_lock = threading.Lock()
_setup_done: list[bool] = []


def _initialize() -> None:
    with _setup_lock:
        if not _setup_done:
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            llvm.initialize_native_asmparser()
            _setup_done.append(True)


def target_machine(target: Target) -> llvm.TargetMachine:
    """Make the LLVM description of `target` on this host's operating system."""
    _initialize()
    triple = llvm.Target.from_triple(llvm.get_process_triple())
    return triple.create_target_machine(
        cpu=target.cpu, features=target.features, opt=OPT_LEVEL, reloc="pic", codemodel="default"
    )


def _optimised(ir: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    module = llvm.parse_assembly(ir)
    module.triple = llvm.get_process_triple()
    module.data_layout = str(machine.target_data)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=OPT_LEVEL))
    builder.getModulePassManager().run(module, builder)
    return module


def assembly(ir: str, target: Target) -> str:
    """Return the assembly text that `ir` becomes, for any target, whether or not this machine can run it."""
    machine = target_machine(target)
    return machine.emit_assembly(_optimised(ir, machine))


def compile_object(ir: str, target: Target) -> bytes:
    """Compile without looking at the cache."""
    machine = target_machine(target)
    return machine.emit_object(_optimised(ir, machine))


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    # An object cut short by a full disk or a crash is as good as none; the digest stands before the code.
    body, digest = data[32:], data[:32]
    return body if hashlib.sha256(body).digest() == digest else None


def _write(path: Path, body: bytes) -> str | None:
    """Keep an object file; or why that cannot be, in one clause."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=_PART)
    except OSError as error:
        return f"{path.parent} cannot be written ({error.strerror or error})"
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(body).digest() + body)
        os.replace(name, path)
    except OSError as error:  # a full disk
        with suppress(OSError):
            os.unlink(name)
        return f"{path.parent} cannot be written ({error.strerror or error})"
    return None


class CacheWarning(UserWarning):
    """Compiled kernels cannot be kept."""


_told: list[str] = []


def _say_once(why: str | None) -> None:
    if why is not None and not _told:
        _told.append(why)
        warnings.warn(
            f"CPU kernels are compiled again at each start: {why}; set CPU_KERNELS_CACHE to a folder that can be "
            f"written",
            CacheWarning,
            stacklevel=3,
        )


def _remove_leftovers(folder: Path) -> None:
    """What killed processes left half-written: no write takes an hour."""
    for part in folder.glob("*" + _PART):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > _STALE_S:
                part.unlink()


class Loaded:
    """Machine code in this process: addresses of its functions, valid while the object lives."""

    __slots__ = ("_engine", "_tracker", "addresses", "from_cache")

    def __init__(self, body: bytes, names: tuple[str, ...], key: str, from_cache: bool) -> None:
        _initialize()
        self._engine = llvm.create_lljit_compiler()
        builder = llvm.JITLibraryBuilder().add_object_img(body).add_current_process()
        for name in names:
            builder.export_symbol(name)
        self._tracker = builder.link(self._engine, "k" + key[:32])
        self.addresses = {name: self._tracker[name] for name in names}
        self.from_cache = from_cache


_loaded: dict[str, Loaded] = {}
_load_lock = threading.Lock()


def load(ir: str, names: tuple[str, ...], target: Target) -> Loaded:
    """Compile `ir` (or take it from the cache) and load it; the same text is loaded once per process."""
    key = object_key(ir, target)
    with _load_lock:
        found = _loaded.get(key)
        if found is None:
            folder = cache_dir()
            path = None if folder is None else folder / f"{key}.o"
            body = None if path is None else _read(path)
            hit, why = body is not None, None
            if body is None:
                body = compile_object(ir, target)
                why = "no home folder is known" if path is None else _write(path, body)
            found = _loaded[key] = Loaded(body, names, key, hit)
            if not hit:
                _say_once(why)
    return found
