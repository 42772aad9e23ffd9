"""The door for NumPy arrays: what only they can be (read-only, of another byte order, in a file), and any mix of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu_kernels as ck


def pool(dtype: str = "fp32", **options: Any) -> ck.KVPages:
    pages = ck.KVPages(6, 2, 32, 16, dtype, huge_pages=False, **options)
    k, v = np.random.default_rng(0).standard_normal((2, 6, 2, 16, 32)).astype(np.float32)
    for layer in range(pages.num_layers):
        ck.pack(pages, layer, np.arange(6), k, v)
    return pages


def queries(rows: int = 2, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 4, 32)).astype(np.float32)


def plan_of(pages: ck.KVPages, **options: Any) -> ck.DecodePlan:
    return ck.plan_decode(pages, [[3, 1], [2, -1]], [20, 5], 4, **options)


BACKENDS = ["native", "torch"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_that_cannot_be_written_is_refused(tmp_path: Path, backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    pages, q = pool(), queries()
    plan = plan_of(pages, backend=backend)
    np.save(tmp_path / "o.npy", np.zeros_like(q))
    mapped, constant = np.load(tmp_path / "o.npy", mmap_mode="r"), bytes(q.nbytes)
    frozen = np.zeros_like(q)
    frozen.flags.writeable = False
    for out in (mapped, np.frombuffer(constant, np.float32).reshape(q.shape), frozen):
        with pytest.raises(ValueError, match="out is read-only: results cannot be written to it"):
            plan.run(q, out)
        with pytest.raises(ValueError, match="k_out is read-only"):
            ck.gather_kv(pages, 0, [0], 2, out.reshape(-1, 2, 32)[:2], np.zeros((2, 2, 32), np.float32))
    assert constant == bytes(q.nbytes) and not frozen.any()
    q.flags.writeable = False
    want, out = np.zeros_like(q), np.zeros_like(q)
    plan.run(q.copy(), want)
    plan.run(q, out)  # reading it is fine
    assert np.array_equal(out, want) and want.any()


def test_another_byte_order_is_refused_not_misread() -> None:
    pages, q = pool(), queries()
    before, swapped = pages.buffer.copy(), q[:1, :2].astype(">f4" if np.little_endian else "<f4")
    for call in (
        lambda: ck.append_kv(pages, 0, swapped, swapped, [0]),
        lambda: plan_of(pages).run(q.astype(swapped.dtype), np.zeros_like(q)),
        lambda: plan_of(pages).run(q, np.zeros(q.shape, swapped.dtype)),
        lambda: ck.pack(pages, 0, [0], *np.zeros((2, 1, 2, 16, 32), swapped.dtype)),
        lambda: ck.merge_state(*[x.astype(swapped.dtype) for x in (q, q[..., 0]) * 2]),
    ):
        with pytest.raises(TypeError, match="has dtype .f4, the other byte order: give it as"):
            call()
    assert np.array_equal(before, pages.buffer)
    ck.plan_decode(pages, np.array([[3, 1]], ">i4"), np.array([20], ">i8"), 4)  # integers are copied, so converted


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8"])
def test_uint16_is_bf16_bits_in_pack_as_in_append(dtype: str) -> None:
    values = np.random.default_rng(2).standard_normal((2, 2, 2, 16, 32)).astype(np.float32)
    bits = ck.to_bf16(values)
    by_bits, by_values = (ck.KVPages(2, 2, 32, 16, dtype, huge_pages=False) for _ in range(2))
    ck.pack(by_bits, 0, [1, 0], *bits)
    ck.pack(by_values, 0, [1, 0], *ck.from_bf16(bits))
    assert np.array_equal(by_bits.buffer, by_values.buffer) and by_bits.buffer.any()
    torch = pytest.importorskip("torch", reason="torch is not installed")
    ck.pack(by_bits, 0, [1, 0], *(torch.from_numpy(x).bfloat16() for x in values))
    assert np.array_equal(by_bits.buffer, by_values.buffer)
    with pytest.raises(TypeError, match="k has dtype int64"):
        ck.pack(by_bits, 0, [1, 0], *np.zeros((2, 2, 2, 16, 32), np.int64))


def test_a_workspace_of_another_plan_is_refused() -> None:
    pages = ck.KVPages(40, 2, 32, 16, "fp32", huge_pages=False)
    ck.pack(pages, 0, np.arange(40), *np.random.default_rng(0).standard_normal((2, 40, 2, 16, 32)).astype(np.float32))
    big = ck.plan_decode(pages, [np.arange(40)], [640], 4, split_tokens=32)
    small = ck.plan_decode(pages, [np.arange(40)], [64], 4, split_tokens=32)
    q, out = queries(1), np.zeros((1, 4, 32), np.float32)
    with pytest.raises(ValueError, match="workspace holds .* this plan needs .*: take one from this plan's workspace"):
        big.run(q, out, workspace=small.workspace())
    with pytest.raises(TypeError, match="workspace is a ndarray: take it from the plan's workspace"):
        big.run(q, out, workspace=np.zeros(10))
    small.run(q, out, workspace=big.workspace())  # a larger one holds all that is needed
    want = np.zeros_like(out)
    small.run(q, want)
    assert np.array_equal(out, want) and want.any()


def test_results_in_the_pages_and_inputs_from_them_are_refused() -> None:
    pages, q = pool(), queries()
    inside = pages.buffer.view(np.float32).reshape(-1)
    rows = inside[: 2 * 2 * 32].reshape(2, 2, 32)
    for call in (
        lambda: plan_of(pages).run(q, inside[: q.size].reshape(q.shape)),
        lambda: plan_of(pages).run(q, np.zeros_like(q), inside[:8].reshape(2, 4)),
        lambda: plan_of(pages).run(q, np.zeros_like(q), k_new=rows, v_new=rows.copy()),
        lambda: ck.append_kv(pages, 0, rows, rows.copy(), [0, 1]),
        lambda: ck.gather_kv(pages, 0, [0], 2, rows, rows.copy()),
        lambda: ck.pack(pages, 0, [0], *[inside[:1024].reshape(1, 2, 16, 32)] * 2),
    ):
        with pytest.raises(ValueError, match="lies in the memory of the KV pages: give it memory of its own"):
            call()


def test_rows_that_share_a_slot_attend_but_do_not_append() -> None:
    pages, q = pool(), queries()
    plan = ck.plan_decode(pages, [[3], [3]], [5, 5], 4)  # a prefix that two sequences share
    plan.run(q, np.zeros_like(q))
    new = queries(2, 7)[:, :2]
    before = pages.buffer.copy()
    with pytest.raises(ValueError, match=r"slot 52 is named by rows \[0, 1\]; a slot may be written once per call"):
        plan.run(q, np.zeros_like(q), k_new=new, v_new=new)
    with pytest.raises(ValueError, match=r"slot 52 is named by rows \[0, 1\]"):
        ck.plan_decode(pages, [[3], [3]], [5, 5], 4, slot_mapping=[52, 52])
    assert np.array_equal(before, pages.buffer)
    with pytest.raises(ValueError, match="page_ids names 2 pages, 1 of them different"):
        ck.pack(pages, 0, [1, 1], *np.zeros((2, 2, 2, 16, 32), np.float32))
    with pytest.raises(ValueError, match="dst_ids names 2 pages, 1 of them different"):
        ck.copy_pages(pages, [0, 1], pool(), [2, 2])
    with pytest.raises(ValueError, match="page 1 is both in src_ids and in dst_ids of one pool"):
        ck.copy_pages(pages, [0, 1], pages, [1, 2])
    with pytest.raises(ValueError, match="layer -1 is out of range: the pool has 1 layers"):
        ck.unpack(pages, -1, [0])


_SHARED: dict[str, Any] = {}


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_array_is_used_right_or_refused_untouched(data: st.DataObject) -> None:
    """Queries and results of any dtype, byte order, strides, writeability, place and size."""
    pages = _SHARED.setdefault("pages", pool())
    plan = _SHARED.setdefault("plan", plan_of(pages))
    memory = np.random.default_rng(3).integers(0, 120, 16 << 10).astype(np.uint8)
    memory = np.frombuffer(bytearray(memory.tobytes()), np.uint8)

    def draw(what: str) -> np.ndarray:
        kind = np.dtype(data.draw(st.sampled_from(["f4", "f4", "f4", "u2", "f2", "f8", "i4", ">f4", ">u2"]), what))
        dim = data.draw(st.sampled_from([32, 32, 32, 31]))
        rows = data.draw(st.sampled_from([2, 2, 2, 3]))
        last = kind.itemsize * data.draw(st.sampled_from([1, 1, 1, 1, 2]))
        head = data.draw(st.sampled_from([32 * kind.itemsize, 40 * kind.itemsize, 8, 0]))
        row = data.draw(st.sampled_from([4 * 32 * kind.itemsize, 4 * 40 * kind.itemsize, 1024, 0]))
        at = data.draw(st.sampled_from([0, 0, 64, 512, 1024, 4096, 4097, 8192]))
        x = np.ndarray((rows, 4, dim), kind, memory.data, at, (row, head, last))
        x.flags.writeable = data.draw(st.sampled_from([True, True, True, False]))
        return x

    q, out = draw("q"), draw("out")
    before, copy, place = memory.tobytes(), np.array(q, order="C"), np.zeros(out.shape, out.dtype)
    try:
        plan.run(q, out)
    except (ValueError, TypeError):
        assert memory.tobytes() == before
        return
    plan.run(copy, place)  # the same in memory of their own
    assert np.array_equal(
        out.view(np.uint8 if out.itemsize == 1 else f"u{out.itemsize}"), place.view(f"u{out.itemsize}")
    )
    rest = np.frombuffer(before, np.uint8).copy()
    np.ndarray(out.shape, out.dtype, rest.data, out.ctypes.data - memory.ctypes.data, out.strides)[...] = place
    assert rest.tobytes() == memory.tobytes()  # and nothing beside it was touched


def test_the_order_of_a_row_survives_a_negative_stride() -> None:
    pages, q = pool(), queries()
    want = np.zeros_like(q)
    plan_of(pages).run(q[::-1].copy(), want)
    out = np.zeros_like(q)
    plan_of(pages).run(q[::-1], out[::-1])
    assert np.array_equal(out[::-1], want)


def test_nan_of_masked_keys_stays_out_of_the_torch_prefill() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pages = ck.KVPages(2, 2, 32, 16, "fp32", huge_pages=False)
    k, v = np.random.default_rng(0).standard_normal((2, 20, 2, 32)).astype(np.float32)
    k[19], v[18] = np.nan, np.inf
    ck.append_kv(pages, 0, k, v, np.arange(20))
    q = queries(20)
    outs = [np.full_like(q, np.nan) for _ in range(2)]
    for out, backend in zip(outs, ("native", "torch"), strict=True):
        ck.prefill_attention(q, pages, [[0, 1]], [0, 20], [20], out=out, backend=backend)
    assert np.isfinite(outs[1][:18]).all() and np.abs(outs[0][:18] - outs[1][:18]).max() < 1e-5
    assert not np.isfinite(outs[1][18:]).any()


def test_pages_left_of_the_window_need_no_number() -> None:
    for backend in BACKENDS:
        if backend == "torch":
            pytest.importorskip("torch", reason="torch is not installed")
        pages, q, out = pool(), queries(1), np.zeros((1, 4, 32), np.float32)
        want = np.zeros_like(out)
        ck.plan_decode(pages, [[3, 1, 2]], [40], 4, window_left=5, backend=backend).run(q, want)
        ck.plan_decode(pages, [[-1, -7, 2]], [40], 4, window_left=5, backend=backend).run(q, out)
        assert np.array_equal(out, want) and want.any()
        with pytest.raises(ValueError, match=r"block_table\[0, 1\] is page -7"):
            ck.plan_decode(pages, [[-1, -7, 2]], [40], 4, window_left=20, backend=backend)
