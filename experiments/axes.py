"""The points of a sweep: what ``hydra.sweeper.params`` and the command line say, every value with every other.

+experiment=ratio  policy=a,b  device.exposed_us=50
       |                |              |
    fixed            swept           fixed      ->  points = fixed x every swept value, repeats outermost
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from experiments.wording import key_of, parse, quoted
from hybridattn.core.errors import InputError

NEVER_SWEPT = ("experiment", "tracker", "paths", "resume", "results_root", "repeats", "also", "verdict", "beside")


@dataclass(frozen=True, slots=True)
class Axes:
    """``fixed`` overrides go into every point; ``values`` are, per axis, the overrides that tell its points apart."""

    fixed: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]

    @property
    def points(self) -> list[tuple[str, ...]]:
        """Own overrides of every point."""
        return list(itertools.product(*self.values.values()))

    @property
    def probes(self) -> list[tuple[str, ...]]:
        """Points among which every value of every axis occurs once."""
        first = {key: values[0] for key, values in self.values.items()}
        more = [{**first, key: value} for key, values in self.values.items() for value in values]
        return list(dict.fromkeys(tuple(point.values()) for point in [first, *more]))


def expand(params: Mapping[str, Any], arguments: Sequence[str], repeats: int) -> Axes:
    """The axes of the experiment file and of the command line, which wins: a single value there ends an axis."""
    if repeats < 1:
        raise InputError(f"repeats must be at least 1, got {repeats}")
    given = parse(arguments)
    for o in given:
        if o.is_sweep_override() and key_of(o.input_line or "") in NEVER_SWEPT:
            key, _, value = (o.input_line or "").partition("=")
            raise InputError(
                f"{key.lstrip('+~')} takes one value, got {o.input_line}; one text with a comma is written "
                f"{quoted(key, value)}"
            )
    by_key = {key_of(o.input_line or ""): o for o in given}
    found: dict[str, tuple[str, ...]] = {}
    if repeats > 1:  # outermost, so that slow drifts of a machine meet all settings alike
        found["repeat"] = tuple(f"repeat={i}" for i in range(repeats))
    for key, values in params.items():
        mine = by_key.get(key_of(str(key)))
        if mine is None:
            found[str(key)] = _values(parse([f"{key}={_text(values)}"])[0])
        elif mine.is_sweep_override():
            found[str(key)] = _values(mine)
    names = {key_of(key) for key in params}
    swept = [o for o in given if o.is_sweep_override() and key_of(o.input_line or "") not in names]
    found |= {o.get_key_element(): _values(o) for o in swept}
    return Axes(tuple(o.input_line or "" for o in given if not o.is_sweep_override()), found)


def _values(override: Override) -> tuple[str, ...]:
    key = override.get_key_element()
    if not override.is_sweep_override():
        return (f"{key}={override.get_value_element_as_str()}",)
    if not override.is_discrete_sweep():
        raise InputError(f"{override.input_line}: only lists, choice, range and glob can be swept")
    return tuple(f"{key}={value}" for value in override.sweep_string_iterator())


def _text(values: Any) -> str:
    """An axis of the experiment file as on the command line."""
    if OmegaConf.is_list(values) or isinstance(values, list | tuple):
        return ",".join(map(_text, values))
    if isinstance(values, bool):
        return str(values).lower()
    return "null" if values is None else str(values)
