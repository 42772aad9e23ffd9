"""Typed settings: what an experiment file may say, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridattn.core.errors import InputError

T = TypeVar("T")


def parse(schema: type[T], given: DictConfig) -> T:
    """An instance of the dataclass ``schema``; InputError names a misspelt key or a value of the wrong type."""
    try:
        found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), given or {}))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "settings"
        message = str(error).splitlines()[0]
        raise InputError(f"settings of the experiment: {message} (at {key})") from error
    assert isinstance(found, schema)
    return found


def experiment(schema: type[T]) -> Callable[[Callable[[T, Any], None]], Callable[[T, Any], None]]:
    """Marks a runner and ties it to the schema of its settings."""

    def mark(runner: Callable[[T, Any], None]) -> Callable[[T, Any], None]:
        runner.settings = lambda given: parse(schema, given)  # type: ignore[attr-defined]
        return runner

    return mark
