"""hybridattn: parallel CPU-GPU attention in LLM decode.

Names are exported lazily (PEP 562): importing a submodule loads neither torch nor any kernel.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridattn.runtime.call import Output
    from hybridattn.runtime.llm import LLM
    from hybridattn.runtime.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Output", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "hybridattn.runtime.llm",
    "Output": "hybridattn.runtime.call",
    "SamplingParams": "hybridattn.runtime.params",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hybridattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
