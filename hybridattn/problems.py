"""What stands in the framework's way on this machine, and what to do about it."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile

from cpu_kernels import jit
from cpu_kernels.topology import Topology
from hybridattn.core.extras import MAIN
from hybridattn.core.folders import CACHE_VARIABLE, cache_dir, why_unwritable
from hybridattn.core.terminal import is_unicode
from hybridattn.devices.cuda_presence import why_no_build, why_no_cuda

# By these, an OpenMP runtime keeps the thread that loads it to some cpus.
BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")


def installed(package: str) -> bool:
    """Whether ``import package`` would find something; nothing is loaded."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ValueError, ImportError):  # taken out of the way by hand
        return False


def problems(machine: Topology, before: tuple[int, ...], after: tuple[int, ...]) -> list[str]:
    """One sentence each.

    Parameters
    ----------
    machine : Topology
    before, after : cpus of the mask before torch was loaded and after
    """
    return [
        *_packages(), *_mask(before, after), *_pinning(), *_few_cpus(machine), *_card(), *_folders(), *_terminal(),
    ]  # fmt: skip


def _packages() -> list[str]:
    absent = [name for name in MAIN if not installed(name)]
    if not absent:
        return []
    names, verb = ", ".join(absent), "is" if len(absent) == 1 else "are"
    return [f"{names} {verb} not installed, so no text can be generated: pip install 'hybridattn[main]'"]


def _mask(before: tuple[int, ...], after: tuple[int, ...]) -> list[str]:
    """OpenMP binds the first thread when torch is loaded: then all that this process starts shares its cpu."""
    binding = {name: os.environ[name] for name in BINDING if os.environ.get(name, "false").lower() != "false"}
    told = " and ".join(f"{name}={value}" for name, value in binding.items())
    unset = " ".join(f"-u {name}" for name in binding)
    if after != before:
        cause = told or "loading torch"
        cure = f"run `env {unset} ...`" if unset else "start it with the mask that it should have"
        return [
            f"{cause} keeps this process to cpu {_listed(after)} of {_listed(before)} once torch is loaded, so that "
            f"all lanes and threads share it: {cure}"
        ]
    if binding and set(binding) != {"OMP_PLACES"}:
        return [f"{told} may keep threads to few cpus once torch is loaded: run `env {unset} ...`"]
    return []


def _listed(cpus: tuple[int, ...]) -> str:
    return ",".join(map(str, cpus))


def _pinning() -> list[str]:
    if not hasattr(os, "sched_setaffinity"):
        return ["this system pins no threads to cpus: they run wherever it puts them, which costs speed"]
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(0))
    except OSError as error:
        return [
            f"threads cannot be pinned to cpus ({error.strerror}), which costs speed: allow sched_setaffinity in the "
            f"container or sandbox"
        ]
    return []


def _few_cpus(machine: Topology) -> list[str]:
    found = []
    if machine.quota is not None and machine.quota < len(machine.allowed):
        found.append(
            f"a cgroup quota gives the time of {machine.quota} of the {len(machine.allowed)} allowed cpus, and no more "
            f"threads than that are started: raise the quota to use the others"
        )
    if machine.usable == 1:
        found.append("one cpu can be used, so that the lanes share it and nothing overlaps: allow two or more")
    return found


def _card() -> list[str]:
    why = why_no_cuda() if installed("torch") else "torch is not installed"
    if why is not None and "cannot be loaded" in why:
        return [f"{why}: install it again, or give the process more memory"]
    if why is not None or (reason := why_no_build()) is None:
        return []
    return [f"{reason}, so that Triton may not be able to launch its first kernel on the card: install it"]


def _folders() -> list[str]:
    found = []
    cache = cache_dir()
    why = why_unwritable(None if cache is None else cache / "models")
    if why is not None:
        found.append(f"models are converted again at each start: {_with_cure(why, CACHE_VARIABLE)}")
    kernels = jit.cache_dir()
    why = "no home folder is known" if kernels is None else why_unwritable(kernels)
    if why is not None:
        found.append(f"CPU kernels are compiled again at each start: {_with_cure(why, 'CPU_KERNELS_CACHE')}")
    try:
        tempfile.gettempdir()
    except OSError as error:
        found.append(f"there is no folder for temporary files ({error.strerror}): set TMPDIR to one")
    return found


def _with_cure(why: str, variable: str) -> str:
    return why if variable in why else f"{why}: set {variable} to a folder that can be written"


def _terminal() -> list[str]:
    if is_unicode(sys.stdout):
        return []
    encoding = sys.stdout.encoding
    return [f"the output's encoding is {encoding}, so other characters appear as escapes: set PYTHONIOENCODING=utf-8"]
