"""Profiles and the machines made of them."""

import dataclasses
import subprocess
import sys

import pytest

from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D, Op, Work
from hybridattn.cost.catalog import shape
from hybridattn.cost.machine import dram_contention, machine, measured_machine, roofline_of
from hybridattn.cost.profile import (
    Profile,
    Quantity,
    from_json,
    load_profile,
    measured_profile,
    save_profile,
    shipped_names,
)
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.cost.table import Sample

MEASURED = Profile(
    name="here",
    role="machine",
    source="measured",
    fingerprint="EPYC-2c-0011",
    samples=(
        Sample(GPU, "linear", 4, 0, 1e6, 1000, 500),
        Sample(GPU, "linear", 8, 0, 2e6, 1100, 700),
        Sample(CPU, "decode_attention", 1, 100, 1e5, 4000, 90),
        Sample(CPU, "decode_attention", 1, 200, 2e5, 8000, 170),
        Sample(CPU, "decode_attention", 2, 200, 2e5, 8000, 160),
        Sample(CPU, "decode_attention", 2, 400, 4e5, 16000, 320),
    ),
    axes={"gpu.compute/linear": ("rows",), "cpu.attention/decode_attention": ("rows", "kv_per_row")},
    held_out_error={"gpu.compute/linear": 0.03},
    quantities={"poll": Quantity(300.0, "ns", "measured", "mean over empty ops")},
    model="smollm2-135m",
    dtype="bf16",
    build={"python": "3.11"},
)


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_profiles_load_with_a_source_for_every_number(name):
    profile = load_profile(name)
    assert profile.name == name and profile.source in ("datasheet", "fitted")
    assert profile.fingerprint.startswith(f"{name}@")
    assert all(len(q.source) > 10 for q in profile.quantities.values())
    assert all(text for _, text in profile.efficiency.values())
    assert roofline_of(profile).kinds == tuple(profile.efficiency)
    assert from_json(profile.to_json()) == profile


def test_what_is_shipped():
    assert {"t4", "a10", "a10g", "l4", "a100-80g", "h100", "h200", "gh200"} == set(shipped_names("gpu"))
    fitted = {"xeon-8259cl-8c", "grace-72c", *(f"epyc-7r32-{c}c" for c in (4, 8, 16, 32))}
    current = {"epyc-9654-96c", "epyc-9755-128c", "xeon-8480p-56c", "xeon-6980p-128c", "ryzen-9950x-16c"}
    assert fitted | current == set(shipped_names("cpu"))
    assert {"pcie3-x16", "pcie4-x16", "pcie5-x16", "nvlink-c2c"} == set(shipped_names("link"))


def test_effective_rates_are_the_stated_ones():
    # 1 GB of weights at 240 GB/s on the T4; 1 GB of KV at 400 GB/s on the A10G and at 50 GB/s on the Xeon.
    t4 = machine("t4", "xeon-8259cl-8c", "pcie3-x16")
    a10g = machine("a10g", "epyc-7r32-32c", "pcie4-x16")
    gigabyte = {kind: Work(kind, 0.0, 10**9, 1) for kind in ("linear", "decode_attention", "copy")}
    assert t4.work_ns(GPU, gigabyte["linear"]) == pytest.approx(1e9 / 240, rel=0.01)
    assert a10g.work_ns(GPU, gigabyte["decode_attention"]) == pytest.approx(1e9 / 400, rel=0.01)
    assert t4.work_ns(CPU, gigabyte["decode_attention"]) == pytest.approx(1e9 / 50, rel=0.01)
    assert a10g.work_ns(CPU, gigabyte["decode_attention"]) == pytest.approx(1e9 / 64, rel=0.01)
    assert t4.work_ns(H2D, gigabyte["copy"]) == pytest.approx(1e9 / 12.89, rel=0.01)


def test_every_stage_of_a_model_has_a_price_where_it_runs():
    cost, pricing = ModelCost(shape("llama3.1-8b"), "fp16"), machine("h200", "grace-72c", "nvlink-c2c")
    on_gpu = (cost.first(4), cost.linear(4), cost.last(4, 4), cost.embed(4), cost.attention(4, 400, [(64, 128)]))
    for lane, works in {
        GPU: on_gpu,
        CPU: (cost.decode_attention(4, 400),),
        D2H: (cost.send_qkv(4), cost.offload_kv(64)),
        H2D: (cost.fetch_output(4), cost.move_request(64)),
    }.items():
        assert all(pricing.price_ns(Op("x", lane, work)) > 0 for work in works)
    with pytest.raises(InputError, match="no price for 'prefill_attention' on lane cpu.attention"):
        pricing.price_ns(Op("x", CPU, cost.prefill_attention(4, 4)))


def test_contention_only_where_dram_is_short():
    # Eight cores that draw 27 of 204.8 GB/s leave room for a copy; Grace's attention beside C2C does not.
    assert dram_contention(load_profile("epyc-7r32-8c"), load_profile("pcie4-x16")) == 1.0
    assert machine("a10", "epyc-7r32-8c", "pcie4-x16").contention == {}
    grace = dram_contention(load_profile("grace-72c"), load_profile("nvlink-c2c"))
    assert grace == pytest.approx((384 * 0.7 + 450 * 0.75) / (0.85 * 384), rel=1e-6)
    assert machine("gh200", "grace-72c", "nvlink-c2c").contention[CPU, D2H] == pytest.approx(grace)


def test_fingerprint_of_a_machine_follows_its_profiles():
    assert machine("t4", "xeon-8259cl-8c", "pcie3-x16").fingerprint.startswith("t4+xeon-8259cl-8c+pcie3-x16@")
    changed = dataclasses.replace(load_profile("t4"), fingerprint="t4@other")
    assert (
        machine(changed, "xeon-8259cl-8c", "pcie3-x16").fingerprint
        != machine("t4", "xeon-8259cl-8c", "pcie3-x16").fingerprint
    )


def test_a_measured_profile_survives_a_file_and_prices_by_its_tables(tmp_path):
    save_profile(MEASURED, tmp_path / "deep" / "here.json")
    loaded = load_profile(tmp_path / "deep" / "here.json", "machine")
    assert loaded == MEASURED
    pricing = measured_machine(loaded, "smollm2-135m", "bf16", "EPYC-2c-0011")
    assert pricing.fingerprint == "EPYC-2c-0011"
    assert pricing.price_ns(Op("x", GPU, Work("linear", 0, 0, 6))) == 600
    assert pricing.price_ns(Op("x", CPU, Work("decode_attention", 0, 0, 2, 300))) == 240


def test_a_measured_profile_of_another_machine_model_or_dtype_is_refused():
    with pytest.raises(InputError, match="was measured on EPYC-2c-0011, this is Xeon-8c-77: calibrate here"):
        measured_machine(MEASURED, "smollm2-135m", "bf16", "Xeon-8c-77")
    with pytest.raises(InputError, match="measured with smollm2-135m bf16, not llama2-7b bf16"):
        measured_machine(MEASURED, "llama2-7b", "bf16", "EPYC-2c-0011")


def test_a_calibration_becomes_a_profile_with_its_held_out_errors():
    linear = [Sample(GPU, "linear", r, 0, 0.0, 0, 100 * r) for r in (1, 2, 4, 4)]
    copies = [Sample(D2H, "copy", 1, 0, 0.0, n, n) for n in (64, 4096)]
    axes = {"gpu.compute/linear": ("rows",), "gpu.d2h/copy": ("num_bytes",)}
    made = measured_profile("here", "f", "m", "bf16", linear + copies, axes, {"python": "3.11"})
    assert made.held_out_error == {"gpu.compute/linear": pytest.approx(0)}  # two points allow none to be left out
    assert from_json(made.to_json()) == made
    assert measured_machine(made, "m", "bf16", "f").price_ns(Op("x", GPU, Work("linear", 0, 0, 3))) == 300
    with pytest.raises(InputError, match="samples of \\['gpu.compute/linear', 'gpu.d2h/copy'\\], but axes of"):
        measured_profile("here", "f", "m", "bf16", linear + copies, {"gpu.compute/linear": ("rows",)}, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes": {}}, "a machine has samples and the axes"),
        ({"role": "abacus"}, "role 'abacus' is none of gpu, cpu, link, machine"),
        ({"source": "rumour"}, "source 'rumour' is none of"),
        ({"fingerprint": ""}, "needs a name and a fingerprint"),
    ],
)
def test_bad_profiles_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(MEASURED, **change)


def test_samples_need_axes_for_their_table():
    partial = dataclasses.replace(MEASURED, axes={"gpu.compute/linear": ("rows",)})
    with pytest.raises(InputError, match="samples of cpu.attention/decode_attention but no axes"):
        measured_machine(partial, "smollm2-135m", "bf16", "EPYC-2c-0011")


def test_unknown_names_wrong_roles_and_broken_files(tmp_path):
    with pytest.raises(InputError, match="profile 'b100' is unknown; shipped are a10"):
        load_profile("b100")
    with pytest.raises(InputError, match="profile t4 describes a gpu, a cpu is needed"):
        machine("t4", "t4", "pcie3-x16")
    with pytest.raises(InputError, match="profile grace-72c describes a cpu, a gpu is needed"):
        machine(load_profile("grace-72c"), "grace-72c", "pcie3-x16")
    with pytest.raises(InputError, match="none.json does not exist"):
        load_profile(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{"name": "x", "role": "gpu"}')
    with pytest.raises(InputError, match="broken.json is not a profile: KeyError: 'source'"):
        load_profile(broken)
    with pytest.raises(InputError, match="a quantity must be positive and finite, got 0 B/s"):
        Quantity(0, "B/s", "datasheet", "somewhere")
    with pytest.raises(InputError, match="profile t4 has no cores; it has peak_flops"):
        load_profile("t4").value("cores")


def test_the_room_imports_no_torch():
    code = (
        "import sys, hybridattn.cost.machine, hybridattn.cost.stages_cost, hybridattn.cost.crossover\n"
        "import hybridattn.metrics.report, hybridattn.workload\n"
        "assert not {'torch', 'triton', 'transformers', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
