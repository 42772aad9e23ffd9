"""What must be true before Triton is imported, and whether its interpreter runs the kernels."""

import atexit
import os
import shutil
import tempfile

# Triton 3.9 warns on every compile while this is unset, and 3.10 changes the default. Fused multiply-add stays on:
# it is the more accurate choice and what the compile gate's figures were taken with.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# For a user without a home folder Triton would write into a folder named "~".
if os.path.expanduser("~") == "~" and not {"TRITON_HOME", "TRITON_CACHE_DIR"} & set(os.environ):
    os.environ["TRITON_HOME"] = tempfile.mkdtemp(prefix="triton-")
    atexit.register(shutil.rmtree, os.environ["TRITON_HOME"], ignore_errors=True)

from triton.runtime.jit import JITFunction  # noqa: E402

from gpu_kernels.bodies import merge  # noqa: E402


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` when Triton was first imported)."""
    return not isinstance(merge.merge, JITFunction)
