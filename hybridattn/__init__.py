"""hybridattn: parallel CPU-GPU attention in LLM decode.

Names are exported lazily (PEP 562): importing a submodule loads neither torch nor any kernel.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hybridattn.core.extras import why_missing

if TYPE_CHECKING:
    from hybridattn.analysis.sweep_results import open_results
    from hybridattn.core.params import SamplingParams
    from hybridattn.engine.call import Output
    from hybridattn.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Output", "SamplingParams", "__version__", "open_results"]

_HOMES = {
    "LLM": "hybridattn.llm",
    "Output": "hybridattn.engine.call",
    "SamplingParams": "hybridattn.core.params",
    "open_results": "hybridattn.analysis.sweep_results",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            return getattr(importlib.import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if (why := why_missing(error)) is None:
                raise
            raise ModuleNotFoundError(f"hybridattn.{name}: {why}", name=error.name) from error
    raise AttributeError(f"module 'hybridattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
