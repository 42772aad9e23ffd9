"""Whether this machine has what the device ``cuda`` needs. Imports nothing of it, for the doctor's sake."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def why_no_cuda() -> str | None:
    """The reason why ``cuda`` is refused, in one clause; None where it can be used."""
    try:
        import torch
    except (ImportError, OSError) as error:  # one of its libraries is missing, or has no room
        return f"torch cannot be loaded: {error}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which compiles its kernels, is not installed"
    return None


def why_no_build() -> str | None:
    """What Triton lacks to build the C module with which it launches its first kernel (later ones find it in Triton's
    cache); None where nothing is missing."""
    compiler = os.environ.get("CC") or "gcc"
    if shutil.which(compiler) is None and (compiler != "gcc" or shutil.which("clang") is None):
        return f"the C compiler {compiler} is not installed"
    header = Path(sysconfig.get_paths("posix_prefix")["include"], "Python.h")
    return None if header.exists() else f"{header} is missing (the package python3-dev, or the like, brings it)"
