"""Other libraries as processes of their own environments, asked for one timed call at a time."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import TracebackType

from cpu_kernels.bench.cases import Case

ENVIRONMENTS = {"vllm": "vllm", "torch": "vllm", "ipex": "ipex"}
SETTLE_S = 0.01  # the peers' OpenMP threads spin about a millisecond after a call; then they leave the cores to us


class Peer:
    """One library on one case.

    Parameters
    ----------
    name : str
        ``vllm``, ``torch`` or ``ipex``.
    folder : Path
        Folder of environments.
    case : Case
    threads : int

    Raises
    ------
    RuntimeError
        If the library does not start, with the end of what it said.
    """

    def __init__(self, name: str, folder: Path, case: Case, threads: int) -> None:
        python = folder / ENVIRONMENTS[name] / "bin" / "python"
        shape = {"group": case.group, "heads": case.heads, "dim": case.dim, "page": case.page, "lens": case.lens}
        command = [str(python), str(Path(__file__).with_name("peer_server.py")), name]
        self.name = name
        self._process = subprocess.Popen(
            [*command, json.dumps({**shape, "threads": threads})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.rel_err = float(json.loads(self._line())["rel_err"])

    @staticmethod
    def available(folder: Path | None) -> list[str]:
        """Names of the libraries whose environment is there."""
        if folder is None:
            return []
        return [name for name, place in ENVIRONMENTS.items() if (folder / place / "bin" / "python").exists()]

    def _line(self) -> str:
        assert self._process.stdout is not None and self._process.stderr is not None
        while True:
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"peer {self.name} ended: {self._process.stderr.read()[-2000:]}")
            if line.lstrip().startswith("{") or line.strip().isdigit():  # libraries print greetings
                return line

    def call_ns(self) -> int:
        """Time one call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        took = int(self._line())
        time.sleep(SETTLE_S)
        return took

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(10)
