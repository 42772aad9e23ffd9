"""Composed configurations: as typed objects, as plain values, and compared with those of an earlier sweep."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.build import check_options
from experiments.findings import verdict_of
from experiments.schema import App
from experiments.settings import find
from experiments.track import check as check_tracker
from experiments.wording import among, sentence
from hybridattn.analysis.theory import check_theory
from hybridattn.core.errors import InputError

# What a row does not depend on: where and how a sweep is run, and what is made of its rows.
OUTSIDE = ("resume", "beside", "fail_fast", "also", "results_root", "paths.results", "tracker", "title", "question",
           "analysis", "verdict", "point_seconds", "repeats", "repeat")  # fmt: skip


def app_of(config: DictConfig) -> App:
    """The typed configuration of a point, interpolations resolved."""
    try:
        found = OmegaConf.to_object(without_hydra(config))
    except OmegaConfBaseException as error:
        raise InputError(sentence(error)) from error
    assert isinstance(found, App)
    return found


def without_hydra(config: DictConfig) -> DictConfig:
    """A copy without hydra's own node."""
    plain = copy.deepcopy(config)
    with open_dict(plain):
        plain.pop("hydra", None)
    return plain


def check_chosen(config: DictConfig) -> None:
    """There is an experiment, and something that can be imported and runs it."""
    if not config.name:
        raise InputError("no experiment was chosen: add +experiment=NAME, for example +experiment=demo")
    if not config.point:
        raise InputError(f"experiment {config.name} does not say which point to run")
    find(config.point, "point")


def check(config: DictConfig) -> None:
    """The settings of a composed point fit the schema of what runs them, and its tracker is known."""
    check_chosen(config)
    check_tracker(config.tracker)
    find(config.point, "point").settings(config.settings)
    check_options(config.policy)
    _check_hardware(config)
    check_theory(config.analysis.theory)
    verdict_of(config)


def check_named(config: DictConfig, words: Iterable[str]) -> None:
    """InputError for a machine or a model on the command line of an experiment whose settings name their own."""
    own = next((name for name in ("place", "box") if name in config.settings), None)
    word = next((word for word in words if among(word, ("hardware", "model"))), None)
    if own is not None and word is not None:
        raise InputError(f"{word} would change nothing: {config.name} names machine and model in settings.{own}")


def _check_hardware(config: DictConfig) -> None:
    device, hardware = config.device.name, config.hardware
    if device != "sim" and (hardware.gpu or hardware.gpus != 1):
        what = f"hardware.gpus={hardware.gpus}" if hardware.gpus != 1 else f"{hardware.label}"
        raise InputError(f"{what} is for the device sim: on {device} it is hardware=here, this machine as it is")


def plain_values(config: DictConfig) -> dict[str, Any]:
    """Every value that a row depends on, by its dotted key; NaN and infinities as text, which JSON can hold."""
    found = _flat(OmegaConf.to_container(without_hydra(config), resolve=True))
    found = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}
    return {k: v for k, v in found.items() if not any(k == o or k.startswith(f"{o}.") for o in OUTSIDE)}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first value that two composed configurations do not share, in words; empty where they are equal."""
    for key in dict.fromkeys([*before, *now]):
        if before.get(key, "absent") != now.get(key, "absent"):
            return f"{key} was {before.get(key, 'absent')} and is {now.get(key, 'absent')}"
    return ""


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {at: value}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{at}.{key}" if at else str(key)).items()}
