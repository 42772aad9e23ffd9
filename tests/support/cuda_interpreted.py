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

from fake_cuda import FakeCuda  # noqa: E402
from quick_interpreter import patch_once  # noqa: E402
from scaled_model import scaled  # noqa: E402

from hybridattn.core.config import EngineConfig  # noqa: E402
from hybridattn.core.params import SamplingParams  # noqa: E402
from hybridattn.core.trace import violations  # noqa: E402
from hybridattn.devices.cuda import CudaDevice  # noqa: E402
from hybridattn.devices.host import HostDevice  # noqa: E402
from hybridattn.engine.engine import Engine  # noqa: E402
from hybridattn.models.load import load  # noqa: E402
from hybridattn.models.torch_stages import TorchStages  # noqa: E402
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly  # noqa: E402

CONFIG = EngineConfig(
    gpu_kv_blocks=8, cpu_kv_blocks=8, page_size=16, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=24
)
JOBS = [([3, 1, 4, 1, 5], 3), ([9, 2, 7] * 11, 3), ([5, 3, 5, 8, 9, 7, 9] * 2, 4)]


def run(device, model, policy, moves: bool = False) -> dict:
    """With ``moves``, a request moves after each token, if it can."""
    engine = Engine(TorchStages(model, device, CONFIG, "fp32"), device, policy, CONFIG)
    requests = [engine.add(p, n, SamplingParams(max_tokens=n, seed=i)) for i, (p, n) in enumerate(JOBS)]
    begun = 0
    while engine.unfinished:
        for event in engine.step():
            request = event.request
            begun += moves and engine.move(request.request_id, "cpu" if request.tier == "gpu" else "gpu")
    found = {"tokens": [r.token_ids[r.num_prompt :] for r in requests], "violations": violations(engine.drain())}
    found["moves"] = begun
    device.close()
    return found


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
                "moved": run(CudaDevice(runtime=FakeCuda(3)), model, AsyncOverlap(), moves=True),
            }
        )
    )
