"""Kernels touch nothing outside of what they are given: every array lies between pages that cannot be touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_kernels as ck

PROGRAM = """
import ctypes, dataclasses, faulthandler, mmap, sys
import numpy as np
import cpu_kernels as ck
from cpu_kernels.native import NativeDecode

faulthandler.enable()
PAGE, held = mmap.PAGESIZE, []

def fenced(array):
    "A copy that ends where the next byte is a fault, with another such page before it."
    room = max(PAGE, -(-array.nbytes // PAGE) * PAGE)
    memory = mmap.mmap(-1, room + 2 * PAGE)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    for at in (start, start + PAGE + room):
        assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(at), ctypes.c_size_t(PAGE), 0)
    held.append(memory)
    out = np.frombuffer(memory, np.uint8, array.nbytes, PAGE + room - array.nbytes).view(array.dtype)
    out[...] = array.ravel()
    return out.reshape(array.shape)

ck.pages.allocate = lambda size, *rest, **options: fenced(np.zeros(size, np.uint8))
dtype, rng = sys.argv[1], np.random.default_rng(0)
for lens, heads, dim, page, group in (([300, 0, 17, 32], 2, 64, 32, 3), ([65, 64, 1], 1, 80, 64, 2)):
    used = [-(-n // page) for n in lens]
    pages, names = ck.KVPages(sum(used), heads, dim, page, dtype), iter(rng.permutation(sum(used)))
    table = np.full((len(lens), max(used)), -1, np.int32)
    for row, n in zip(table, used):
        row[:n] = [next(names) for _ in range(n)]
    slots = np.concatenate([table[i, np.arange(n) // page] * page + np.arange(n) % page for i, n in enumerate(lens)])
    for narrow in (np.float32, np.float16, lambda x: ck.to_bf16(x)):
        def made(*shape):
            return fenced(narrow(rng.standard_normal(shape).astype(np.float32)))

        k, v = made(len(slots), heads, dim), made(len(slots), heads, dim)
        ck.append_kv(pages, 0, k, v, fenced(slots.astype(np.int64)))
        for i, n in enumerate(lens):
            ck.gather_kv(pages, 0, table[i, : used[i]], n, made(n, heads, dim), made(n, heads, dim))
        for level in ck.isa.detect(override="").available:
            inputs = ck.plan_decode(pages, table, lens, heads * group, isa=level, split_tokens=2 * page).inputs
            arrays = {name: fenced(getattr(inputs, name)) for name in ("block_table", "slots")}
            native = NativeDecode(dataclasses.replace(inputs, **arrays), level)
            native.items, native.edges = fenced(native.items), fenced(native.edges)
            native._head, space = native._make_head(), native.workspace()
            for name, size in (("partials", space.partial_bytes // 4), ("counters", len(space.counters))):
                array = fenced(np.zeros(size, getattr(space, name).dtype))
                setattr(space, name, array)
                setattr(space, name + "_at", array.ctypes.data)
            q, new = made(len(lens), heads * group, dim), made(len(lens), heads, dim)
            native.run(q, q, fenced(np.zeros(q.shape[:2], np.float32)), 0, new, new, space)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pages are made untouchable by Linux's mprotect")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "fp8"])
def test_nothing_outside_of_the_arrays_is_touched(dtype: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(ck.__file__).parents[1])}
    argv = [sys.executable, "-c", PROGRAM, dtype]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
