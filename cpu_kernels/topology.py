"""What this machine lets us use: allowed CPUs, quota, physical cores, NUMA nodes. The root can be a fake one."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_kernels.arrays import whole

MAX_WORKERS = 4096  # of a pool; what asks for more has mistaken something else for it


@dataclass(frozen=True, slots=True)
class Topology:
    """CPUs as the process sees them.

    Attributes
    ----------
    cpu_model : str
        Name of the processor.
    allowed : tuple of int
        CPUs of the affinity mask.
    quota : int or None
        Whole CPUs that the cgroup quota is worth, rounded down, at least 1; None without a quota.
    order : tuple of int
        `allowed` with one CPU of each physical core first, then their siblings.
    num_cores : int
        Physical cores among `allowed`.
    numa : tuple of (int, tuple of int)
        NUMA nodes with their allowed CPUs.
    huge_pages : str
        Transparent huge page mode (``always``, ``madvise``, ``never`` or ``unknown``).
    """

    cpu_model: str
    allowed: tuple[int, ...]
    quota: int | None
    order: tuple[int, ...]
    num_cores: int
    numa: tuple[tuple[int, tuple[int, ...]], ...]
    huge_pages: str

    def __post_init__(self) -> None:
        if not self.allowed:
            raise ValueError("the affinity mask allows no CPU")
        if sorted(self.order) != sorted(self.allowed):
            raise ValueError(f"order {self.order} is not an ordering of the allowed CPUs {self.allowed}")
        if self.quota is not None and self.quota < 1:
            raise ValueError(f"quota is {self.quota}, expected at least 1")

    @property
    def usable(self) -> int:
        """CPUs worth a worker: physical cores, bounded by the quota."""
        return self.num_cores if self.quota is None else min(self.num_cores, self.quota)

    def node_of(self, cpu: int) -> int:
        """NUMA node of a CPU, 0 where unknown."""
        return next((node for node, cpus in self.numa if cpu in cpus), 0)

    def node_index(self, cpu: int) -> int:
        """Place of a CPU's NUMA node among the nodes, 0 where unknown."""
        return next((i for i, (_, cpus) in enumerate(self.numa) if cpu in cpus), 0)


def parse_list(text: str) -> tuple[int, ...]:
    """Parse ``0-3,8`` as Linux writes CPU lists."""
    out: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            out.extend(range(int(first), int(last or first) + 1))
    return tuple(out)


def read(root: str | Path = "/") -> Topology:
    """Read the topology from the files below `root`.

    Parameters
    ----------
    root : path
        ``/``, or a folder that holds the same files (``proc/self/status``, ``sys/fs/cgroup/...``). What is absent is
        taken as unlimited, one thread a core, one NUMA node.
    """
    base = Path(root)
    allowed = _allowed(base)
    first: dict[tuple[int, ...], int] = {}
    for cpu in allowed:
        first.setdefault(_core_of(base, cpu), cpu)
    leaders = tuple(first.values())
    order = leaders + tuple(c for c in allowed if c not in leaders)
    numa = _numa(base, allowed)
    return Topology(_model(base), allowed, _quota(base), order, len(leaders), numa, _huge_pages(base))


def worker_cpus(topology: Topology, num_workers: int | None = None, reserve: int = 0) -> tuple[int, ...]:
    """Choose one CPU per worker, physical cores first, leaving the first `reserve` cores to the driver.

    Parameters
    ----------
    topology : Topology
    num_workers : int, optional
        Default: the usable CPUs less `reserve`, at least one. A larger number is obeyed, with a warning.
    reserve : int
        Cores for the driver and the tokenizer.

    Raises
    ------
    ValueError
        If `num_workers` is below 1 or `reserve` is negative.
    """
    if reserve < 0:
        raise ValueError(f"reserve is {reserve}, expected 0 or more")
    sensible = max(1, topology.usable - reserve)
    count = sensible if num_workers is None else check_workers(num_workers)
    if count > sensible:
        warnings.warn(
            f"num_workers {count} is more than the {sensible} CPUs that this process can use beside {reserve} reserved "
            f"ones (mask of {len(topology.allowed)}, {topology.num_cores} cores, quota {topology.quota})",
            stacklevel=2,
        )
    free = topology.order[reserve:] or topology.order
    return tuple(_evenly(topology, free, count)[i % min(count, len(free))] for i in range(count))


def check_workers(num_workers: Any) -> int:
    """The number of a pool's threads, or a sentence."""
    count = whole("num_workers", num_workers)
    if not 1 <= count <= MAX_WORKERS:
        raise ValueError(f"num_workers is {count}, expected at least 1 and at most {MAX_WORKERS}")
    return count


def _evenly(topology: Topology, free: tuple[int, ...], count: int) -> list[int]:
    """The first `count` of `free`, or fewer if it is shorter, taken from the NUMA nodes in turn, physical cores first.

    Memory is spread over all nodes, so 42 of 48 cores on two nodes are 21 and 21, not 24 and 18.
    """
    leaders = set(topology.order[: topology.num_cores])
    taken: list[int] = []
    for cores in (True, False):
        nodes: dict[int, list[int]] = {}
        for cpu in free:
            if (cpu in leaders) == cores:
                nodes.setdefault(topology.node_of(cpu), []).append(cpu)
        for turn in range(max(map(len, nodes.values()), default=0)):
            taken += [cpus[turn] for cpus in nodes.values() if turn < len(cpus)]
    return sorted(taken[:count], key=free.index)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _model(base: Path) -> str:
    for line in _text(base / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def _allowed(base: Path) -> tuple[int, ...]:
    """Of the calling thread: the first one of the process may keep to fewer for a while."""
    for line in (_text(base / "proc/thread-self/status") or _text(base / "proc/self/status")).splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse_list(line.split(":", 1)[1])
    return tuple(range(os.cpu_count() or 1))


def _core_of(base: Path, cpu: int) -> tuple[int, ...]:
    """Name a physical core by the threads on it."""
    text = _text(base / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return parse_list(text) or (cpu,)


def _numa(base: Path, allowed: tuple[int, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    nodes = []
    for path in sorted((base / "sys/devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        cpus = tuple(c for c in parse_list(_text(path / "cpulist")) if c in allowed)
        if cpus:
            nodes.append((int(path.name[4:]), cpus))
    return tuple(nodes) or ((0, allowed),)


def _huge_pages(base: Path) -> str:
    text = _text(base / "sys/kernel/mm/transparent_hugepage/enabled")
    return text.split("[")[1].split("]")[0] if "[" in text else "unknown"


def _quota(base: Path) -> int | None:
    """Smallest CPU quota on the way up from our cgroup, in whole CPUs rounded down (at least 1)."""
    shares = [q for q in (*_quotas_v2(base), *_quotas_v1(base)) if q is not None]
    return max(1, int(min(shares))) if shares else None


def _group_paths(base: Path, controller: str) -> list[Path]:
    """Folders of our cgroup below the controller's mount, from the inside out."""
    inner = ""
    for line in _text(base / "proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        if (controller == "" and number == "0") or (controller and controller in names.split(",")):
            inner = path.strip("/")
    steps = [p for p in inner.split("/") if p]
    mount = base / "sys/fs/cgroup" / controller
    return [mount.joinpath(*steps[:n]) for n in range(len(steps), -1, -1)]


def _quotas_v2(base: Path) -> list[float | None]:
    out: list[float | None] = []
    for folder in _group_paths(base, ""):
        fields = _text(folder / "cpu.max").split()
        if len(fields) == 2 and fields[0] != "max":
            out.append(int(fields[0]) / int(fields[1]))
    return out


def _quotas_v1(base: Path) -> list[float | None]:
    out: list[float | None] = []
    for folder in _group_paths(base, "cpu"):
        quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
        if quota and period and int(quota) > 0:
            out.append(int(quota) / int(period))
    return out
