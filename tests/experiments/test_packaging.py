"""What is installed: the libraries alone, so that nobody's own package ``experiments`` or ``configs`` is hidden."""

from __future__ import annotations

import tomllib
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_the_libraries_alone():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = find_packages(str(ROOT), **settings["packages"]["find"])
    assert {name.partition(".")[0] for name in found} == {"hybridattn", "cpu_kernels", "gpu_kernels"}


def test_hydra_finds_the_sweeper_beside_the_experiments_and_nothing_reaches_into_hydra():
    files = [*(ROOT / "experiments").rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")]
    text = "\n".join(file.read_text() for file in files)
    assert "hydra._internal" not in text and "GlobalHydra" not in text
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()  # a namespace that other plugins share
