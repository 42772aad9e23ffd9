"""Which extra of the package brings what, for the sentence about a package that is not installed."""

from __future__ import annotations

# What the extra `main` brings, without which no text is generated.
MAIN = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "psutil")
EXTRAS = {
    "main": (*MAIN, "triton", "jinja2", "accelerate", "rich"),
    "experiments": ("hydra", "omegaconf", "wandb", "pandas", "pyarrow", "matplotlib"),
    "numba": ("numba",),
}


def why_missing(error: BaseException | None) -> str | None:
    """What to install, where ``error`` or what it came from is the failed import of something in an extra; what its
    own loading failed with, where it is installed."""
    while error is not None:
        package = (getattr(error, "name", None) or "").partition(".")[0]
        extra = next((extra for extra, names in EXTRAS.items() if package in names), None)
        if isinstance(error, ModuleNotFoundError) and extra is not None:
            return f"{package} is not installed: pip install 'hybridattn[{extra}]'"
        if isinstance(error, ImportError) and extra is not None:
            return f"{package} is installed and cannot be loaded: {error}"
        error = error.__cause__ or error.__context__
    return None
