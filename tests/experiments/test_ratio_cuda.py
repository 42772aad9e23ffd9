"""What a card is asked to hold, and the measured window on the fake one."""

from __future__ import annotations

import pytest
import torch_kernels
from fake_cuda import FakeCuda

from experiments.points import ratio_cuda
from experiments.points.ratio_cuda import CardSettings, Chosen, chosen, chosen_here, verdict
from experiments.schema import App, Device, Target
from hybridattn import llm
from hybridattn.core.errors import InputError
from hybridattn.devices.cuda import CudaDevice
from hybridattn.kv import cpu_blocks
from hybridattn.models import cuda_rows, cuda_tier, fused_decoder, layer_stages
from hybridattn.models.load import load

GB = 10**9
CARDS = {  # free bytes of an idle card, bf16
    "h200": (150 * GB, True, "llama3.1-8b", "bf16"),
    "a10": (23_500_000_000, True, "llama3.1-8b", "bf16"),
    "l4": (23_300_000_000, True, "llama3.1-8b", "bf16"),
    "t4": (15_500_000_000, False, "llama3.2-3b", "fp16"),
    "small": (4 * GB, False, "smollm2-135m", "fp16"),
}


@pytest.mark.parametrize("card", CARDS)
def test_model_dtype_and_budget_follow_from_the_card(card):
    free, bf16, model, dtype = CARDS[card]
    found = chosen(free, bf16, CardSettings())
    assert (found.shape, found.dtype) == (model, dtype)
    assert found.budget_bytes < free and found.budget_bytes <= 24 * GB


def test_what_does_not_fit_is_refused_with_numbers():
    with pytest.raises(InputError, match=r"a budget of 2926258176 bytes holds no llama3.1-8b in bf16 with 8 requests"):
        chosen(4 * GB, True, CardSettings(model="llama3.1-8b"))
    with pytest.raises(InputError, match="leaves no room in max_model_len 16"):
        CardSettings(prompt_tokens=16, max_model_len=16)
    with pytest.raises(InputError, match="on cuda .*, not on sim"):
        chosen_here("sim", CardSettings())


def test_the_verdict_says_what_the_figures_are_not():
    row = {"model": "m", "dtype": "fp16", "handover": "poll", "why_handover": "no host calls", "eager_because": None,
           "pageable": "an exchange slab", "ratio": 2.0, "driver_us_per_layer": 81.4}  # fmt: skip
    rows = [{**row, "policy": "gpu_only", "tokens_per_s": 10.0}, {**row, "policy": "x", "tokens_per_s": 15.0}]
    lines = verdict(rows)
    assert "| x | 2 | 15.0 | 1.500 | 81 |" in lines
    assert any("an exchange slab; no measure of this card" in line for line in lines)
    assert "CPU attention was not handed over by a word in memory, but by poll: no host calls" in lines


@pytest.fixture
def fake(monkeypatch):
    """``fake(**options)``: from now on the device ``cuda`` is a fake card, and its kernels are plain torch."""
    for module in (fused_decoder, layer_stages, cuda_rows, cuda_tier, cpu_blocks):
        monkeypatch.setattr(module, "gpu_kernels", torch_kernels)
    monkeypatch.setattr(ratio_cuda, "chosen_here", lambda device, s: Chosen("tiny", "fp32", None))
    monkeypatch.setattr(ratio_cuda, "loaded", lambda name, dtype, where: load(name, dtype=dtype))

    def use(**runtime):
        made = lambda name, **options: CudaDevice(runtime=FakeCuda(3, **runtime), **options)  # noqa: E731
        monkeypatch.setattr(llm, "open_device", made)

    return use


def row_of(policy, **options):
    target = Target(
        policy, {"gpu_only": "hybridattn.policies.fixed.GpuOnly"}.get(policy, f"hybridattn.policies.{policy}")
    )
    settings = CardSettings(gpu_requests=2, ratio=1, prompt_tokens=20, max_model_len=256, window_s=0.02, **options)
    return ratio_cuda.point(App(device=Device("cuda"), policy=target), settings)


def test_a_point_says_what_its_figures_are_worth(fake):
    fake()
    alone, row = row_of("gpu_only"), row_of("fixed.SyncOffload")
    assert (alone["cpu_requests"], alone["cpu_tokens_per_s"]) == (0, 0) and alone["gpu_tokens_per_s"] > 0
    assert row["cpu_requests"] == 2 and row["cpu_tokens_per_s"] > 0 and row["layers_per_step"] == 3
    for found in (alone, row):
        assert (found["kind"], found["handover"], found["pageable"]) == ("emulated", "stream", "")
        worked_us = found["driver_us_per_layer"] * found["num_layers"] * found["steps"]
        assert 0 < worked_us < found["window_s"] * 1e6
    assert row["stretch"] is not None
    fake(pins=False, host_call=False)
    with pytest.warns(RuntimeWarning, match="stays pageable"):
        slow = row_of("fixed.SyncOffload")
    assert slow["handover"] == "poll" and slow["why_handover"] and "the CPU tier's KV pool" in slow["pageable"]
