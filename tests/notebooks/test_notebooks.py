"""The committed notebooks: executed, short, define nothing, and run again, also with every cell run twice."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(p.stem for p in FOLDER.glob("*.ipynb"))
QUICK = "attention_states"


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def test_there_are_the_notebooks_that_the_pages_name():
    assert {
        "attention_states", "cpu_roofline", "overlap_timeline", "crossover_ratio", "neo_figures", "planning",
        "split_requests",
    } <= set(NAMES)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_executed_short_and_defines_nothing(name):
    book = read(name)
    nbformat.validate(book)
    assert 0 < len(code(book)) < 12
    for number, cell in enumerate(code(book), start=1):
        assert cell.execution_count == number
        assert not any(o.output_type == "error" for o in cell.outputs)
        plain = re.sub(r"^[!%].*$", "", cell.source, flags=re.M)
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not any(isinstance(node, kinds) for node in ast.walk(ast.parse(plain))), cell.source
    assert book.cells[0].cell_type == "markdown" and book.cells[0].source.startswith("# ")
    text = nbformat.writes(book)
    assert not re.search(r'"?/(work|home|root|tmp)/', text)  # no path of the machine it ran on


def run_again(name, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel's own libraries, which are not this project's
        from nbclient import NotebookClient

        monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
        book = read(name)
        twice = read(name)
        # the same objects: the second run is what is left
        twice.cells = [cell for cell in book.cells for _ in range(2)]
        NotebookClient(twice, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
    return book


def test_a_notebook_runs_again(tmp_path, monkeypatch):
    before, after = read(QUICK), run_again(QUICK, tmp_path, monkeypatch)
    assert [len(c.outputs) for c in code(after)] == [len(c.outputs) for c in code(before)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if n != QUICK])
def test_every_notebook_runs_again(name, tmp_path, monkeypatch):
    for cell in code(run_again(name, tmp_path, monkeypatch)):
        text = "".join(str(o.get("text", "")) for o in cell.outputs)
        assert "Traceback" not in text and not re.search(r"[1-9]\d* failed", text)
