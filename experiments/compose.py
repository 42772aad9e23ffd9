"""Composition: what stands on the command line becomes one master configuration and the points of a sweep.

+experiment=ratio  policy=a,b  device.exposed_us=50
       |                |              |
    fixed            swept           fixed      ->  master = config + fixed;  points = fixed x every swept value
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.schema import App, register
from hybridattn.core.errors import InputError

CONFIGS = Path(__file__).parents[1] / "configs"
NEVER_SWEPT = ("experiment", "launcher", "hydra/launcher", "tracker", "paths", "resume", "results_root", "repeats",
               "also", "verdict")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Composed:
    """A sweep as composed: the master configuration and, per point, the overrides that tell it apart.

    ``given`` is what stood on the command line; ``fixed`` of it goes into every point, whose own overrides come last.
    ``checked`` holds the points that were composed to check them, by their own overrides.
    """

    master: DictConfig
    given: tuple[str, ...]
    fixed: tuple[str, ...]
    points: tuple[tuple[str, ...], ...]
    checked: dict[tuple[str, ...], DictConfig] = field(default_factory=dict)

    @property
    def launcher(self) -> str:
        """The launcher that the master configuration really uses."""
        return str(self.master.hydra.runtime.choices["hydra/launcher"])


@contextmanager
def configs(folder: Path = CONFIGS) -> Iterator[Composer]:
    """Hydra initialised on ``folder`` for the time of a with block."""
    register()
    with initialize_config_dir(str(folder.resolve()), version_base="1.3", job_name="experiments"):
        yield Composer()


class Composer:
    """Composes within :func:`configs`. Every error is an InputError of one sentence."""

    def __init__(self) -> None:
        self.hydra = GlobalHydra.instance().hydra
        assert self.hydra is not None
        self._parser = OverridesParser.create(config_loader=self.hydra.config_loader)

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """One configuration, with hydra's own node."""
        assert self.hydra is not None
        try:
            return self.hydra.compose_config(
                "config", list(overrides), run_mode=RunMode.RUN, with_log_configuration=False, from_shell=True
            )
        except (HydraException, OmegaConfBaseException) as error:
            raise InputError(sentence(error)) from error

    def sweep(self, overrides: Sequence[str], check: Callable[[DictConfig], None] = lambda config: None) -> Composed:
        """The master configuration and all points; every value of every axis has been composed once and ``check``ed."""
        try:
            return self._sweep(overrides, check)
        except InputError:
            raise
        except Exception as error:  # hydra and omegaconf answer some wrong kinds with Python's own errors
            raise InputError(f"{' '.join(overrides)} cannot be composed: {sentence(error)}") from error

    def _sweep(self, overrides: Sequence[str], check: Callable[[DictConfig], None]) -> Composed:
        parsed = self._parse(overrides)
        swept = [o for o in parsed if o.is_sweep_override()]
        for o in swept:
            if o.get_key_element().lstrip("+~") in NEVER_SWEPT:
                raise InputError(f"{o.get_key_element().lstrip('+~')} takes one value, got {o.input_line}")
        fixed = tuple(o.input_line or "" for o in parsed if not o.is_sweep_override())
        master = self.compose(fixed)
        axes = self._axes(master, parsed, swept)
        first = {key: values[0] for key, values in axes.items()}
        probes = [{**first, key: value} for key, values in axes.items() for value in values]
        checked = {}
        for probe in dict.fromkeys(tuple(p.values()) for p in [first, *probes]):
            point = self.compose((*fixed, *probe)) if probe else master
            self._check_launcher(master, point, " ".join(probe))
            check(point)
            if probe:
                checked[probe] = point
        return Composed(master, tuple(overrides), fixed, tuple(itertools.product(*axes.values())), checked)

    def _parse(self, lines: Sequence[str]) -> list[Override]:
        """One override per key: the last one counts."""
        try:
            parsed = self._parser.parse_overrides(list(lines))
        except HydraException as error:
            raise InputError(sentence(error)) from error
        return list({(o.type, o.get_key_element()): o for o in parsed}.values())

    def _axes(self, master: DictConfig, parsed: list[Override], swept: list[Override]) -> dict[str, list[str]]:
        """Axis key -> overrides. The command line wins over the experiment file; repeats come first."""
        given = {o.get_key_element().lstrip("+"): o for o in parsed}
        axes = {}
        for key, values in master.sweep.items():
            axes[str(key)] = given.get(str(key)) or self._parse([f"{key}={_text(values)}"])[0]
        axes = {key: o for key, o in axes.items() if key not in given or o.is_sweep_override()}  # else it is fixed
        axes |= {o.get_key_element(): o for o in swept}
        found = {key: _values(key, o) for key, o in axes.items()}
        if master.repeats < 1:
            raise InputError(f"repeats must be at least 1, got {master.repeats}")
        if master.repeats > 1:  # outermost, so that slow drifts of a machine meet all settings alike
            found = {"repeat": [f"repeat={i}" for i in range(master.repeats)], **found}
        return found

    @staticmethod
    def _check_launcher(master: DictConfig, point: DictConfig, where: str) -> None:
        asked, used = (c.hydra.runtime.choices["hydra/launcher"] for c in (point, master))
        if asked != used:
            raise InputError(
                f"{where} chooses the launcher {asked} inside a sweep that {used} launches: choose it with "
                f"launcher={asked} on the command line"
            )


def _values(key: str, override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [f"{key}={override.get_value_element_as_str()}"]
    if not override.is_discrete_sweep():
        raise InputError(f"{override.input_line}: only lists, choice and range can be swept")
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _text(values: Any) -> str:
    """A sweep of the experiment file as on the command line."""
    if OmegaConf.is_list(values):
        return ",".join(str(v).lower() if isinstance(v, bool) else "null" if v is None else str(v) for v in values)
    return str(values)


def app_of(config: DictConfig) -> App:
    """The typed configuration of a point, interpolations resolved."""
    try:
        plain = copy.deepcopy(config)
        with open_dict(plain):
            plain.pop("hydra", None)
        found = OmegaConf.to_object(plain)
    except OmegaConfBaseException as error:
        raise InputError(sentence(error)) from error
    assert isinstance(found, App)
    return found


def sentence(error: BaseException) -> str:
    """The message of a composition error in one sentence: what is wrong, and what there is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        lines.insert(1, str(cause).splitlines()[0])
    noise = ("full_key", "object_type", "reference_type", "To append to your config", "Set the env", "Config search")
    kept = list(dict.fromkeys(line for line in lines if not line.startswith(noise) and not line.startswith("provider")))
    options = next((i for i, line in enumerate(kept) if line.startswith("Available options")), None)
    if options is not None:
        head = [line for line in kept[:options] if not line.startswith("In '")] or kept[:options]
        found = f"{' '.join(head)}; available are {', '.join(k for k in kept[options + 1 :] if k != 'schema')}"
        plugin = re.search(r"hydra/launcher/(\w+)", found)
        return f"{found} (is its plugin installed? pip install hydra-{plugin[1]}-launcher)" if plugin else found
    return ": ".join(line.rstrip(".") for line in kept)
