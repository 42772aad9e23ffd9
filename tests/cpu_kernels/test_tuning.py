"""Parameters per processor: where they come from, that they are kept, and that results do not depend on them."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cpu_kernels as ck
from cpu_kernels import doctor, tune, tuning
from cpu_kernels.native import NativeDecode
from cpu_kernels.tuning import TABLE, TABLES, Tuning

OTHERS = (
    Tuning(fetch_light=0, fetch_heavy=0, fetch_tiles=0, near_bytes=0, run_group=0, chunk_bytes=64),
    Tuning(fetch_light=64, fetch_heavy=256, fetch_tiles=256, cache_level=3, near_narrow=0, run_group=128),
    Tuning(fetch_heavy=128, fetch_tiles=128, cache_level=1, near_bytes=1 << 20, near_narrow=1 << 20, run_heads=2),
)
CPUINFO = (
    "processor\t: 0\nflags\t\t: fpu {}\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: {}\n"
    "model name\t: Some\nstepping\t: 2\n"
)


LEVELS = ck.isa.detect(override="").available
KERNELS = [("bf16", 1), ("bf16", 8), ("int8", 1), ("int8", 3), ("fp8", 1), ("fp32", 4)]
# Levels without a dot product have one generator, for vectors of other widths.
CHOSEN = [(x, *k) for x in LEVELS for k in (KERNELS if x in ("amx_bf16", "avx512_bf16") else KERNELS[::2])]


@pytest.mark.parametrize(("level", "dtype", "group"), CHOSEN)
def test_results_are_bit_equal_whatever_is_chosen(problem: Any, level: str, dtype: str, group: int) -> None:
    p = problem([1, 31, 700, 64], heads=3, group=group, dtype=dtype)
    plan, results = p.plan(split_tokens=256), []
    for chosen in (TABLE, *OTHERS):
        native = NativeDecode(plan.inputs, level, tuning=chosen)
        native.run(p.q, p.out, p.lse, 0, None, None, None)
        results.append((p.out.copy(), p.lse.copy()))
        p.out[...] = np.nan
    for out, lse in results[1:]:
        assert np.array_equal(out, results[0][0]) and np.array_equal(lse, results[0][1])


def test_what_is_chosen_is_compiled(problem: Any) -> None:
    """Parameters reach the kernels: other spacings are other code, and other cuts other chunks."""
    p = problem([4096] * 4, heads=8, group=1)
    made = [NativeDecode(p.plan().inputs, "portable", tuning=x) for x in (TABLE, *OTHERS)]
    assert len({x.kernel for x in made}) == len(made)
    assert made[0].unit_heads == 4 and made[1].unit_heads == 1 and made[3].unit_heads == 2


@pytest.mark.parametrize(
    ("flag", "vendor", "family", "model", "page"),
    [
        ("avx512f", "AuthenticAMD", 25, 17, 32),
        ("avx512f", "AuthenticAMD", 26, 2, 128),
        ("amx_bf16", "GenuineIntel", 6, 167, 128),
        ("avx512f", "GenuineIntel", 6, 167, 32),
        ("", "", 0, 0, 32),
    ],
)
def test_the_table_goes_by_vendor_and_family_and_amx(
    flag: str, vendor: str, family: int, model: int, page: int
) -> None:
    who = tuning.processor(CPUINFO.format(flag, vendor, family, model))
    assert (who.vendor, who.family, who.model, who.stepping, who.name) == (vendor, family, model, 2, "Some")
    assert who.tiles == (flag == "amx_bf16")
    assert tuning.from_table(who).page_size == page
    assert tuning.from_table(tuning.processor("")) == TABLE


def test_the_tables_rows_do_not_overlap() -> None:
    for i, (vendor, family, models, _) in enumerate(TABLES):
        for other, number, range_, _ in TABLES[:i]:
            assert (vendor, family) != (other, number) or not set(models) & set(range_)


def test_what_was_measured_is_found_by_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_KERNELS_CACHE", str(tmp_path))
    who, chosen = tuning.processor(), replace(TABLE, page_size=64, fetch_heavy=128)
    tuning.current.cache_clear()
    before = tuning.current()
    assert before[0] == tuning.from_table(who) and before[1].startswith("table for")
    assert tuning.save(tmp_path, who, chosen, ["a line"])
    assert tuning.current()[0] == chosen and tuning.best_page_size() == 64
    assert any("measured on this processor" in line for line in doctor.lines())
    assert tuning.load(tmp_path, replace(who, stepping=who.stepping + 1)) is None
    monkeypatch.setenv(tuning.ENVIRONMENT, "table")
    tuning.current.cache_clear()
    assert tuning.current() == before
    tuning.current.cache_clear()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tuning": {"page_size": 32}}', '{"tuning": {"page_size": "x"}}'])
def test_a_profile_that_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    who = tuning.processor()
    tuning.path_of(tmp_path, who).write_text(text)
    assert tuning.load(tmp_path, who) is None


def test_a_folder_that_cannot_be_written_costs_the_profile_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not tuning.save(blocked / "cache", tuning.processor(), TABLE, [])


def test_a_user_without_a_home_has_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "cache_dir", lambda: None)
    tuning.current.cache_clear()
    assert tuning.current()[0] == tuning.from_table(tuning.processor())
    assert not tuning.save(None, tuning.processor(), TABLE, [])
    tuning.current.cache_clear()


def test_the_search_ends_in_time_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = os.environ.get("CPU_KERNELS_CACHE")
    monkeypatch.setenv("CPU_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "SMALLEST", 1 << 20)
    monkeypatch.setattr(tune, "LARGEST", 1 << 20)
    start = time.monotonic()
    some = tune.steps(ck.isa.detect().level)[1::3]  # each compiles a kernel for every value and group
    monkeypatch.setattr(tune, "steps", lambda level: some)
    monkeypatch.setattr(tune, "ROUNDS", 2)
    tune.main(["--seconds", "0"])
    printed = capsys.readouterr().out
    assert "not tried" in printed and "kept in" in printed and time.monotonic() - start < 60
    assert tuning.load(tmp_path, tuning.processor()) == tuning.from_table(tuning.processor())
    monkeypatch.delenv("CPU_KERNELS_CACHE")  # where what is compiled here lies already
    if usual is not None:
        monkeypatch.setenv("CPU_KERNELS_CACHE", usual)
    with ck.WorkerPool(1) as pool:
        best, log = tune.search(30.0, lambda line: None, pool)
    assert len(log) == 1 + len(some) and isinstance(best, Tuning)
    tuning.current.cache_clear()


def test_values_that_mean_nothing_are_refused() -> None:
    for bad in ({"fetch_heavy": 32}, {"cache_level": 4}, {"page_size": 24}, {"chunk_bytes": 0}, {"run_group": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            replace(TABLE, **bad)
