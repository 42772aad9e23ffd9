"""The code of docs/extend.md works as it stands: on the simulator, on this machine, and against the oracle."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from cpu_kernels import (
    KVPages,
    WorkerPool,
    append_kv,
    backends,
    dtypes,
    from_bf16,
    isa,
    plan_decode,
    reference,
    to_bf16,
    unpack,
)
from experiments.run import main

DOC = Path(__file__).parents[2] / "docs" / "extend.md"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The folder ``mine`` with every file that the page says to save."""
    text = DOC.read_text()
    blocks = re.findall(r"as\s+`mine/([\w/.]+)`:\n\n```(?:python|yaml)\n(.*?)```", text, re.S)
    assert [name for name, _ in blocks] == [
        "on_time.py", "policy/on_time.yaml", "bursts.py", "workload/bursts.yaml", "my_points.py", "e5m2.py",
        "plain.py", "streaming.py",
    ]  # fmt: skip
    for name, code in blocks:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("on_time", "bursts", "my_points", "e5m2", "plain", "streaming"):
        sys.modules.pop(name, None)


def test_a_dtype_of_ones_own_is_stored_and_attended_to_on_every_level(mine):
    importlib.import_module("e5m2")
    pages = KVPages(3, 2, 64, 32, "fp8_e5m2", huge_pages=False)
    draw = np.random.default_rng(0)
    k, v = (draw.standard_normal((70, 2, 64)).astype(np.float32) for _ in range(2))
    v[69:] = np.nan  # behind the row's end
    append_kv(pages, 0, k, v, np.arange(70))
    stored, values = unpack(pages, 0, [0, 1, 2])
    assert np.abs(stored[0, :, :5].swapaxes(0, 1) / k[:5] - 1).max() < 0.13
    kind = dtypes.kind_of("fp8_e5m2")
    assert np.array_equal(stored[0, 1], kind.decode(kind.encode(k[:32, 1])))
    q, out = draw.standard_normal((1, 4, 64)).astype(np.float32), np.empty((1, 4, 64), np.float32)
    want, _ = reference.decode_reference(q, stored, values, np.array([[0, 1, 2]]), np.array([69]))
    for level in isa.detect().available:
        plan_decode(pages, [[0, 1, 2]], [69], 4, isa=level).run(q, out)
        assert np.abs(out - want).max() < 1e-5
    del dtypes.KINDS["fp8_e5m2"]


def rows(mine, name):
    return [json.loads(line) for line in (mine / "results" / name / "latest" / "rows.jsonl").read_text().splitlines()]


def run(mine, *overrides):
    return main(["-m", f"results_root={mine}/results", f"hydra.searchpath=[file://{mine}]", *overrides])


def test_the_policy_fits_on_a_screen(mine):
    assert len((mine / "on_time.py").read_text().splitlines()) <= 50


def test_an_outside_policy_runs_on_the_simulator(mine):
    where = ["+experiment=ratio", "hardware=t4", "settings.exposed_fraction=0", "settings.ratio=2,4"]
    assert run(mine, *where, "policy=gpu_only,on_time") == 0
    rate = {(r["policy"], r["ratio"]): r["tokens_per_s"] for r in rows(mine, "ratio")}
    assert rate["on_time", 2] > rate["gpu_only", 2]  # a T4 with four requests: any help pays


def test_its_options_can_be_swept(mine):
    where = ["+experiment=ratio", "hardware=t4", "settings.exposed_fraction=0", "settings.ratio=4", "policy=on_time"]
    assert run(mine, *where, "policy.options.tpot_ms=1,100000") == 0
    by = {r["tpot_ms"]: r["cpu_tokens_per_s"] for r in rows(mine, "ratio")}
    assert by[1] > by[100000]


def test_an_outside_policy_and_back_end_run_on_host(mine):
    small = ["repeats=1", "settings.ratio=1", "settings.output_tokens=3", "policy=on_time", "device.backend=plain"]
    assert run(mine, "+experiment=ratio_host", *small) == 0
    [row] = rows(mine, "ratio_host")
    assert (row["kind"], row["device"], row["cpu_rows"], row["completed"]) == ("measured", "host", 2, 4)
    backends.REGISTRY.pop("plain")


def test_an_outside_workload_is_served(mine):
    where = ["name=bursts", "point=experiments.points.serve:point", "workload=bursts", "policy=gpu_only,async_overlap"]
    assert run(mine, *where) == 0
    assert [(r["workload"], r["completed"]) for r in rows(mine, "bursts")] == [("bursts", 24), ("bursts", 24)]


def test_an_outside_point_and_its_verdict(mine, capsys):
    assert run(mine, "name=mine", "point=my_points:point", "+settings.tokens=64,128") == 0
    assert [r["value"] for r in rows(mine, "mine")] == [128, 256]
    assert "the best of 2 rows has 128 tokens: 256" in capsys.readouterr().out


def test_the_outside_back_end_agrees_with_the_oracle(mine, monkeypatch):
    monkeypatch.setitem(backends.REGISTRY, "plain", "plain")
    rng, lens, heads, dim = np.random.default_rng(0), [5, 37, 0], 4, 32
    pages = KVPages(8, 2, dim, page_size=16, dtype="fp32")
    table = np.array([[3, -1, -1], [1, 6, 2], [-1, -1, -1]], np.int32)
    keys = [rng.standard_normal((2, n, 2, dim)).astype(np.float32) for n in lens]
    for row, (k, v) in enumerate(keys[:2]):
        slots = np.array([table[row, t // 16] * 16 + t % 16 for t in range(lens[row])], np.int64)
        append_kv(pages, 0, k, v, slots)
    q = rng.standard_normal((3, heads, dim)).astype(np.float32)
    out, lse = np.full_like(q, np.nan), np.full((3, heads), np.nan, np.float32)
    plan_decode(pages, table, np.array(lens, np.int32), heads, backend="plain").run(q, out, lse)
    for row, (k, v) in enumerate(keys[:2]):
        want, want_lse = reference.attend(q[row], k, v, lens[row] - 1)
        np.testing.assert_allclose(out[row], want, atol=2e-6)
        np.testing.assert_allclose(lse[row], want_lse, atol=2e-6)
    assert np.all(out[2] == 0) and np.all(np.isneginf(lse[2]))


def test_an_outside_kernel_in_numba_runs_on_the_workers_and_in_the_engine(mine, monkeypatch):
    pytest.importorskip("numba", reason="numba is not installed")
    monkeypatch.setitem(backends.REGISTRY, "streaming", "streaming")
    rng, heads, dim, length = np.random.default_rng(0), 4, 32, 100
    pages = KVPages(7, 2, dim, page_size=16, dtype="bf16", layout=backends.layout_of("streaming"))
    k, v = (from_bf16(to_bf16(rng.standard_normal((length, 2, dim)).astype(np.float32))) for _ in range(2))
    append_kv(pages, 0, k, v, np.arange(length))
    q, kept = rng.standard_normal((1, heads, dim)).astype(np.float32), np.r_[:16, 64:length]
    with WorkerPool(1) as pool:
        for name, keys in (("streaming:30", kept), ("streaming", np.arange(length))):
            out, lse = np.zeros_like(q), np.zeros((1, heads), np.float32)
            plan = plan_decode(pages, [np.arange(7)], [length], heads, backend=name)
            pool.submit(plan, q, out, lse).wait(60)
            want, want_lse = reference.attend(q[0], k[keys], v[keys], len(keys) - 1)
            np.testing.assert_allclose(out[0], want, atol=3e-6)
            np.testing.assert_allclose(lse[0], want_lse, atol=3e-6)
    assert backends.approximate("streaming")
    small = ["repeats=1", "settings.ratio=1", "settings.output_tokens=3", "policy=on_time", "device.backend=streaming"]
    assert run(mine, "+experiment=ratio_host", *small) == 0
    [row] = rows(mine, "ratio_host")
    assert (row["kind"], row["cpu_rows"], row["completed"], row["attention_approximate"]) == ("measured", 2, 4, True)


def test_a_back_end_that_is_nowhere_is_refused(mine, capsys):
    where = ["+experiment=ratio_host", "repeats=1", "settings.ratio=1", "policy=gpu_only"]
    assert run(mine, *where, "device.backend=nope") == 1
    assert "device.backend 'nope' is neither a module" in capsys.readouterr().out
