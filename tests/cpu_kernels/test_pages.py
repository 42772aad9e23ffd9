"""The page pool: layouts, transfers, true sizes."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu_kernels as ck
from cpu_kernels.arrays import from_bf16, to_bf16
from cpu_kernels.layout import LANES, Layout, pack_k, pack_v, unpack_k, unpack_v
from cpu_kernels.memory import allocate, available_bytes, give_back
from cpu_kernels.pages import encode

DTYPES = ("fp32", "bf16", "fp16", "int8", "fp8")


def k_offset(layout: Layout, position: int, dim: int) -> int:
    """Byte offset of one K element inside the block."""
    n, size = layout.per_lane, layout.element_bytes
    tile, lane = divmod(position, LANES)
    return (((tile * (layout.head_dim // n) + dim // n) * LANES + lane) * n + dim % n) * size


def v_offset(layout: Layout, position: int, dim: int) -> int:
    """The same of one V element."""
    n, rows = layout.per_lane, layout.page_size // layout.per_lane
    chunk, lane = divmod(dim, LANES)
    line = chunk * rows + position // n
    return layout.k_bytes + ((line * LANES + lane) * n + position % n) * layout.element_bytes


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layout_puts_each_element_where_it_says(dtype: str, page: int) -> None:
    layout = Layout(dtype, 48, page)
    plain = np.arange(page * 48).astype(np.int32).reshape(page, 48) % 30_000
    plain = plain.astype(np.int8 if dtype == "int8" else layout.numpy_dtype)
    for order, back, offset, base in (
        (pack_k, unpack_k, k_offset, 0),
        (pack_v, unpack_v, v_offset, layout.k_bytes),
    ):
        flat = order(plain, layout)
        assert np.array_equal(back(flat, layout), plain)
        for position, dim in ((0, 0), (page - 1, 47), (7, 17), (page // 2, 33)):
            assert flat[(offset(layout, position, dim) - base) // layout.element_bytes] == plain[position, dim]


@settings(deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(16, 80), (32, 64), (64, 16), (128, 64)]),
    seed=st.integers(0, 1000),
)
def test_pack_and_append_agree_and_read_back(dtype: str, shape: tuple[int, int], seed: int) -> None:
    page, dim = shape
    rng = np.random.default_rng(seed)
    by_pack, by_append = (ck.KVPages(3, 2, dim, page, dtype, huge_pages=False) for _ in range(2))
    k, v = (rng.standard_normal((3, 2, page, dim)).astype(np.float32) for _ in range(2))
    ck.pack(by_pack, 0, [0, 1, 2], k, v)
    rows = [np.ascontiguousarray(np.swapaxes(x, 1, 2).reshape(-1, 2, dim)) for x in (k, v)]
    order = rng.permutation(3 * page)
    ck.append_kv(by_append, 0, rows[0][order], rows[1][order], order)
    assert np.array_equal(by_pack.buffer, by_append.buffer)
    out = [np.full((2 * page + 1, 2, dim), np.nan, np.float32) for _ in range(2)]
    ck.gather_kv(by_pack, 0, [2, 0, 1], 2 * page + 1, *out)
    for got, plain in zip(out, ck.unpack(by_pack, 0, [2, 0, 1]), strict=True):
        assert np.array_equal(got, np.swapaxes(plain, 1, 2).reshape(-1, 2, dim)[: 2 * page + 1])


def test_append_takes_every_source_type_and_skips_minus_one() -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 64)).astype(np.float32)
    half, brain = x.astype(np.float16), to_bf16(x)
    for source, values in ((x, x), (half, half.astype(np.float32)), (brain, from_bf16(brain))):
        pages = ck.KVPages(2, 2, 64, 16, "fp32", huge_pages=False)
        ck.append_kv(pages, 0, source, source, [17, -1, 3])
        k, v = ck.unpack(pages, 0, [0, 1])
        assert np.array_equal(k[1, :, 1], values[0]) and np.array_equal(v[0, :, 3], values[2])
        assert np.count_nonzero(k) == np.count_nonzero(values[[0, 2]])


def test_gather_to_bf16_is_exact() -> None:
    pages = ck.KVPages(1, 1, 64, 16, "bf16", huge_pages=False)
    bits = to_bf16(np.random.default_rng(0).standard_normal((16, 1, 64)).astype(np.float32))
    ck.append_kv(pages, 0, bits, bits, np.arange(16))
    k, v = np.empty_like(bits), np.empty_like(bits)
    ck.gather_kv(pages, 0, [0], 16, k, v)
    assert np.array_equal(k, bits) and np.array_equal(v, bits)


def test_copy_pages_moves_whole_pages_of_one_or_all_layers() -> None:
    rng = np.random.default_rng(0)
    src, dst = (ck.KVPages(n, 2, 64, 16, "int8", 2, huge_pages=False) for n in (4, 3))
    src.buffer[...] = rng.integers(0, 255, src.buffer.shape)
    ck.copy_pages(src, [3, 0], dst, [1, 2])
    assert np.array_equal(dst.buffer[:, [1, 2]], src.buffer[:, [3, 0]]) and not dst.buffer[:, 0].any()
    ck.copy_pages(src, [1], dst, [0], layer=1)
    assert np.array_equal(dst.buffer[1, 0], src.buffer[1, 1]) and not dst.buffer[0, 0].any()
    with pytest.raises(ValueError, match=r"dst_ids\[0\] is page 3, but the pool has pages 0 to 2"):
        ck.copy_pages(src, [0], dst, [3])
    with pytest.raises(ValueError, match="one layout"):
        ck.copy_pages(src, [0], ck.KVPages(3, 2, 64, 32, "int8", 2, huge_pages=False), [0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_no_tokens_are_appended_and_gathered_as_nothing(dtype: str, library: str) -> None:
    make = pytest.importorskip(library, reason=f"{library} is not installed")
    pages = ck.KVPages(2, 2, 64, 16, dtype, huge_pages=False)
    pages.buffer[...] = 7
    none, wide = make.empty((0, 2, 64), dtype=make.float32), make.empty((5, 6, 64), dtype=make.float32)
    for source in (none, wide[5:, 2:4]):
        ck.append_kv(pages, 0, source, source, [])
        for ids in ([], [1]):
            ck.gather_kv(pages, 0, ids, 0, source, source)
    ck.pack(pages, 0, [], *np.empty((2, 0, 2, 16, 64), np.float32))
    assert [x.shape for x in ck.unpack(pages, 0, [])] == [(0, 2, 16, 64)] * 2
    assert (pages.buffer == 7).all()
    plain = np.empty((0, 2, 64), np.float32)
    with pytest.raises(ValueError, match=r"k has shape \[0, 2, 64\], expected \[1, 2, 64\]"):
        ck.append_kv(pages, 0, plain, plain, [0])
    with pytest.raises(ValueError, match=r"v_out has shape \[0, 2, 63\], expected \[0, 2, 64\]"):
        ck.gather_kv(pages, 0, [], 0, plain, plain[:, :, 1:])


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_step_without_rows_attends_to_nothing(backend: str) -> None:
    pages = ck.KVPages(2, 2, 64, 16, "fp32", huge_pages=False)
    q, out, lse = np.empty((0, 4, 64), np.float32), np.empty((0, 4, 64), np.float32), np.empty((0, 4), np.float32)
    if backend == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    plan = ck.plan_decode(pages, np.empty((0, 2), np.int32), np.empty(0, np.int32), 4, backend=backend)
    plan.run(q, out, lse)
    if backend == "native":
        with ck.WorkerPool(1) as pool:
            pool.submit(plan, q, out, lse).wait(5.0)


def test_append_and_gather_refuse_bad_arguments() -> None:
    pages = ck.KVPages(2, 2, 64, 16, "bf16", huge_pages=False)
    row = np.zeros((1, 2, 64), np.float32)
    for slots, message in (([32], r"slot_mapping\[0\] is 32, outside -1 to 31"), ([-2], r"slot_mapping\[0\] is -2")):
        with pytest.raises(ValueError, match=message):
            ck.append_kv(pages, 0, row, row, slots)
    with pytest.raises(TypeError, match="k is fp32 and v is fp16"):
        ck.append_kv(pages, 0, row, row.astype(np.float16), [0])
    with pytest.raises(ValueError, match="num_tokens 33 does not fit 2 pages of 16"):
        ck.gather_kv(pages, 0, [0, 1], 33, row, row)
    with pytest.raises(ValueError, match=r"page_ids\[1\] is page 2"):
        ck.gather_kv(pages, 0, [0, 2], 17, np.zeros((17, 2, 64), np.float32), np.zeros((17, 2, 64), np.float32))


def test_report_equals_what_the_process_holds() -> None:
    size = 192 << 20
    before = resident()
    pages = ck.KVPages(size // (2 * 8 * 32 * 128 * 2), 8, 128, 32, "bf16")
    assert pages.nbytes == size
    assert abs(resident() - before - size) < 0.05 * size


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_scales_are_counted_and_other_memory_is_small(problem: Any) -> None:
    pages = ck.KVPages(10, 2, 64, 32, "int8", huge_pages=False)
    assert pages.nbytes == pages.buffer.nbytes == 10 * 2 * (2 * 32 * 64 + 8 * 32)
    p = problem([4096] * 4, heads=2, group=1, dim=64)
    space = p.plan().workspace()
    assert space.partials.nbytes + space.counters.nbytes < 0.01 * p.pages.nbytes


def test_more_than_there_is_is_refused_with_both_numbers() -> None:
    have = available_bytes()
    assert have is not None
    with pytest.raises(MemoryError, match=r"needs \d+ bytes, but only \d+ bytes of memory are available"):
        ck.KVPages(20 * have // (2 * 8 * 32 * 128 * 2), 8, 128, 32, "bf16")


def test_parallel_first_touch_gives_zeroes() -> None:
    buffer = allocate(65 << 20, "a test", cpus=ck.topology.read().allowed)
    assert not buffer.any() and buffer.ctypes.data % (2 << 20) == 0


def test_large_buffers_may_have_huge_pages_and_can_be_given_back() -> None:
    """Shared memory, what Python's mmap makes when not told otherwise, gets small pages whatever is asked for."""
    buffer = allocate(4 << 20, "a test")
    address, flags, found = buffer.ctypes.data, "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
            found = first <= address < last
        elif found and line.startswith("VmFlags"):
            flags = line
    assert " sh" not in flags and (" hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()), flags
    buffer[:] = 7
    give_back(buffer)
    assert not buffer.any()


def test_memory_that_the_system_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the process (``ulimit -v``) says no where the machine has room."""

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("cpu_kernels.memory.mmap.mmap", refuse)
    with pytest.raises(MemoryError, match="weights needs 4096 bytes, which the system refuses: Cannot allocate memory"):
        allocate(4096, "weights", touch=False)


def test_available_memory_is_read_from_meminfo() -> None:
    assert available_bytes("MemTotal: 10 kB\nMemAvailable:   7 kB\n") == 7168
    assert available_bytes("") is None


def test_encode_int8_rounds_to_even_and_keeps_zero_rows() -> None:
    codes, scales = encode(np.array([[127.0, 0.5, 1.5, -2.5], [0, 0, 0, 0]], np.float32), "int8")
    assert codes.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0]]
    assert scales is not None and scales.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_takes_sixteen_bit_arrays_as_append_does(dtype: str, kind: str) -> None:
    """NumPy uint16 is bf16 bits; NaNs become quiet, and pages of a strided view are taken where they lie."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 2, 32, 48)).astype(np.float32)
    narrow = to_bf16(x) if kind == "bf16" else x.astype(np.float16)
    if dtype in ("bf16", "fp32"):
        narrow.view(np.uint16)[1, 1, 3, 5] = 0x7F81 if kind == "bf16" else 0x7C01  # a signalling NaN
    by_pack, by_append = (ck.KVPages(3, 2, 48, 32, dtype, huge_pages=False) for _ in range(2))
    ck.pack(by_pack, 0, [2, 0], narrow[::2], narrow[1::2])
    for page, (k, v) in zip([2, 0], ((narrow[0], narrow[1]), (narrow[2], narrow[3])), strict=True):
        rows = [np.ascontiguousarray(np.swapaxes(part, 0, 1)) for part in (k, v)]
        for offset in range(31, -1, -1):  # one by one, no tile
            ck.append_kv(by_append, 0, rows[0][offset][None], rows[1][offset][None], [page * 32 + offset])
    assert np.array_equal(by_pack.buffer, by_append.buffer)


def test_tiles_and_single_tokens_mix_in_one_call() -> None:
    """Slots that jump, skip, begin inside of a tile and fill whole ones."""
    rng = np.random.default_rng(1)
    slots = np.concatenate([np.arange(5, 16), np.arange(16, 48), [-1, 3], np.arange(64, 80), np.arange(48, 63), [0]])
    k, v = (rng.standard_normal((len(slots), 2, 32)).astype(np.float32) for _ in range(2))
    for dtype in DTYPES:
        whole, single = (ck.KVPages(3, 2, 32, 32, dtype, huge_pages=False) for _ in range(2))
        ck.append_kv(whole, 0, k, v, slots)
        for i in range(len(slots)):
            ck.append_kv(single, 0, k[i : i + 1], v[i : i + 1], slots[i : i + 1])
        assert np.array_equal(whole.buffer, single.buffer)
        out = [np.empty((75, 2, 32), np.float32) for _ in range(2)]
        ck.gather_kv(whole, 0, [0, 1, 2], 75, *out)
        plain = [np.swapaxes(x, 1, 2).reshape(-1, 2, 32)[:75] for x in ck.unpack(whole, 0, [0, 1, 2])]
        assert np.array_equal(out[0], plain[0]) and np.array_equal(out[1], plain[1])
