"""The sweeper of the experiments, where Hydra looks for plugins: ``hydra/sweeper=points``.

Like Hydra's basic sweeper it runs every value of every axis with every other. Beyond that it composes each value once
before anything runs, skips what an earlier call has done (``resume=true``), goes on after failed points, and shows how
far it is. The work is done in ``experiments.sweep``. Hydra executes this file before it is a module of the process, so
that annotations cannot be left as text here.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class PointSweeperConf:
    """``params`` : axis -> values, as on the command line; ``max_batch_size`` : jobs for the launcher at a time."""

    _target_: str = "hydra_plugins.hybridattn_points.PointSweeper"
    max_batch_size: int | None = None
    params: dict[str, Any] | None = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="points", node=PointSweeperConf, provider="hybridattn")


class PointSweeper(Sweeper):
    """Hydra's view of a sweep."""

    def __init__(self, max_batch_size: int | None = None, params: dict[str, Any] | None = None) -> None:
        self.max_batch_size = max_batch_size
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def sweep(self, arguments: list[str]) -> Any:
        """Runs every point of ``arguments`` and of the experiment file's axes that has no good row yet."""
        from experiments.sweep import Sweep  # other apps of this environment only look at this module

        context, config = self.hydra_context, self.config
        assert context is not None and config is not None
        return Sweep(context, self.task_function, config, self.params, self.max_batch_size).run(arguments)
