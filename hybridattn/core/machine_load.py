"""What others do on the cpus that this process may use: whether a measured time can be believed."""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY = 0.15  # share of the cpus from which on a measured row is marked
SAMPLE_S = 0.5


class OthersLoad:
    """The share of this process's cpus that other processes use, from its making on.

    Counts the system's ticks on those cpus (10 ms each) and takes off what this process and its ended children used.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._began = (time.monotonic(), self._busy_s(), _own_s())

    def share(self) -> float | None:
        """0 to 1; None where the system does not tell, or before two ticks of every cpu."""
        wall_s, busy_s, own_s = self._began
        now, wall_s = self._busy_s(), time.monotonic() - wall_s
        if now is None or busy_s is None or wall_s < 0.02:
            return None
        share = (now - busy_s - (_own_s() - own_s)) / (wall_s * len(_cpus()))
        return min(max(share, 0.0), 1.0)

    def _busy_s(self) -> float | None:
        try:
            lines = [line.split() for line in self._stat.read_text().splitlines() if line.startswith("cpu")]
        except OSError:
            return None
        mine = {f"cpu{n}" for n in _cpus()}
        found = [sum(map(int, (*w[1:4], *w[6:9]))) for w in lines if w[0] in mine]  # all but idle, waiting and guests
        return sum(found) / os.sysconf("SC_CLK_TCK") if found else None


def _cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _own_s() -> float:
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def others_now() -> str:
    """A sentence about this moment, after half a second of looking."""
    load = OthersLoad()
    time.sleep(SAMPLE_S)
    return said(load.share())


def said(share: float | None) -> str:
    """How busy others keep the machine, in words."""
    if share is None:
        return "this system does not tell how busy it is"
    note = "" if share < BUSY else ": what is measured now is slower than on a machine at rest, and less certain"
    return f"other work uses {share:.0%} of the {len(_cpus())} cpus{note}"
