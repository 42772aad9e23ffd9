"""Whether this machine has what the device ``cuda`` needs. Imports nothing of it, for the doctor's sake."""

from __future__ import annotations

import importlib.util


def why_no_cuda() -> str | None:
    """The reason why ``cuda`` is refused, in one clause; None where it can be used."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which compiles its kernels, is not installed"
    return None
