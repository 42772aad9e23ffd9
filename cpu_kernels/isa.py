"""Instruction-set levels: what this machine can run, which one is chosen, and why.

| level | LLVM target | needs | query/weights in the dot products |
|---|---|---|---|
| ``amx_bf16`` | sapphirerapids | AMX tiles and the kernel's permission | bf16 |
| ``avx512_bf16`` | cooperlake | AVX-512 F/BW/DQ/VL/VNNI/BF16 | bf16 (bf16 KV), 16-bit fixed point (int8 KV) |
| ``avx512`` | skylake-avx512 | AVX-512 F/BW/DQ/VL | fp32 |
| ``avx2`` | haswell | AVX2, FMA, F16C | fp32 |
| ``portable`` | the machine's baseline | nothing | fp32 |

The variable ``CPU_KERNELS_ISA`` (one of the names above) overrides the choice; a level that this machine cannot run
is refused with the reason.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

LEVELS = ("amx_bf16", "avx512_bf16", "avx512", "avx2", "portable")
ENVIRONMENT = "CPU_KERNELS_ISA"

_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")
_NEEDS = {
    "amx_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16"),
    "avx512_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}
_TARGETS = {"amx_bf16": "sapphirerapids", "avx512_bf16": "cooperlake", "avx512": "skylake-avx512", "avx2": "haswell"}


@dataclass(frozen=True, slots=True)
class IsaChoice:
    """The level in use.

    Attributes
    ----------
    level : str
        One of `LEVELS`.
    reason : str
        One sentence for people.
    available : tuple of str
        All levels this machine can run, best first.
    missing : tuple of (str, str)
        Each other level with what it lacks.
    """

    level: str
    reason: str
    available: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"isa level {self.level!r} is unknown; known levels: {', '.join(LEVELS)}")


def is_x86() -> bool:
    """Whether this machine's instructions are those of x86-64."""
    return platform.machine() in ("x86_64", "AMD64")


def target_cpu(level: str) -> str:
    """Return the LLVM processor name that a level is compiled for (the same on every machine)."""
    if level != "portable":
        return _TARGETS[level]
    return "x86-64" if is_x86() else "generic"


@lru_cache(maxsize=4)
def cpu_flags(cpuinfo: str | None = None) -> frozenset[str]:
    """Read the processor's feature flags as Linux names them (empty elsewhere)."""
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text() if path.exists() else ""
    for line in cpuinfo.splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def what_is_missing(level: str, flags: frozenset[str]) -> str:
    """Say what this machine lacks for `level`; empty when nothing."""
    lacking = [f for f in _NEEDS[level] if f not in flags]
    if lacking:
        return "the processor lacks " + ", ".join(lacking)
    if level == "amx_bf16" and not tile_permission():
        return "the kernel did not grant this process the use of AMX tiles (arch_prctl)"
    return ""


@lru_cache(maxsize=1)
def tile_permission() -> bool:
    """Ask Linux for the use of AMX tile data, once; the permission then holds for all threads of the process.

    The request is ``arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)``; without it the first tile instruction
    would end the process.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None)
    arguments = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    return int(libc.syscall(*(ctypes.c_long(x) for x in arguments))) == 0


def detect(flags: frozenset[str] | None = None, override: str | None = None) -> IsaChoice:
    """Choose the level for this machine.

    Parameters
    ----------
    flags : frozenset of str, optional
        Feature flags to judge instead of this machine's (for tests).
    override : str, optional
        A level asked for; defaults to the environment variable ``CPU_KERNELS_ISA``.

    Raises
    ------
    ValueError
        If the level asked for is unknown or cannot run here.
    """
    asked = os.environ.get(ENVIRONMENT, "") if override is None else override
    return _detect_here(asked) if flags is None else _judge(flags, asked)


@lru_cache(maxsize=len(LEVELS) + 1)
def _detect_here(asked: str) -> IsaChoice:
    """Judge this machine once per level asked for: plans and appends ask each time, and its flags do not change."""
    return _judge(cpu_flags(), asked)


def _judge(flags: frozenset[str], asked: str) -> IsaChoice:
    lacks = {level: what_is_missing(level, flags) for level in LEVELS}
    available = tuple(level for level in LEVELS if not lacks[level])
    missing = tuple((level, why) for level, why in lacks.items() if why)
    if not asked:
        reason = f"best of what this processor can run: {', '.join(available)}"
        return IsaChoice(available[0], reason, available, missing)
    if asked not in LEVELS:
        raise ValueError(f"{ENVIRONMENT}={asked!r} is unknown; known levels: {', '.join(LEVELS)}")
    if lacks[asked]:
        raise ValueError(f"isa {asked!r} cannot run here: {lacks[asked]}; available: {', '.join(available)}")
    return IsaChoice(asked, f"asked for by name ({ENVIRONMENT} or isa=)", available, missing)
