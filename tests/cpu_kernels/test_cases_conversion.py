"""Cases from public bug reports, conversions, scales, caches and threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpu_kernels as ck
from cpu_kernels import dtypes, isa, jit
from cpu_kernels.codegen.rows import build_moves
from cpu_kernels.layout import Layout, pack_k, pack_v, unpack_k
from cpu_kernels.pages import _MOVE, encode

VALUES = np.array([3.14, 0.26914088, 1.00390625, 1.01171875, -1.00390625, 1e-40, 65504.0, 0.0, -0.0], np.float32)


def stored_by(level: str, dtype: str, values: np.ndarray) -> np.ndarray:
    """Run the append kernel of a level on a row of 16 values and return the stored elements."""
    layout = Layout(dtype, 16, 16)
    loaded = jit.load(build_moves(layout, level), ("append", "gather"), jit.Target(isa.target_cpu(level)))
    page = np.zeros(layout.head_bytes, np.uint8)
    row = np.zeros(16, np.float32)
    row[: len(values)] = values
    slot = np.zeros(1, np.int64)
    _MOVE(loaded.addresses["append"])(
        page.ctypes.data, page.nbytes, 1, slot.ctypes.data, 1,
        row.ctypes.data, 64, 64, 0, row.ctypes.data, 64, 64, 0, 1, 0,
    )  # fmt: skip
    k = unpack_k(page[: layout.k_bytes].view(layout.numpy_dtype), layout)
    return k[0, : len(values)]


def test_K23_bf16_rounds_to_nearest_even(level: str) -> None:
    for bits in (ck.to_bf16(VALUES), stored_by(level, "bf16", VALUES)):
        got = ck.from_bf16(bits)
        assert got[0] == 3.140625 and got[1] == 0.26953125
        assert got[2] == 1.0 and got[3] == 1.015625 and got[4] == -1.0  # ties to even, both ways
        assert 0 < got[5] < 1e-39 and np.signbit(got[8])
    nan = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(ck.from_bf16(ck.to_bf16(nan))).all()
    assert np.isnan(ck.from_bf16(stored_by(level, "bf16", nan))).all()


def test_K23_bf16_has_no_bias_and_agrees_with_torch() -> None:
    x = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
    error = ck.from_bf16(ck.to_bf16(x)).astype(np.float64) - x
    assert abs(error.mean()) < 1e-5 and np.abs(error / x).max() <= 2**-8
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert np.array_equal(torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16), ck.to_bf16(x))


def test_K23_fp16_rounds_as_numpy_does_on_every_level(level: str) -> None:
    rng = np.random.default_rng(0)
    tricky = [65519.0, 65520.0, 1e6, -1e6, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 6.1e-5, 6.0e-5, np.inf, 1 + 2.0**-11]
    x = np.concatenate([np.array(tricky, np.float32), (rng.standard_normal(200) * 10.0 ** rng.integers(-9, 5, 200))])
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    got = np.concatenate([stored_by(level, "fp16", x[i : i + 16]) for i in range(0, len(x), 16)])
    assert np.array_equal(got.view(np.uint16), want.view(np.uint16))
    assert np.isnan(stored_by(level, "fp16", np.array([np.nan], np.float32))).all()


@pytest.mark.parametrize("level_name", ["portable", "best"])
def test_K23_every_fp16_widens_exactly(level_name: str) -> None:
    """All 65536 bit patterns go through a page and back; the portable level has no conversion instruction."""
    level = isa.detect().level if level_name == "best" else level_name
    layout = Layout("fp16", 512, 128)
    loaded = jit.load(build_moves(layout, level), ("append", "gather"), jit.Target(isa.target_cpu(level)))
    bits = np.arange(65536, dtype=np.uint16).reshape(128, 1, 512)
    page = np.zeros(layout.head_bytes, np.uint8)
    page[: layout.k_bytes] = pack_k(bits.reshape(128, 512), layout).view(np.uint8)
    out = np.zeros((2, 128, 1, 512), np.float32)
    number = np.zeros(1, np.int64)
    _MOVE(loaded.addresses["gather"])(
        page.ctypes.data, page.nbytes, 1, number.ctypes.data, 128,
        out[0].ctypes.data, 2048, 2048, 0, out[1].ctypes.data, 2048, 2048, 0, 128, 0,
    )  # fmt: skip
    want = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(out[0], want, equal_nan=True)


def test_K27_int8_scale_has_no_floor(level: str) -> None:
    row = np.zeros(16, np.float32)
    row[:3] = 0.5, -0.25, 0.1
    assert stored_by(level, "int8", row)[:3].tolist() == [127, -64, 25]  # -63.5 is a tie: to the even -64
    codes, scales = encode(row, "int8")
    assert codes[:3].tolist() == [127, -64, 25]
    x = np.random.default_rng(0).standard_normal((100, 64)).astype(np.float32) * 1e-3
    codes, scales = encode(x, "int8")
    assert scales is not None
    error = np.abs(codes * scales[:, None] - x)
    assert (error <= scales[:, None] * 0.5001).all() and np.array_equal(scales, np.abs(x).max(-1) / np.float32(127))


def e4m3_by_search(x: np.ndarray) -> np.ndarray:
    """The nearest of all finite values in float64, ties to the even code, saturating; NaN is 0x7F."""
    finite = np.arange(127)
    values = np.where(finite < 8, finite * 2.0**-9, (8 + finite % 8) * 2.0 ** (finite // 8 - 10.0))
    distance = np.abs(np.abs(x.astype(np.float64))[:, None] - values)
    tied = distance == distance.min(1, keepdims=True)
    code = np.where(tied & (finite % 2 == 0), finite, np.where(tied, finite + 1000, 10_000)).min(1) % 1000
    return np.where(np.isnan(x), 127, np.where(np.isinf(x), 126, code)) | np.where(np.signbit(x), 128, 0)


def test_fp8_is_ocp_e4m3(level: str) -> None:
    """Halfway points, subnormals, values past 448 and NaN; the row's largest is 448, so its scale is 1."""
    exact = dtypes.E4M3[:127].astype(np.float64)
    halves = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
    near = np.concatenate([halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, np.float32(500))])
    x = np.concatenate([exact.astype(np.float32), near, np.array([0.0, 1e-40, 2**-10, 3 * 2**-11], np.float32)])
    x = np.concatenate([x, -x])
    assert np.array_equal(dtypes.to_e4m3(x), e4m3_by_search(x))
    for part in np.array_split(x, len(x) // 14):
        row = np.concatenate([part, np.array([448.0], np.float32)])
        assert np.array_equal(stored_by(level, "fp8", row), e4m3_by_search(row))
    wild = np.array([np.nan, 448, -np.nan, 1e-3], np.float32)
    assert stored_by(level, "fp8", wild).tolist() == e4m3_by_search(wild).tolist()
    assert dtypes.to_e4m3(np.array([449, 1e30, np.inf, -np.inf], np.float32)).tolist() == [126, 126, 126, 254]


def test_fp8_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert np.array_equal(codes.float().numpy(), dtypes.E4M3, equal_nan=True)
    x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32) * 100
    x = x[np.abs(x) <= 448]
    assert np.array_equal(torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy(), dtypes.to_e4m3(x))


# Of the 16-bit types: bits of 448, of the smallest normal number and of infinity; sizes that are worth a code below it.
SHORT = {"bf16": (0x43E0, 0x80, 0x7F80, 0xC00), "fp16": (0x5F00, 0x400, 0x7C00, 0x5800)}


@pytest.mark.parametrize("given", list(SHORT))
@pytest.mark.parametrize("dim", [16, 64])  # vectors of 16 and of 32 on the way that 16-bit rows take
def test_fp8_of_every_16_bit_value(level: str, dim: int, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 65,536 under scale 1 as far as 448; all of them in rows of their size; and values of every size below peaks.

    Infinities, NaN and subnormals are among them, rows that have none, and rows of the smallest and the largest scale.
    """
    monkeypatch.setenv("CPU_KERNELS_ISA", level)
    kind, rng = dtypes.kind_of("fp8"), np.random.default_rng(0)
    limit, normal, infinity, span = SHORT[given]
    every = np.arange(65536, dtype=np.uint16)
    inside = every[(every & 0x7FFF) <= limit]
    inside = inside[np.argsort(inside & 0x7FFF, kind="stable")]
    inside = np.resize(inside, (-(-len(inside) // (dim - 1)), dim - 1))
    peaks = rng.integers(0, infinity + 1, (2000, 1))
    below = np.maximum(peaks - rng.integers(0, span, (2000, dim)), normal * rng.integers(0, 2, (2000, 1)))
    below |= rng.integers(0, 2, (2000, dim)) << 15
    below[:, :1] = peaks
    rows = np.concatenate(
        [
            np.pad(inside, ((0, 0), (0, 1)), constant_values=limit),
            every[np.argsort(every & 0x7FFF, kind="stable")].reshape(-1, dim),
            below.astype(np.uint16),
        ]
    )
    wide = ck.from_bf16(rows) if given == "bf16" else rows.view(np.float16).astype(np.float32)
    rows = rows if given == "bf16" else rows.view(np.float16)
    pages = ck.KVPages(-(-len(rows) // 128), 1, dim, 128, "fp8", huge_pages=False)
    ck.append_kv(pages, 0, rows[:, None], rows[::-1, None], np.arange(len(rows)))
    with np.errstate(invalid="ignore"):
        scales = kind.scales_of(wide)
        want = kind.decode(kind.encode(wide, scales), scales)
    for got, meant in zip(ck.unpack(pages, 0, np.arange(pages.num_pages)), (want, want[::-1]), strict=True):
        found = got.reshape(-1, dim)[: len(rows)]
        assert np.array_equal(found, meant, equal_nan=True)
        numbers = ~np.isnan(meant)
        assert np.array_equal(np.signbit(found)[numbers], np.signbit(meant)[numbers])


def test_bf16_of_every_fp16(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subnormals of fp16 are normal float32, so the processor's conversion, which drops subnormals, is exact."""
    monkeypatch.setenv("CPU_KERNELS_ISA", level)
    rows = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(-1, 1, 64)
    pages = ck.KVPages(len(rows) // 128, 1, 64, 128, "bf16", huge_pages=False)
    ck.append_kv(pages, 0, rows, rows, np.arange(len(rows)))
    want = ck.from_bf16(ck.to_bf16(rows.astype(np.float32))).reshape(-1, 64)
    for got in ck.unpack(pages, 0, np.arange(pages.num_pages)):
        assert np.array_equal(got.reshape(-1, 64), want, equal_nan=True)
        numbers = ~np.isnan(want)
        assert np.array_equal(np.signbit(got.reshape(-1, 64)[numbers]), np.signbit(want[numbers]))


def test_fp8_every_code_reads_back_and_multiplies_exactly(problem: Any, level: str) -> None:
    """All 256 codes as V under a weight of one: subnormals are numbers on every level, NaN stays where it is."""
    pages = ck.KVPages(1, 1, 256, 16, "fp8", huge_pages=False)
    layout = pages.layout
    codes = np.arange(256, dtype=np.uint8)
    pages.buffer[0, 0, 0, layout.k_bytes : 2 * layout.k_bytes].view(np.uint8)[...] = pack_v(
        np.broadcast_to(codes, (16, 256)), layout
    )
    pages.buffer[0, 0, 0, 2 * layout.k_bytes :].view(np.float32)[...] = 1.0
    assert np.array_equal(ck.unpack(pages, 0, [0])[1][0, 0, 3], dtypes.E4M3, equal_nan=True)
    out = np.empty((1, 1, 256), np.float32)
    ck.plan_decode(pages, [[0]], [1], 1, isa=level).run(np.ones((1, 1, 256), np.float32), out)
    assert np.array_equal(out[0, 0], dtypes.E4M3, equal_nan=True)


def test_fp8_rows_of_infinities_and_of_tiny_values(level: str) -> None:
    pages = ck.KVPages(1, 1, 16, 16, "fp8", huge_pages=False)
    rows = np.zeros((3, 1, 16), np.float32)
    rows[0, 0, :2], rows[1, 0, :2], rows[2, 0, 0] = (np.inf, 1.0), (1e-38, -2e-39), np.nan
    ck.append_kv(pages, 0, rows, rows, [0, 1, 2])
    k, _ = ck.unpack(pages, 0, [0])
    assert k[0, 0, 0, :2].tolist() == [448 * 2.0**119, 0.0]
    assert np.abs(k[0, 0, 1, :2] / rows[1, 0, :2] - 1).max() < 0.07
    assert np.isnan(k[0, 0, 2, 0]) and (k[0, 0, 2, 1:] == 0).all()


def test_K29_k_and_v_scales_keep_to_their_sides(problem: Any, level: str) -> None:
    p = problem([70], heads=2, group=2, dtype="int8")
    rng = np.random.default_rng(1)
    k = p.k * rng.uniform(0.2, 0.8, p.k.shape[:3])[..., None].astype(np.float32)
    v = p.v * rng.uniform(2, 50, p.v.shape[:3])[..., None].astype(np.float32)
    ck.pack(p.pages, 0, np.arange(p.pages.num_pages), k, v)
    k, v = ck.unpack(p.pages, 0, np.arange(p.pages.num_pages))
    out, _ = p.run(isa=level)
    want, _ = ck.reference.decode_reference(p.q, k, v, p.table, p.lens)
    assert np.abs(out - want).max() < 1e-3 * np.abs(v).max()


@pytest.mark.parametrize("page", [16, 128])
def test_K31_inline_scales_move_no_slot(page: int) -> None:
    """The last slot of the last head of the last page, next to its neighbours."""
    pages = ck.KVPages(3, 3, 64, page, "int8", 2, huge_pages=False)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3 * page, 3, 64)).astype(np.float32)
    ck.append_kv(pages, 1, rows, -rows, np.arange(3 * page))
    k, v = np.empty_like(rows), np.empty_like(rows)
    ck.gather_kv(pages, 1, [0, 1, 2], 3 * page, k, v)
    scale = np.abs(rows).max(-1, keepdims=True) / 127
    assert (np.abs(k - rows) <= 0.5001 * scale).all() and np.array_equal(v, -k)
    assert not pages.buffer[0].any()  # the other layer is its own memory


def test_K33_what_was_written_is_there(problem: Any) -> None:
    p = problem([6], poison=False)
    p.pages.buffer[...] = 0
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((5, 2, 64)).astype(np.float32) for _ in range(2))
    ck.append_kv(p.pages, 0, k, v, p.table[0, 0] * 32 + np.arange(5))
    new = rng.standard_normal((2, 1, 2, 64)).astype(np.float32)
    p.plan().run(p.q, p.out, k_new=new[0], v_new=new[1])
    got = [np.empty((6, 2, 64), np.float32) for _ in range(2)]
    ck.gather_kv(p.pages, 0, p.table[0], 6, *got)
    for have, old, last in zip(got, (k, v), new, strict=True):
        assert np.array_equal(have, ck.from_bf16(ck.to_bf16(np.concatenate([old, last]))))
        assert np.count_nonzero(have) == have.size


@pytest.mark.parametrize("environment", [{}, {"NUMBA_THREADING_LAYER": "workqueue"}])
def test_K36_threads_may_run_kernels_at_once(problem: Any, environment: dict[str, str], monkeypatch: Any) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    p = problem([100, 300, 20])
    want, _ = p.run(split_tokens=64)
    plan, wrong = p.plan(split_tokens=64), []

    def work() -> None:
        out = np.full_like(p.out, np.nan)
        for _ in range(100):
            out[...] = np.nan
            plan.run(p.q, out)
            if not np.array_equal(out, want):
                wrong.append(1)

    crew = [threading.Thread(target=work) for _ in range(3)]
    for t in crew:
        t.start()
    for t in crew:
        t.join(60)
    assert not wrong and not any(t.is_alive() for t in crew)


def test_K41_a_changed_constant_is_another_object(monkeypatch: Any, tmp_path: Path) -> None:
    """The cache is keyed by what is compiled, so a constant that is changed in another module takes effect."""
    monkeypatch.setenv("CPU_KERNELS_CACHE", str(tmp_path))
    layout, target = Layout("fp8", 16, 16), jit.Target(isa.target_cpu("portable"))
    before = build_moves(layout, "portable")
    monkeypatch.setattr("cpu_kernels.dtypes.LARGEST", 1.0)
    after = build_moves(layout, "portable")
    assert jit.object_key(before, target) != jit.object_key(after, target)
    assert jit.object_key(before, target) != jit.object_key(before, jit.Target("haswell"))
    assert jit.object_key(before, target) != jit.object_key(before, jit.Target(target.cpu, "+avx"))


SECOND = """
import sys, time
import numpy as np
import cpu_kernels as ck
from cpu_kernels import jit
made = []
compile_object = jit.compile_object
jit.compile_object = lambda *a: made.append(a) or compile_object(*a)
pages = ck.KVPages(2, 1, 16, 16, "bf16", huge_pages=False)
ck.append_kv(pages, 0, np.ones((3, 1, 16), np.float32), np.ones((3, 1, 16), np.float32), [0, 1, 2])
out = np.zeros((1, 1, 16), np.float32)
with ck.WorkerPool(1) as pool:
    pool.submit(ck.plan_decode(pages, [[0]], [3], 1), out.copy(), out).wait(60)
assert (out == 1).all()
print(len(made), "numba" in sys.modules, "torch" in sys.modules)
"""


def test_K41_the_cache_hits_in_a_second_process(tmp_path: Path) -> None:
    env = {**os.environ, "CPU_KERNELS_CACHE": str(tmp_path)}
    first, second = (_run(SECOND, env) for _ in range(2))
    assert first.split() == ["3", "False", "False"]
    assert second.split() == ["0", "False", "False"]
    for path in tmp_path.glob("*.o"):  # cut short by a full disk
        path.write_bytes(path.read_bytes()[:-100])
    assert _run(SECOND, env).split()[0] == "3"


def _run(code: str, env: dict[str, str], told: str = "") -> str:
    """What ``code`` prints; a warning is an error, but for the one that begins with ``told``, which has to come."""
    root = Path(ck.__file__).parents[1]
    allowed = ("-W", f"default:{told}") if told else ()
    argv = [sys.executable, "-W", "error", *allowed, "-c", code]
    done = subprocess.run(argv, env=env, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert told in done.stderr
    return done.stdout


def test_K41_an_unwritable_cache_costs_no_result(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    told = "CPU kernels are compiled again at each start"
    assert _run(SECOND, {**os.environ, "CPU_KERNELS_CACHE": str(blocked / "below")}, told).split()[0] == "3"
