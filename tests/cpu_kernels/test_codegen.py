"""What is generated: the instructions of each level, AMX by emulation, the policy on floating-point flags, imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

import cpu_kernels as ck
from cpu_kernels import isa, jit, native
from cpu_kernels.codegen.decode import build_decode
from cpu_kernels.codegen.frame import blocks_of
from cpu_kernels.codegen.worker import build_worker
from cpu_kernels.layout import Layout
from cpu_kernels.tuning import TILES

ROOT = Path(ck.__file__).parent
NO_AMX = dict(isa.detect(override="").missing).get("amx_bf16")


def instructions(level: str, dtype: str, group: int = 4, dim: int = 64) -> Counter[str]:
    """Count the instructions of a kernel compiled for a level, whether or not this machine can run it."""
    ir = build_decode(Layout(dtype, dim, 32), level, group)
    text = jit.assembly(ir, jit.Target(isa.target_cpu(level)))
    return Counter(line.split()[0] for line in text.splitlines() if re.match(r"\t[a-z]", line)) + Counter(
        re.findall(r"%[xyz]mm", text)
    )


EXPECTED = {
    ("amx_bf16", "bf16"): (["tdpbf16ps", "tileloadd", "tilestored", "ldtilecfg", "tilerelease", "prefetcht1"], []),
    ("amx_bf16", "int8"): (["vpdpbusd"], []),
    ("amx_bf16", "fp8"): (["tdpbf16ps", "vpermi2b|vpermt2b"], []),
    ("avx512", "fp8"): (["vfmadd231ps", "%zmm"], ["vpermi2b", "vdpbf16ps"]),
    ("avx512_bf16", "bf16"): (["vdpbf16ps", "vcvtneps2bf16", "prefetcht1", "%zmm"], ["tdpbf16ps"]),
    ("avx512_bf16", "int8"): (["vpdpbusd", "prefetcht1"], []),
    ("avx512", "bf16"): (["vfmadd231ps", "prefetcht1", "%zmm"], ["vdpbf16ps", "vcvtneps2bf16"]),
    ("avx512", "fp16"): (["vcvtph2ps", "%zmm"], []),
    ("avx2", "bf16"): (["vfmadd231ps", "%ymm"], ["%zmm", "vdpbf16ps"]),
    ("avx2", "fp16"): (["vcvtph2ps"], ["%zmm"]),
    ("portable", "bf16"): (["mulps", "addps"], ["%ymm", "%zmm", "vfmadd231ps"]),
    ("portable", "fp16"): (["mulps"], ["vcvtph2ps", "%ymm"]),
}


@pytest.mark.parametrize(("level", "dtype"), list(EXPECTED))
@pytest.mark.skipif(isa.target_cpu("portable") != "x86-64", reason="the instructions are those of x86-64")
def test_each_level_uses_its_instructions(level: str, dtype: str) -> None:
    found = instructions(level, dtype)
    wanted, forbidden = EXPECTED[level, dtype]
    assert [names for names in wanted if not any(found[name] for name in names.split("|"))] == []
    assert [name for name in forbidden if found[name]] == []


@pytest.mark.skipif(isa.target_cpu("portable") != "x86-64", reason="the instructions are those of x86-64")
def test_amx_uses_one_tile_product_per_kibibyte() -> None:
    """K: 2 tiles of 16 positions in one loop of head_dim/32 products; V: one product per chunk, looped."""
    found = instructions("amx_bf16", "bf16", group=8, dim=128)
    assert found["tdpbf16ps"] >= 4 + 1 and found["vdpbf16ps"] > 0  # the lines serve pages with masked positions


@pytest.mark.skipif(isa.target_cpu("portable") != "x86-64", reason="the instructions are those of x86-64")
def test_tiles_of_fp8_fetch_every_line_that_they_widen() -> None:
    """K of a tile has 32 lines, a column of V 8; fetched like bf16's, every fourth, fp8 waited for memory."""
    made = [replace(TILES, fetch_heavy=every) for every in (64, 0)]
    texts = [
        jit.assembly(build_decode(Layout("fp8", 128, 32), "amx_bf16", 4, x), jit.target_of("amx_bf16")) for x in made
    ]
    assert texts[0].count("prefetch") - texts[1].count("prefetch") >= 32 + 8


SHAPES = [(64, 32, 4), (80, 16, 3), (96, 64, 2), (32, 32, 17), (128, 128, 8), (16, 16, 16)]


@pytest.mark.skipif("avx512_bf16" not in isa.detect().available, reason="the emulation needs AVX-512 BF16")
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(("dim", "page", "group"), SHAPES)
def test_amx_by_emulated_tiles_equals_the_lines(problem: Any, dim: int, page: int, group: int, dtype: str) -> None:
    """The same algorithm with the tile instructions replaced; half-deep tiles at 80 and 96 dims and pages of 16."""
    p = problem([10 * page - 3, 7, 5 * page], heads=2, group=group, dim=dim, page=page, dtype=dtype)
    if dtype == "fp8" and not p.coarse("avx512_bf16"):
        pytest.skip("fp8 is not multiplied as bf16 pairs here: the processor lacks AVX-512 VBMI")
    want, want_lse = p.run(isa="avx512_bf16", split_tokens=4 * page)
    out, lse = emulated(p, split_tokens=4 * page)
    assert np.abs(out - want).max() < 2e-5 and np.abs(lse - want_lse).max() < 2e-5


def emulated(p: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """A problem's results by the tiles' algorithm with the tile instructions replaced."""
    plan, extras = p.plan(isa="avx512_bf16", **options), p.pages.layout.kind.extras("avx512_bf16")
    ir = build_decode(p.pages.layout, "avx512_bf16", plan.inputs.group, emulate_amx=True)
    loaded = jit.load(ir, ("decode",), jit.target_of("avx512_bf16", extras))
    kernel = plan.native
    kernel.kernel = loaded.addresses["decode"]
    kernel._call = native._KERNEL(kernel.kernel)
    p.out[...], p.lse[...] = np.nan, np.nan
    plan.run(p.q, p.out, p.lse)
    return p.out.copy(), p.lse.copy()


@pytest.mark.skipif("avx512_bf16" not in isa.detect().available, reason="the emulation needs AVX-512 BF16")
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_tiles_keep_off_what_is_masked(problem: Any, dtype: str) -> None:
    """V in steps of 32 between the ends of what is allowed; slots before a window and behind a row hold NaN."""
    p = problem([228, 40, 127, 128 + 32, 3], heads=1, group=3, page=128, dtype=dtype)
    if dtype == "fp8" and not p.coarse("avx512_bf16"):
        pytest.skip("fp8 is not multiplied as bf16 pairs here: the processor lacks AVX-512 VBMI")
    nothing = np.full((1, 1, 64), np.nan, np.float32)
    for window in (-1, 140, 73, 20):
        for row, before in enumerate(p.lens - 1 - window if window >= 0 else []):
            for at in range(max(before, 0)):
                slot = p.table[row, at // 128] * 128 + at % 128
                ck.append_kv(p.pages, 0, nothing, nothing, [slot])
        want, want_lse = p.run(isa="avx512_bf16", window_left=window)
        made = [emulated(p, window_left=window)]
        if NO_AMX is None:
            made.append(p.run(isa="amx_bf16", window_left=window))
        for out, lse in made:
            assert np.abs(out - want).max() < 2e-5 and np.abs(lse - want_lse).max() < 2e-5


@pytest.mark.skipif(NO_AMX is not None, reason=str(NO_AMX))
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(("dim", "page", "group"), SHAPES)
def test_amx_on_this_processor_equals_the_lines(problem: Any, dim: int, page: int, group: int, dtype: str) -> None:
    p = problem([10 * page - 3, 7, 5 * page], heads=2, group=group, dim=dim, page=page, dtype=dtype)
    want, want_lse = p.run(isa="avx512_bf16", split_tokens=4 * page)
    out, lse = p.run(isa="amx_bf16", split_tokens=4 * page)
    near = 2e-5 if p.coarse("avx512_bf16") else 2e-2
    assert np.abs(out - want).max() < near and np.abs(lse - want_lse).max() < near


def test_flags_that_delete_guards_are_nowhere() -> None:
    assert set(jit.FAST_MATH) == {"contract", "reassoc", "arcp", "nsz"}
    for level in isa.LEVELS:
        for dtype in ("bf16", "int8", "fp8"):
            ir = build_decode(Layout(dtype, 64, 32), level, 2)
            for line in ir.splitlines():
                flags = set(re.findall(r"\b(fast|nnan|ninf|afn|reassoc|contract|arcp|nsz)\b", line))
                assert flags <= set(jit.SUM_FLAGS.split()) <= set(jit.FAST_MATH)
                assert not flags or "vector.reduce.fadd" in line


def test_only_the_policy_file_speaks_of_fastmath() -> None:
    """numba asks for the flags by a keyword: there they are a constant, a part of the policy's."""
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        asked = [n.value for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "fastmath"]
        if path.name == "numba_frame.py":
            flags = re.search(r"^FAST = ({.*})$", path.read_text(), re.M)
            assert flags and ast.literal_eval(flags[1]) <= set(jit.FAST_MATH)
            assert all(isinstance(value, ast.Name) and value.id == "FAST" for value in asked)
        else:
            assert not asked, path
        if path.name != "jit.py":
            assert "FAST_MATH" not in path.read_text(), path


def test_nothing_of_the_framework_and_no_torch_is_imported() -> None:
    code = (
        "import sys, cpu_kernels, cpu_kernels.doctor, cpu_kernels.bench.__main__\n"
        "heavy = {'torch', 'numba', 'hybridattn', 'gpu_kernels', 'triton', 'transformers', 'pandas'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_portable_level_compiles_for_aarch64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that it compiles, to NEON multiply-adds, prefetches and yields; it was not run on such a machine."""
    monkeypatch.setattr(isa, "is_x86", lambda: False)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "aarch64-unknown-linux-gnu"
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu="generic", opt=2)
    for ir, wanted in (
        (build_decode(Layout("bf16", 64, 32), "portable", 2), ["fmla", "prfm"]),
        (build_worker(False), ["yield", "ldaddal|ldaxr|__aarch64_ldadd"]),
    ):
        module = llvm.parse_assembly(ir)
        module.triple, module.data_layout = triple, str(machine.target_data)
        text = machine.emit_assembly(module)
        assert [name for name in wanted if not re.search(name, text)] == []


def test_the_worker_pauses_while_it_spins() -> None:
    assert "pause" in jit.assembly(build_worker(True), jit.Target("x86-64"))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 71])
def test_blocks_cover_everything_evenly(count: int) -> None:
    blocks = blocks_of(count, 8)
    assert [i for first, size in blocks for i in range(first, first + size)] == list(range(count))
    sizes = [size for _, size in blocks]
    assert max(sizes) <= 8 and max(sizes) - min(sizes) <= 1
