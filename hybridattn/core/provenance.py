"""Which commit of the project produced a result."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git_commit() -> str:
    """Short commit id of the checkout of this file, with ``-dirty`` for local changes; ``unknown`` outside of one."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"
