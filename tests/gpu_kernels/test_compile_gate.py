"""The compile gate: its rules one by one, its list against what the launchers really launch, and a run of it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import gpu_kernels as g
from gpu_kernels import attention, compile_gate, config, cpu_layout, decode, fused, kv_cache, merge, prefill
from gpu_kernels.config import SCALED
from gpu_kernels.variants import TARGETS, Variant, variants

ROOT = Path(__file__).parents[2]
HALVES = (torch.float16, torch.bfloat16)


def gate(*arguments: str, program: str = "") -> subprocess.CompletedProcess[str]:
    """The gate in a process of its own: this one interprets the kernels and can't compile them."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_INTERPRET")}
    run = ["-c", program] if program else ["-m", "gpu_kernels.compile_gate"]
    command = [sys.executable, "-W", "error", *run, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=3000, env=environment | {"PYTHONPATH": str(ROOT)}
    )


def pick(kernel: str, sm: int, half: bool, head_dim: int) -> Variant:
    return next(v for v in variants(sm) if (v.kernel, v.half, v.head_dim) == (kernel, half, head_dim))


def test_a_sample_of_all_kernels_and_targets_passes() -> None:
    done = gate("--json", "--sample", "24")
    readings = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, [r for r in readings if r["problem"]] or done.stderr
    assert 20 <= len(readings) <= 28
    assert {r["target"] for r in readings} == {f"sm_{sm}" for sm in TARGETS}
    assert {r["kernel"] for r in readings} == {v.kernel for v in variants(80)}
    for reading in readings:
        assert reading["registers"] > 0 and reading["spills"] >= 0 and reading["shared_bytes"] >= 0
        assert not (reading["target"] == "sm_75" and "bf16" in reading["variant"])


@pytest.mark.slow
@pytest.mark.parametrize("sm", TARGETS)
def test_every_variant_passes(sm: int) -> None:
    done = gate("--json", "--targets", str(sm))
    readings = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, [r for r in readings if r["problem"]] or done.stderr
    assert len(readings) == len(variants(sm))


def test_each_limit_is_a_failure() -> None:
    half, wide = pick("attend_split", 80, True, 128), pick("attend_split", 80, True, 256)
    full = pick("attend_split", 80, False, 128)
    judge = compile_gate.judge
    assert judge(half, 80, 128, 0, 166_912, 2, 0) == ""
    assert "shared memory of 166913 bytes exceeds the target's 166912" in judge(half, 80, 128, 0, 166_913, 2, 0)
    assert "exceeds the target's 65536" in judge(half, 75, 128, 0, 70_000, 2, 0)
    assert "8 bytes of spills in a 16-bit variant with head_dim 128" in judge(half, 80, 128, 8, 0, 2, 8)
    for variant in (wide, full):
        assert judge(variant, 80, 128, 8, 0, 2, 8) == ""
        assert judge(variant, 80, 128, 12, 0, 2, 8) == "12 bytes of spills, 8 are recorded"
    assert "registers for 128 threads exceed" in judge(half, 80, 600, 0, 0, 2, 0)
    assert judge(half, 80, 128, 12, 0, 2, None) == ""  # another Triton, of which nothing is recorded
    for in_flight in (-1, 0):
        assert "copies are under way when a tile of K and V is used" in judge(half, 80, 128, 0, 0, in_flight, 0)
        assert judge(full, 80, 128, 0, 0, in_flight, 0) == ""  # float32 has no copies ahead


def test_reads_what_is_under_way_in_the_loop_and_not_behind_it() -> None:
    wait = "    %7 = ttg.async_wait %5, %6 {{num = {} : i32}}\n"
    loop = f"  scf.for %i = %a to %b {{\n{wait.format(2)}{wait.format(3)}    scf.yield %x\n  }}\n"
    assert compile_gate.copies_in_flight(wait.format(1) + loop + wait.format(0)) == 2
    assert compile_gate.copies_in_flight("tt.return") == -1


@pytest.mark.parametrize("sm", [80, 86, 90])
def test_decode_has_the_next_tile_under_way(sm: int) -> None:
    """Compiled: the tile of a model in bf16, as it ships."""
    program = """
import sys
from gpu_kernels import compile_gate as gate
sm = int(sys.argv.pop())
made = gate.variants(sm)
gate.variants = lambda sm: [v for v in made if v.name == "q_bf16-kv_bf16-out_bf16-g16-d128"]
sys.exit(gate.main(["--json", "--targets", str(sm), "--kernels", "attend_split"]))
"""
    done = gate(str(sm), program=program)
    (reading,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and reading["in_flight"] >= 2, reading


def test_reads_the_log_of_ptxas() -> None:
    log = (
        "    48 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\nptxas info    : Used 255 registers, ..."
    )
    assert compile_gate.read_log(log) == (255, 32)
    with pytest.raises(RuntimeError, match="ptxas -v printed no usage"):
        compile_gate.read_log("ptxas info: 0 bytes gmem")


def test_a_variant_that_does_not_compile_fails_the_gate() -> None:
    program = """
import sys
from dataclasses import replace
from gpu_kernels import compile_gate as gate
good = gate.variants(80)[0]
broken = replace(good, config=replace(good.config, constants={**good.config.constants, "BLOCK_N": 24}))
gate.variants = lambda sm: [good, broken]
sys.exit(gate.main(sys.argv[1:]))
"""
    done = gate("--json", "--targets", "80", program=program)
    problems = [json.loads(line)["problem"] for line in done.stdout.splitlines()]
    assert problems[0] == "" and problems[1].startswith("does not compile: ") and done.returncode == 1
    assert done.stderr.endswith("2 variants, 1 failed\n")


def test_refuses_to_run_interpreted_and_with_nothing_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_gate, "interpreted", lambda: True)
    assert compile_gate.main([]) == 2 and "TRITON_INTERPRET is set" in capsys.readouterr().err
    monkeypatch.setattr(compile_gate, "interpreted", lambda: False)
    assert compile_gate.main(["--kernels", "no_such_kernel"]) == 1
    assert capsys.readouterr().err == "0 variants, 0 failed\n"


def test_the_record_changes_for_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_gate, "RECORD", tmp_path / "record.json")
    assert compile_gate.load_record() is None
    other = {"merge fp32-d16 sm_80": 8, "merge fp32-d32 sm_80": 4}
    (tmp_path / "record.json").write_text(json.dumps({"1.0.0": other, triton.__version__: other}))
    readings = [
        compile_gate.Reading("merge", f"fp32-d{d}", "sm_80", 32, spills, 0, -1, 2, 1, 0.1, "")
        for d, spills in ((16, 24), (64, 0))
    ]
    compile_gate.save_record(readings)
    assert compile_gate.load_record() == {"merge fp32-d16 sm_80": 24, "merge fp32-d32 sm_80": 4}
    assert json.loads((tmp_path / "record.json").read_text())["1.0.0"] == other


def test_variants_are_listed_once_and_bf16_follows_capability() -> None:
    for sm in TARGETS:
        keys = [(v.kernel, v.name) for v in variants(sm)]
        assert len(set(keys)) == len(keys) == len({v.key for v in variants(sm)})
        assert any(v.uses_bf16 for v in variants(sm)) == (sm >= 80)


def test_recorded_spills_name_variants_that_exist() -> None:
    names = {f"{v.kernel} {v.name} sm_{sm}" for sm in TARGETS for v in variants(sm)}
    records = json.loads(compile_gate.RECORD.read_text())
    assert triton.__version__ in records
    assert all(set(record) <= names for record in records.values())


class Recorder:
    """Stands where the launchers call ``launch`` and keeps what Triton would be asked to compile."""

    def __init__(self) -> None:
        self.keys: set[tuple[Any, ...]] = set()

    def __call__(self, kernel: Any, grid: Any, chosen: config.Config, device: Any, *arguments: Any) -> None:
        names = list(kernel.arg_names)
        constants = tuple(sorted(chosen.constants.items()))
        plain = [
            name
            for key in ("do_not_specialize", "do_not_specialize_on_alignment")
            for name in self._option(kernel, key)
        ]
        signature = []
        for name, value in zip(names, (*arguments, *[None] * len(chosen.constants)), strict=True):
            signature.append((name, self._type(value)))
            if name not in plain and value is not None and not isinstance(value, float):
                assert (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0, (kernel, name, value)
        kind = kernel.fn.__name__
        self.keys.add((kind, tuple(signature), constants, chosen.num_warps, chosen.num_stages))

    @staticmethod
    def _option(kernel: Any, name: str) -> list[str]:
        return list(getattr(kernel, "kwargs", {}).get(name) or getattr(kernel, name, None) or ())

    @staticmethod
    def _type(value: Any) -> str:
        if value is None:
            return "constexpr"
        if isinstance(value, torch.Tensor):
            names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
            return "*" + (
                names.get(value.dtype) or str(value.dtype).replace("torch.uint", "u").replace("torch.int", "i")
            )
        return "fp32" if isinstance(value, float) else "i32"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    kept = Recorder()

    def at(sm: int) -> Recorder:
        for module in (decode, prefill, kv_cache, merge, fused, cpu_layout):
            monkeypatch.setattr(module, "launch", kept)
        for module in (attention, kv_cache, merge, fused, cpu_layout):
            monkeypatch.setattr(module, "capability_of", lambda device: g.Capability(sm))
        return kept

    yield at


def launch_attention(
    dtype: torch.dtype, store: torch.dtype, dim: int, group: int, cap: float, tiles: tuple[tuple[int, int], ...] = ()
) -> None:
    cache = torch.zeros(8, 2, 16, dim, dtype=store)
    scale = torch.zeros(8, 2, 16) if store in SCALED else None
    scales = {} if scale is None else {"k_scale": scale, "v_scale": scale}
    table, heads = torch.arange(8, dtype=torch.int32)[None], 2 * group
    q = torch.zeros(1, heads, dim, dtype=dtype)
    lens = torch.tensor([100], dtype=torch.int32)
    for split in (64, 128):
        for out in (q.clone(), q.float()):
            g.paged_decode_attention(
                q, cache, cache, table, lens, out=out, logits_soft_cap=cap, split_tokens=split, **scales
            )
            for tile in tiles:
                g.paged_decode_attention(
                    q, cache, cache, table, lens, out=out, logits_soft_cap=cap, split_tokens=split, tile=tile, **scales
                )
    starts = torch.tensor([0, 1], dtype=torch.int32)
    g.prefill_attention(q, cache, cache, table, starts, lens, logits_soft_cap=cap, **scales)


def launch_moves(dim: int) -> None:
    """Packing moves bits, so bf16 is packed on every device."""
    for store in (torch.float32, torch.float16, torch.bfloat16, *SCALED):
        cache = torch.zeros(8, 2, 16, dim, dtype=store)
        scale = torch.zeros(8, 2, 16) if store in SCALED else None
        for ids in (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32)):
            blocks = g.pack_for_cpu(cache, cache, ids, k_scale=scale, v_scale=scale)
            g.unpack_from_cpu(blocks, cache, cache, ids, k_scale=scale, v_scale=scale)
        all_layers = {} if scale is None else {"k_scale": scale[None], "v_scale": scale[None]}
        for copy in (g.copy_down, g.copy_up):
            copy(cache[None], cache[None], torch.tensor([1, 2]), blocks[None], torch.tensor([0, 1]), **all_layers)


@pytest.mark.parametrize("sm", TARGETS)
def test_launchers_compile_nothing_that_is_not_listed(recorder: Any, sm: int) -> None:
    kept, listed = recorder(sm), {v.key for v in variants(sm)}
    dtypes = (torch.float32, torch.float16, *((torch.bfloat16,) if sm >= 80 else ()))
    for dtype in dtypes:
        for dim in (
            16,
            32,
            48,
            64,
            80,
            128,
            208,
        ):  # one of each block of head dims, and those that have a choice of tiles
            for group in (1, 5, 17):
                for cap in (0.0, 5.0):
                    launch_attention(dtype, dtype, dim, group, cap, config.tiles_of(dim, g.Capability(sm)))
                    for store in SCALED:
                        launch_attention(dtype, store, dim, group, cap)
            rows = torch.zeros(2, 4, dim, dtype=dtype)
            for store in (*dtypes, *SCALED):
                cache = torch.zeros(8, 4, 16, dim, dtype=store)
                scale = torch.zeros(8, 4, 16) if store in SCALED else None
                g.append_kv(rows, rows, cache, cache, torch.tensor([0, 1]), k_scale=scale, v_scale=scale)
            launch_moves(dim)
            g.merge_state(rows, torch.zeros(2, 4), rows, torch.zeros(2, 4))
            for positions in (torch.tensor([0, 1]), torch.tensor([0, 1], dtype=torch.int32)):
                for interleaved in (False, True):
                    tables = torch.zeros(2, dim // 2)
                    g.rope(rows, tables, tables, positions, interleaved=interleaved)
        for hidden in (576, 2048, 4096, 5120, 16384):
            x = torch.zeros(1, hidden, dtype=dtype)
            g.rms_norm(x, x[0], 1e-5)
            g.rms_norm(x, x[0], 1e-5, residual=x)
        g.silu_mul(torch.zeros(1, 4096, dtype=dtype))
    extra, missing = kept.keys - listed, listed - kept.keys
    assert not extra, sorted(map(str, extra))[:3]
    assert not missing, sorted(map(str, missing))[:3]


def test_triton_keeps_its_files_apart_for_a_user_without_a_home_folder(tmp_path):
    code = "import os, gpu_kernels; print(os.environ['TRITON_HOME'], os.path.isdir(os.environ['TRITON_HOME']))"
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")} | {"HOME": "~", "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    folder, made = done.stdout.split()
    assert made == "True" and folder.startswith(str(tmp_path)) and not list(tmp_path.iterdir())
