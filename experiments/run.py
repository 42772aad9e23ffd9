"""The one app: ``python -m experiments.run +experiment=NAME [key=value ...]``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from experiments.results import ResultFolder
from hybridattn.core.errors import HybridAttnError, InputError


@hydra.main(version_base="1.3", config_path="../configs", config_name="config")
def run(config: DictConfig) -> None:
    """Find the experiment's runner, give it its settings and a fresh result folder."""
    try:
        if not config.name:
            raise InputError("no experiment was chosen: add +experiment=NAME, for example +experiment=demo")
        module, _, function = config.runner.partition(":")
        runner = getattr(importlib.import_module(module), function)
        settings = runner.settings(config.settings)
        runner(settings, ResultFolder(Path(config.results_root), config.name))
    except InputError as error:
        print(f"experiments.run: {error}", file=sys.stderr)
        sys.exit(2)
    except HybridAttnError as error:
        print(f"experiments.run: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run()
