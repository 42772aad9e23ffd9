"""Typed settings: what an experiment file may say, checked before anything runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.wording import renamed
from hybridattn.core.errors import InputError

T = TypeVar("T")


def parse(schema: type[T], given: DictConfig | dict[str, Any] | None) -> T:
    """An instance of the dataclass ``schema``; InputError names a misspelt key or a value of the wrong type."""
    try:
        found = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), given or {}))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "settings"
        message = str(error).splitlines()[0]
        raise InputError(f"settings of the experiment: {message} (at {key}){renamed(key)}") from error
    assert isinstance(found, schema)
    return found


def at_least(settings: Any, **least: float) -> None:
    """InputError for a field of ``settings`` below the number given for it; null is none."""
    for name, low in least.items():
        value = getattr(settings, name)
        if value is not None and value < low:
            raise InputError(f"settings.{name} must be at least {low}, got {value}")


def experiment(schema: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a point and ties it to the schema of its settings."""

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.settings = lambda given: parse(schema, given)  # type: ignore[attr-defined]
        return function

    return mark


def find(path: str, what: str) -> Any:
    """The function at ``package.module:function``, marked with :func:`experiment`."""
    found = resolve(path, what)
    if not hasattr(found, "settings"):
        raise InputError(f"{what} '{path}' is not marked with @experiment(its settings)")
    return found


def resolve(path: str, what: str) -> Any:
    """Whatever is at ``package.module:name``; ``what`` is the key that named it."""
    module, _, name = path.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise InputError(f"{what} '{path}' is no import path: write package.module:function")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{what} '{path}' cannot be imported: {error}") from error
