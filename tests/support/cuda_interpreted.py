"""Run the stages of a CUDA card with the real Triton launchers, interpreted on the CPU, and print the token ids.

A program of its own: whether Triton interprets is decided once per process, when it is first imported.
"""

from __future__ import annotations

import importlib
import json
import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

from dataclasses import replace  # noqa: E402

import torch  # noqa: E402
from fake_cuda import FakeCuda  # noqa: E402
from quick_interpreter import patch_once  # noqa: E402
from scaled_model import scaled  # noqa: E402

import gpu_kernels  # noqa: E402
from gpu_kernels.launch import launch  # noqa: E402
from hybridattn.core.config import EngineConfig  # noqa: E402
from hybridattn.core.params import SamplingParams  # noqa: E402
from hybridattn.core.trace import violations  # noqa: E402
from hybridattn.devices.cuda import CudaDevice  # noqa: E402
from hybridattn.devices.host import HostDevice  # noqa: E402
from hybridattn.engine.engine import Engine  # noqa: E402
from hybridattn.models.load import load  # noqa: E402
from hybridattn.models.torch_stages import TorchStages  # noqa: E402
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly  # noqa: E402
from hybridattn.policies.split import Split  # noqa: E402

CONFIG = EngineConfig(
    gpu_kv_blocks=8, cpu_kv_blocks=8, page_size=16, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=24
)
JOBS = [([3, 1, 4, 1, 5], 3), ([9, 2, 7] * 11, 3), ([5, 3, 5, 8, 9, 7, 9] * 2, 4)]

SPLIT = Split(cold_share=0.6, even_if_it_fits=True)


def run(device, model, policy, moves: bool = False, jobs=JOBS) -> dict:
    """With ``moves``, a request moves after each token, if it can."""
    engine = Engine(TorchStages(model, device, CONFIG, "fp32"), device, policy, CONFIG)
    requests = [engine.add(p, n, SamplingParams(max_tokens=n, seed=i)) for i, (p, n) in enumerate(jobs)]
    begun = 0
    while engine.unfinished:
        for event in engine.step():
            request = event.request
            begun += moves and engine.move(request.request_id, "cpu" if request.tier == "gpu" else "gpu")
    found = {"tokens": [r.token_ids[r.num_prompt :] for r in requests], "violations": violations(engine.drain())}
    found["moves"] = begun
    device.close()
    return found


def kind_of(value, plain: bool):
    """What Triton compiles for: dtype or type, whether 16 divides it, and whether it is 1."""
    if isinstance(value, torch.Tensor):
        return value.dtype, plain or value.data_ptr() % 16 == 0
    return type(value), plain or isinstance(value, float) or (value % 16 == 0, value == 1)


def watch_launches() -> set:
    """What is launched from now on, as what Triton would compile."""
    kept: set = set()

    def watched(kernel, grid, config, device, *arguments):
        options = getattr(kernel, "kwargs", {})
        plain = {n for key in ("do_not_specialize", "do_not_specialize_on_alignment") for n in options.get(key) or ()}
        kinds = tuple(kind_of(v, n in plain) for n, v in zip(kernel.arg_names, arguments, strict=False))
        if 0 not in grid:
            kept.add((kernel.fn.__name__, kinds, tuple(config.constants.items())))
        return launch(kernel, grid, config, device, *arguments)

    for name in ("decode", "prefill", "kv_cache", "merge", "fused", "cpu_layout"):
        importlib.import_module(f"gpu_kernels.{name}").launch = watched
    return kept


def compiled_late(model) -> list:
    """Kernels that a call launches and the opening did not, by name. Splits are short, so that a row has several."""
    gpu_kernels.DEFAULT_SPLIT_TOKENS = 64
    kept, device = watch_launches(), CudaDevice(runtime=FakeCuda(4), graphs=False)
    config = replace(CONFIG, max_model_len=80, gpu_kv_blocks=16)
    engine = Engine(TorchStages(model, device, config, "fp32"), device, AsyncOverlap(0.5), config)
    opened = set(kept)
    for prompt in (70, 5, 30):
        engine.add([3, 1, 4, 1, 5, 9, 2] * (prompt // 7) + [6], 3, SamplingParams(max_tokens=3, seed=1))
    while engine.unfinished:
        for event in engine.step():
            engine.move(event.request.request_id, "cpu" if event.request.tier == "gpu" else "gpu")
    device.close()
    return [len(opened), sorted(str(k) for k in kept - opened)]


if __name__ == "__main__":
    patch_once(importlib.import_module("triton.runtime.interpreter"))
    tiny = load("dummy:tiny").config
    config = replace(tiny, shape=replace(tiny.shape, num_layers=2), layer_windows=(None, 20))
    model = scaled(config)
    print(
        json.dumps(
            {
                "host": run(HostDevice(), model, GpuOnly()),
                "cuda": run(CudaDevice(runtime=FakeCuda(2)), model, AsyncOverlap(0.7)),
                "split": run(CudaDevice(runtime=FakeCuda(4)), model, SPLIT, jobs=JOBS[1:2]),
                "moved": run(CudaDevice(runtime=FakeCuda(3)), model, AsyncOverlap(), moves=True),
                "late": compiled_late(model),
            }
        )
    )
