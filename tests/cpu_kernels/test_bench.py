"""The benchmark's machinery on tiny cases: fields, pairing, checked results. No figure is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import cpu_kernels as ck
from cpu_kernels.bench import cases, store
from cpu_kernels.bench.__main__ import _against, arguments, chosen, main
from cpu_kernels.bench.measure import Prepared, measure, measure_beside_neighbour, rounds_of
from cpu_kernels.bench.peers import Peer
from cpu_kernels.bench.readloop import DISTANCES, UNIT_BYTES, ReadLoop

TINY = cases.Case("tiny", 2, heads=2, dim=64, lens=(200, 64))
FIELDS = {"kernel", "isa", "dtype", "group", "head_dim", "page_size", "threads", "gbs_median", "gbs_best", "spread",
          "read_gbs", "share_of_read_bandwidth", "rel_err"}  # fmt: skip


def test_a_row_has_every_field_and_a_checked_result() -> None:
    with ck.WorkerPool(1) as pool:
        row = measure(TINY, pool, 3, Prepared(cases.Case("other", 1, heads=2, dim=64, lens=(300,))), None)
    assert set(row) >= FIELDS and len(row["samples_ns"]) == 3 and min(row["samples_ns"]) > 0
    assert row["rel_err"] < 1e-2 and row["kv_bytes"] == 264 * 2 * 64 * 2 * 2 and row["gbs_ratio"] > 0
    json.dumps(row)


@pytest.mark.parametrize("distance", DISTANCES)
def test_the_read_loop_reads_every_line_once(distance: int) -> None:
    pages = ck.KVPages(64, 1, 64, 32, "fp32", huge_pages=False)
    lines = pages.buffer.reshape(-1).view(np.int32).reshape(-1, 16)
    lines[...] = np.arange(lines.size).reshape(lines.shape) % 1000
    loop = ReadLoop(pages, "portable", distance, 3)
    assert loop.bytes == pages.nbytes == 64 * UNIT_BYTES
    with ck.WorkerPool(1) as pool:
        pool.submit(loop, None, None).wait(10)
    assert np.array_equal(loop.sink.reshape(-1, 16).sum(0), lines.sum(0))


def test_rounds_alternate_and_drop_the_warm_ones() -> None:
    order: list[str] = []

    def timer(name: str) -> int:
        order.append(name)
        return len(order)

    samples = rounds_of({"a": lambda: timer("a"), "b": lambda: timer("b")}, 2, warm=1)
    assert "".join(order) == "abbaab" and samples["a"].tolist() == [4, 5]


def test_beside_a_busy_process_the_process_is_gone_afterwards() -> None:
    with ck.WorkerPool(1) as pool:
        row = measure_beside_neighbour(TINY, pool, 2)
    assert row["slowdown_median"] > 0 and row["rounds"] == 2


def test_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,74,44\n2023-11-16,0,9\n")
    assert cases.ragged(trace).lens == (74, 1)
    monkeypatch.setitem(cases.SETS, "reference", (TINY,))
    main(["--json", "--sets", "reference", "--rounds", "1", "--threads", "1"])
    row = json.loads(capsys.readouterr().out)
    assert row["case"] == "tiny" and row["threads"] == 1 and row["cpu"] and row["page_size"] == 32
    assert {c.page for c in chosen(arguments(["--sets", "reference,shapes", "--page-size", "128"]))} == {128}
    with pytest.raises(SystemExit, match="unknown nothing; known: reference"):
        main(["--sets", "nothing"])


def test_a_ratio_is_to_pages_of_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpu_kernels.bench.__main__.Prepared", lambda case: case)
    pages = [_against(cases.DTYPES[0], {}, size).page for size in (None, 128)]  # type: ignore[union-attr]
    assert pages == [32, 128]


def test_stores_are_timed_against_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    store.main(["--rounds", "1"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head == "| to | from bf16 | from fp16 | from fp32 |" and len(rows) == 4
    assert all(float(cell) >= 0 for row in rows for cell in row.split("|")[2:5])


def test_cases_are_checked() -> None:
    with pytest.raises(ValueError, match="lens must be one or more positive lengths"):
        cases.Case("bad", 1, lens=())
    assert Peer.available(None) == [] and Peer.available(Path("/nonexistent")) == []
