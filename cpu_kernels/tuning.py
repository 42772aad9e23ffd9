"""What suits a processor: how far and how densely the kernels fetch ahead, how the work is cut, which pages are best.

None of it changes a result: prefetches are hints, and a row's sums do not depend on who computes which part of it. (The
page size does, within the error bound; it is an argument of `KVPages`, and `best_page_size` says what to give.)

Looked for in this order: what `python -m cpu_kernels.tune` measured on this processor, kept beside the compiled code
(`jit.cache_dir`); the row of `TABLES` for its vendor and family; `TILES` with AMX; `TABLE`. The variable
``CPU_KERNELS_TUNING`` set to ``table`` leaves the measured one out.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

from cpu_kernels.jit import cache_dir

ENVIRONMENT = "CPU_KERNELS_TUNING"
PAGE_SIZES = (16, 32, 64, 128)
_VERSION = 1  # of what the fields mean


@dataclass(frozen=True, slots=True)
class Tuning:
    """Parameters of generated kernels and of the division of work.

    Attributes
    ----------
    fetch_light, fetch_heavy, fetch_tiles : int
        Bytes from one prefetch to the next where a line of memory is little arithmetic (few query heads), where it is
        much, and where AMX tiles multiply: multiples of 64; 0 leaves it to the processor.
    cache_level : int
        Cache that prefetches aim at, as LLVM's locality: 3 the first, 2 the second, 1 the third.
    near_bytes : int
        Prefetches go half a block (all of K, or all of V, of a page and head) ahead where that is at least this much,
        else a whole block.
    near_narrow : int
        The same for dtypes of one byte, which are more arithmetic per line.
    run_group, run_heads : int
        Groups up to `run_group` walk the heads of a page in a row, at most `run_heads` of them: one run of memory.
    chunk_bytes : int
        K and V that a worker claims at once, at most.
    page_size : int
        Tokens of a page that give the most throughput.
    """

    fetch_light: int = 128
    fetch_heavy: int = 64
    fetch_tiles: int = 64
    cache_level: int = 2
    near_bytes: int = 8 << 10
    near_narrow: int = 8 << 10
    run_group: int = 3
    run_heads: int = 16
    chunk_bytes: int = 512 << 10
    page_size: int = 32

    def __post_init__(self) -> None:
        for name in ("fetch_light", "fetch_heavy", "fetch_tiles"):
            if getattr(self, name) < 0 or getattr(self, name) % 64:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a multiple of 64, or 0")
        if self.cache_level not in (1, 2, 3) or self.page_size not in PAGE_SIZES:
            raise ValueError(f"cache_level {self.cache_level} or page_size {self.page_size} is not one there is")
        if min(self.near_bytes, self.near_narrow, self.run_group) < 0 or min(self.run_heads, self.chunk_bytes) < 1:
            raise ValueError(f"near_bytes, run_group, run_heads, chunk_bytes must be positive, got {self}")


TABLE = Tuning()  # measured on Zen 4, one thread a core
# By vendor and family, model range of /proc/cpuinfo. What is not measured keeps the constants of `TABLE`.
TABLES: tuple[tuple[str, int, range, Tuning], ...] = (
    ("AuthenticAMD", 25, range(0, 256), TABLE),  # Zen 3 and 4
    ("AuthenticAMD", 26, range(0, 256), Tuning(page_size=128)),  # Zen 5: pages of 128 gave 1.24 times those of 32
)
# With AMX, whatever model a guest names: pages of 128 gave shares of 0.90 and 0.87 of the read loop at groups 4 and 8,
# those of 32 0.82 and 0.79, and fetching every fourth line was 1.12 times as fast as every line. Fetched a whole
# block ahead, fp8 is 1.08 to 1.14 times as fast, int8 0.99 to 1.09 (docs/performance.md).
TILES = Tuning(fetch_tiles=256, near_narrow=1 << 20, page_size=128)


@dataclass(frozen=True, slots=True)
class Processor:
    """Who a processor is, as /proc/cpuinfo says, and whether it has AMX; empty strings and zeros where it does not."""

    vendor: str
    family: int
    model: int
    stepping: int
    name: str
    tiles: bool = False

    def __post_init__(self) -> None:
        if min(self.family, self.model, self.stepping) < 0:
            raise ValueError(f"family, model, stepping must not be negative, got {self}")

    @property
    def fingerprint(self) -> str:
        """A name for files: the processor and what this version's parameters mean."""
        return hashlib.sha256(repr((_VERSION, self)).encode()).hexdigest()[:16]


def processor(cpuinfo: str | None = None) -> Processor:
    """Read who this processor is."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text()
        except OSError:
            cpuinfo = ""
    found: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())

    def number(key: str) -> int:
        return int(found[key]) if found.get(key, "").isdigit() else 0

    return Processor(
        found.get("vendor_id", ""), number("cpu family"), number("model"), number("stepping"),
        found.get("model name", ""), "amx_bf16" in found.get("flags", "").split(),
    )  # fmt: skip


def from_table(who: Processor) -> Tuning:
    """The table's parameters for a processor."""
    for vendor, family, models, tuning in TABLES:
        if (vendor, family) == (who.vendor, who.family) and who.model in models:
            return tuning
    return TILES if who.tiles else TABLE


def path_of(folder: Path, who: Processor) -> Path:
    """Where the measured parameters of a processor are kept."""
    return folder / f"tuning-{who.fingerprint}.json"


def load(folder: Path | None, who: Processor) -> Tuning | None:
    """Read measured parameters; None if there are none, or none that can be understood."""
    if folder is None:
        return None
    try:
        values = json.loads(path_of(folder, who).read_text())["tuning"]
        return Tuning(**{f.name: int(values[f.name]) for f in fields(Tuning)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(folder: Path | None, who: Processor, tuning: Tuning, log: list[str]) -> bool:
    """Keep measured parameters and how they were found; False where there is no folder, or none to write to."""
    if folder is None:
        return False
    path = path_of(folder, who)
    text = json.dumps({"processor": asdict(who), "tuning": asdict(tuning), "log": log}, indent=1)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text + "\n")
        os.replace(part, path)
    except OSError:
        return False
    current.cache_clear()
    return True


@lru_cache(maxsize=1)
def current() -> tuple[Tuning, str]:
    """Parameters in use, and where they come from in one sentence."""
    who = processor()
    if os.environ.get(ENVIRONMENT, "") != "table":
        folder = cache_dir()
        found = load(folder, who)
        if folder is not None and found is not None:
            return found, f"measured on this processor ({path_of(folder, who)})"
    model = f"model {who.model}" + (" with AMX" if who.tiles else "")
    return from_table(who), f"table for {who.vendor or 'an unknown vendor'}, family {who.family}, {model}"


def best_page_size() -> int:
    """Tokens of a page that give the most throughput on this processor, as far as is known."""
    return current()[0].page_size
