from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybridattn.analysis.results import ResultFolder, check_name
from hybridattn.core.errors import InputError


def test_H04_runs_of_the_same_second_get_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        folders = list(threads.map(lambda i: ResultFolder.new(tmp_path / "x" / "1"), range(8)))
    assert len({f.path for f in folders}) == 8
    for i, folder in enumerate(folders):
        folder.add_row({"i": i})
    assert [json.loads((f.path / "rows.jsonl").read_text())["i"] for f in folders] == list(range(8))
    assert (tmp_path / "x" / "latest").resolve() in {f.path.resolve() for f in folders}


@pytest.mark.parametrize("name", ["", "../out", "a/b"])
def test_results_never_leave_their_root(name):
    with pytest.raises(InputError, match="plain folder name"):
        check_name(name)


def test_rows_hold_no_nan(tmp_path):
    with pytest.raises(ValueError):
        ResultFolder.new(tmp_path / "x" / "1").add_row({"value": float("nan")})
