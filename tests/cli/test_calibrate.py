from __future__ import annotations

import argparse

import pytest

from cpu_kernels import tuning
from cpu_kernels.tuning import Tuning
from hybridattn import LLM
from hybridattn.calibration.bench import Bench
from hybridattn.cli import calibrate
from hybridattn.core.errors import InputError
from hybridattn.doctor import examine


def test_the_subcommand_is_there_with_its_defaults():
    parser = argparse.ArgumentParser()
    calibrate.add_parser(parser.add_subparsers())
    given = parser.parse_args(["calibrate", "--check"])
    assert given.check and given.command is calibrate.run
    assert given.profile is None  # where it lies is asked when it is needed: a user may have no home


def test_kernels_are_tuned_before_anything_is_measured(monkeypatch, tmp_path):
    calls = []

    def bench(model, dtype):
        calls.append("bench")
        raise InputError("enough")

    monkeypatch.setattr(calibrate, "keep_tuning", lambda **options: calls.append("tune"))
    monkeypatch.setattr(calibrate, "Bench", bench)
    parser = argparse.ArgumentParser()
    calibrate.add_parser(parser.add_subparsers())
    for extra in ([], ["--check"]):
        with pytest.raises(InputError, match="enough"):
            calibrate.run(parser.parse_args(["calibrate", "--profile", str(tmp_path / "p.json"), *extra]))
    assert calls == ["tune", "bench", "bench"]


def test_an_engine_has_the_page_size_that_was_found_best_unless_given(monkeypatch):
    monkeypatch.setattr(tuning, "current", lambda: (Tuning(page_size=64), "measured"))
    for given, page in ({}, 64), ({"page_size": 16}, 16), ({"page_size": 128, "cpu_kv_blocks": 9}, 128):
        with LLM("dummy:tiny", policy="sync_offload", **given) as llm:
            found = llm.config
            assert (found.page_size, found.gpu_kv_blocks) == (page, 4096 // page)
            assert found.cpu_kv_blocks == given.get("cpu_kv_blocks", 8192 // page)
    with Bench("dummy:tiny", most_rows=2) as bench:
        assert bench.config.page_size == 64
    assert examine()["page_size"] == 64 and examine()["kernel_parameters"] == "measured"


@pytest.mark.parametrize(("predicted", "code"), [(108.0, 0), (120.0, 1), (70.0, 1)])
def test_a_check_ends_with_one_where_the_profile_is_too_far_off(capsys, predicted, code):
    assert calibrate._checked([("cpu decode_attention", 100.0, 101.0), ("gpu linear", 100.0, predicted)]) == code
    out, err = capsys.readouterr()
    assert ("above 15%, do not trust" in out, "calibrate again" in err) == (code == 1, code == 1)
