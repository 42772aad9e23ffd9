"""Busy processes beside a measured point: work that competes for the cores, as another tenant would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))\n"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """``count`` processes that compute for the time of a with block; they also end when this process is killed."""
    processes = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
