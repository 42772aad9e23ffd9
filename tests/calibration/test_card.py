"""The prices of a card's primitives: a profile that the simulator takes, and the tile that the engine takes from it."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch_kernels
from fake_cuda import FakeCuda
from scaled_model import scaled

from hybridattn.calibration import card
from hybridattn.core.config import EngineConfig
from hybridattn.core.op import CPU, D2H, Op, Work
from hybridattn.cost.here import card_path, decode_tile
from hybridattn.cost.machine import card_driver_of, machine
from hybridattn.cost.profile import Quantity, load_profile, save_profile
from hybridattn.devices.cuda import CudaDevice
from hybridattn.devices.sim import SimDevice
from hybridattn.kv import cpu_blocks
from hybridattn.models import cuda_rows, cuda_tier, fused_decoder, layer_stages
from hybridattn.models.torch_stages import TorchStages

FOUND = {
    "event", "replay", "host_call_awake", "host_call_asleep", "bell_awake", "bell_asleep", "bandwidth", "launch",
    "pageable", "register",
}  # fmt: skip


@pytest.fixture
def device():
    opened = CudaDevice(runtime=FakeCuda(threads=True, words=True))
    yield opened
    opened.close()
    opened.runtime.close()


def test_every_primitive_is_priced_and_the_simulator_takes_the_link(device, tmp_path, monkeypatch):
    monkeypatch.setattr(card, "HANDOVERS", 4)
    found = dict(card.prices(device, 1 << 16, 1 << 16))
    assert set(found) == FOUND and all(q.basis == "measured" for q in found.values())
    path = tmp_path / "card.json"
    save_profile(card.card_profile(device, found), path)
    assert load_profile(path).fingerprint == device.profile
    sim = SimDevice(machine("t4", "xeon-8259cl-8c", str(path)))
    copy = sim.submit(Op("copy", D2H, Work("copy", 0.0, 10**9, 1), None))
    sim.drain(10**13)
    took = copy.end_ns - copy.start_ns
    assert took == pytest.approx(found["launch"].value + 1e18 / found["bandwidth"].value, rel=0.01)
    known = card_driver_of(load_profile(path))
    sim = SimDevice(machine("t4", "xeon-8259cl-8c", str(path)), **known)
    attention = sim.submit(Op("attention", CPU, Work("decode_attention", 0.0, 10**6, 1, 1), None))
    assert attention.start_ns == round(found["bell_awake"].value)
    assert sim.now_ns() == round(found["event"].value + found["replay"].value)
    without = {name: q for name, q in found.items() if not name.startswith("bell")}
    by_call = card_driver_of(card.card_profile(device, without))
    assert by_call["handover_ns"] == {CPU: round(found["host_call_awake"].value)}
    assert card_driver_of(load_profile("pcie3-x16", "link")) == {}


def test_what_does_not_work_here_has_no_price(monkeypatch):
    monkeypatch.setattr(card, "HANDOVERS", 2)
    runtime = FakeCuda(threads=True, host_call=False)
    device = CudaDevice(runtime=runtime)
    try:
        assert FOUND - set(dict(card.prices(device, 1 << 16, 1 << 16))) == {
            n for n in FOUND if "call" in n or "bell" in n
        }
    finally:
        device.close()
        runtime.close()


def test_the_engine_takes_the_tile_that_was_fastest_on_this_card(device, tmp_path, monkeypatch):
    """From the card's own profile only: another card's says nothing."""
    for module in (fused_decoder, layer_stages, cuda_rows, cuda_tier, cpu_blocks):
        monkeypatch.setattr(module, "gpu_kernels", torch_kernels)
    monkeypatch.setenv("HYBRIDATTN_CACHE", str(tmp_path))
    times = iter([5, 3, 9, 4])
    monkeypatch.setattr(card, "tiles_of", lambda dim, capability: ((64, 2), (32, 3), (32, 5), (64, 3)))
    monkeypatch.setattr(card, "capability_of", lambda on: SimpleNamespace(half=torch.float16))
    timed = lambda *arguments: SimpleNamespace(decode_ns=(next(times),))  # noqa: E731
    monkeypatch.setattr(card.gpu_kernels.bench, "measure", timed)
    found = dict(card.tile_prices(torch.device("cpu")))
    seen = []
    plan = torch_kernels.plan_resident
    monkeypatch.setattr(torch_kernels, "plan_resident", lambda *a, tile, **k: seen.append(tile) or plan(*a, **k))
    config = EngineConfig(gpu_kv_blocks=8, cpu_kv_blocks=8, page_size=16, max_model_len=64, max_num_seqs=2)
    model = scaled()
    assert decode_tile(device.profile) is None
    found["bandwidth"] = found["launch"] = Quantity(1.0, "ns", "measured", "made up")
    save_profile(card.card_profile(device, found), card_path())
    TorchStages(model, device, config, "fp32")
    assert decode_tile(device.profile) == (32, 3) and set(seen) == {(32, 3)}
    assert decode_tile("another card") is None


def test_a_dry_run_says_everything_and_writes_nothing(tmp_path):
    out = tmp_path / "card.json"
    run = [sys.executable, "-m", "hybridattn.calibration.card", "--out", str(out)]
    done = subprocess.run([*run, "--dry-run"], capture_output=True, text=True, timeout=120, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and not out.exists(), done.stderr
    assert {line["kind"] for line in lines} == {"emulated"} and lines[-1]["handover"] == "bell"
    assert FOUND - {line.get("name") for line in lines} == {"host_call_awake", "host_call_asleep"}
    refused = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2 and "device 'cuda' cannot be used" in refused.stderr
