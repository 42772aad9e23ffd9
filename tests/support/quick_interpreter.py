"""Triton's interpreter without its repeated patching.

    launch                 | patch triton.language ----------------------------------------- restore |
    each device function      | patch the patched: looks at 200 names, finds nothing to change |

Which names are builtins it finds out anew at every call of a device function; that took a third of the kernels' tests.
"""

from __future__ import annotations

import inspect
from typing import Any


def patch_once(interpreter: Any) -> None:
    """``interpreter`` is triton.runtime.interpreter; a version that does it in another way stays as it is."""
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "tl")):
        return
    patch, tl = interpreter._patch_lang, interpreter.tl

    def patch_what_is_not(fn: Any) -> Any:
        langs = [v for v in fn.__globals__.values() if inspect.ismodule(v) and v in (tl, tl.core)]
        in_launch = getattr(tl.tensor.__repr__, "__module__", "") == interpreter.__name__  # its change of the class
        if in_launch and langs and not any(tl.core.is_builtin(lang.load) for lang in langs):
            return interpreter._LangPatchScope()
        return patch(fn)

    patch_what_is_not.slow = patch  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_what_is_not
