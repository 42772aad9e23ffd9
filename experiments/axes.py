"""The points of a sweep: what ``hydra.sweeper.params`` and the command line say, every value with every other.

+experiment=ratio  policy=a,b  device.exposed_us=50
       |                |              |
    fixed            swept           fixed      ->  points = fixed x every swept value, repeats outermost
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from experiments.wording import key_of, parse, quoted
from hybridattn.core.errors import InputError

NEVER_SWEPT = ("experiment", "tracker", "paths", "resume", "results_root", "repeats", "also", "verdict", "beside")


@dataclass(frozen=True, slots=True)
class Axes:
    """``fixed`` overrides go into every point; ``values`` are, per axis, the overrides that tell its points apart.

    ``foreign`` : policies with the axes that they have no option for. A point of such a policy is there once, without
        the option: ``policy=gpu_only,async_overlap policy.options.max_wait_us=0,500`` has three points.
    """

    fixed: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    foreign: frozenset[tuple[str, str]] = frozenset()

    @property
    def points(self) -> list[tuple[str, ...]]:
        """Own overrides of every point."""
        return self._own(
            dict(zip(self.values, point, strict=True)) for point in itertools.product(*self.values.values())
        )

    @property
    def probes(self) -> list[tuple[str, ...]]:
        """Points among which every value of every axis occurs, options beside every policy that has them."""
        first = {key: values[0] for key, values in self.values.items()}
        more = [{**first, key: value} for key, values in self.values.items() for value in values]
        options = [(key, value) for key in self.values if is_option(key) for value in self.values[key]]
        more += [{**first, "policy": p, key: value} for p in self.values.get("policy", ()) for key, value in options]
        return self._own([first, *more])

    def _own(self, points: Iterable[Mapping[str, str]]) -> list[tuple[str, ...]]:
        found = (tuple(v for k, v in p.items() if (p.get("policy", ""), k) not in self.foreign) for p in points)
        return list(dict.fromkeys(found))


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
    many = len(found.get("policy", ())) > 1 or any(
        o.is_sweep_override() for key, o in by_key.items() if key == "policy"
    )
    own = [o for o in given if o.is_sweep_override() or (many and is_option(o.get_key_element()))]
    found |= {o.get_key_element(): _values(o) for o in own if key_of(o.input_line or "") not in names}
    return Axes(tuple(o.input_line or "" for o in given if o not in own), found)


def is_option(key: str) -> bool:
    """Whether an axis is an option of policies."""
    return key_of(key).startswith("policy.options.")


def _values(override: Override) -> tuple[str, ...]:
    key = override.get_key_element()
    if not override.is_sweep_override():
        return (f"{key}={override.get_value_element_as_str()}",)
    if not override.is_discrete_sweep():
        raise InputError(f"{override.input_line}: only lists, choice, range and glob can be swept")
    values = tuple(f"{key}={value}" for value in override.sweep_string_iterator())
    if not values:
        raise InputError(f"{override.input_line} sweeps over no value at all")
    return values


def _text(values: Any) -> str:
    """An axis of the experiment file as on the command line."""
    if OmegaConf.is_list(values) or isinstance(values, list | tuple):
        return ",".join(map(_text, values))
    if isinstance(values, bool):
        return str(values).lower()
    return "null" if values is None else str(values)
