"""The tables of docs/reliability.md name tests that exist, and every named case is in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCUMENT = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([A-Z]\d\d) \| [^|]+ \| (.+) \|$", re.M)
REFERENCE = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`(?: \((\d+)\))?")


def functions(file: str) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", (TESTS / file).read_text(encoding="utf-8"), re.M))


def named_cases() -> dict[str, set[str]]:
    """Case -> files that hold a test named after it."""
    found: dict[str, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for case in re.findall(r"^def test_([A-Z]\d\d)_", path.read_text(encoding="utf-8"), re.M):
            found.setdefault(case, set()).add(str(path.relative_to(TESTS)))
    return found


@pytest.mark.parametrize(("case", "cells"), ROW.findall(DOCUMENT), ids=lambda v: v if len(v) == 3 else "")
def test_a_case_has_the_tests_that_the_table_names(case, cells):
    references = REFERENCE.findall(cells)
    assert references
    for file, name, count in references:
        have = functions(file)
        if name:
            assert name in have
        elif count:
            assert sum(n.startswith(f"test_{case}_") for n in have) >= int(count)
        else:
            assert have


def test_every_test_named_after_a_case_is_in_the_table():
    table = {case: {file for file, _, _ in REFERENCE.findall(cells)} for case, cells in ROW.findall(DOCUMENT)}
    assert len(table) == 62
    missing = {case: files - table.get(case, set()) for case, files in named_cases().items()}
    assert {case: files for case, files in missing.items() if files} == {}


def test_every_fault_of_the_table_names_a_test_that_exists():
    section = DOCUMENT.split("## Faults")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) >= 12
    for row in rows:
        references = REFERENCE.findall(row)
        assert references, row
        for file, name, _ in references:
            assert not name or name in functions(file), f"{file}::{name}"


def test_documents_hold_no_path_of_one_machine():
    for name in ("reliability.md", "limits.md"):
        text = (TESTS.parent / "docs" / name).read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.])/(home|work|root|tmp)/", text), name
