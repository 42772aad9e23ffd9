"""The ground that the interpreter tests stand on."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_kernels import Capability, append_kv, capability_of, paged_decode_attention, rms_norm
from gpu_kernels.bodies import decode
from gpu_kernels.environment import interpreted

ROOT = Path(__file__).parents[2]
GUARDED = """
import pytest, torch
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_unmarked(dtype): pass
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_marked(dtype): assert False
@pytest.mark.parametrize("dtype", [torch.float16])
def test_half(dtype): pass
"""


def only_interpreted() -> None:
    if not interpreted():
        pytest.skip("says something about the interpreter alone")


def clean_environment(**changes: str) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTEST_"))}
    return environment | {"PYTHONPATH": str(ROOT)} | changes


def test_the_kernels_run_in_the_mode_asked_for() -> None:
    kind = "InterpretedFunction" if os.environ.get("TRITON_INTERPRET", "1") == "1" else "JITFunction"
    assert type(decode.attend_split).__name__ == kind


def test_conftest_refuses_bf16_in_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_guarded.py").write_text(GUARDED)
    support = Path(__file__).parents[1] / "support"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {support}\nmarkers = gpu: needs a GPU\n")
    environment = clean_environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert "1 failed, 1 passed, 1 skipped" in done.stdout or "1 passed, 1 skipped, 1 error" in done.stdout, done.stdout
    assert "bf16 is wrong in Triton's interpreter: mark the test gpu" in done.stdout


def test_patching_once_gives_the_bits_of_patching_at_every_call(
    make_batch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_interpreted()
    interpreter = importlib.import_module("triton.runtime.interpreter")
    quick = interpreter._patch_lang
    before = {name: getattr(interpreter.tl, name) for name in dir(interpreter.tl)}
    found = []
    for patch in (quick, quick.slow):
        monkeypatch.setattr(interpreter, "_patch_lang", patch)
        for dtype in (torch.float32, torch.int8):
            batch = make_batch([17, 0, 97], num_kv_heads=2, head_dim=48, dtype=dtype)
            q = torch.randn(3, 6, 48, generator=torch.Generator().manual_seed(1))
            tensors, options = batch.tensors(), {"split_tokens": 64, "logits_soft_cap": 5.0, **batch.scales}
            out, _ = paged_decode_attention(q, *tensors, out=torch.full_like(q, torch.nan), **options)
            found.append(out)
            assert {name: getattr(interpreter.tl, name) for name in before} == before  # each launch restores
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert not torch.isnan(torch.stack(found)).any()


def test_launchers_refuse_bf16_in_the_interpreter() -> None:
    only_interpreted()
    cache = torch.zeros(2, 1, 16, 32, dtype=torch.bfloat16)
    one, row = torch.ones(1, 1, dtype=torch.int32), torch.ones(1, 1, 32, dtype=torch.bfloat16)
    calls: list[Any] = [
        lambda: paged_decode_attention(row, cache, cache, one, one[0]),
        lambda: append_kv(row, row, cache, cache, torch.tensor([0])),
        lambda: append_kv(row.float(), row.float(), cache, cache, torch.tensor([0])),
        lambda: rms_norm(row[0], row[0, 0], 1e-6),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="bfloat16 under Triton's interpreter gives wrong numbers"):
            call()


def test_importing_is_silent_brings_no_other_package_and_cpu_tensors_are_refused() -> None:
    program = (
        "import sys, gpu_kernels as g, gpu_kernels.compile_gate, torch; z = torch.zeros(1, 32)\n"
        "mine = ('hybridattn', 'cpu_kernels', 'transformers', 'numba', 'hydra', 'wandb')\n"
        "print([name for name in mine if name in sys.modules])\n"
        "try: g.rms_norm(z, z[0], 1e-6)\n"
        "except RuntimeError as error: print(error)"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_environment())
    first, second = done.stdout.splitlines()
    assert first == "[]" and "the kernels run on CUDA tensors and got 'cpu'" in second and done.stderr == ""


def test_capability_decides() -> None:
    old, new = Capability(75), Capability(90)
    assert (old.bf16, old.half, new.bf16, new.half) == (False, torch.float16, True, torch.bfloat16)
    assert (old.shared_bytes, Capability(86).shared_bytes, new.shared_bytes) == (65_536, 101_376, 232_448)
    assert Capability(92).shared_bytes == new.shared_bytes
    new.refuse_dtype("q", torch.bfloat16)
    old.refuse_dtype("q", torch.float16)
    with pytest.raises(ValueError, match="q: bfloat16 needs compute capability 8.0 or newer, this device has 7.5"):
        old.refuse_dtype("q", torch.bfloat16)
    with pytest.raises(ValueError, match="sm: compute capability 7.0 is older than 7.5"):
        Capability(70)
    if interpreted():
        assert capability_of(torch.device("cpu")).interpreter
