"""Profiles: what a GPU, a CPU, a link or a whole measured machine can do, and where each number comes from."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from hybridattn.core.errors import InputError
from hybridattn.cost.catalog import spelt
from hybridattn.cost.roofline import Efficiency
from hybridattn.cost.table import Sample, held_out_error

ROLES = ("gpu", "cpu", "link", "machine")
SOURCES = ("datasheet", "fitted", "measured")
BASES = ("datasheet", "fitted", "measured", "assumed")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its unit, what kind of knowledge it is, and where it was found."""

    value: float
    unit: str
    basis: str
    source: str

    def __post_init__(self) -> None:
        if not (self.value > 0 and math.isfinite(self.value)):
            raise InputError(f"a quantity must be positive and finite, got {self.value} {self.unit}")
        if self.basis not in BASES or not self.source or not self.unit:
            raise InputError(f"quantity {self.value} {self.unit}: basis '{self.basis}', source '{self.source}'")


@dataclass(frozen=True, slots=True)
class Profile:
    """A part of a machine (``gpu``, ``cpu``, ``link``) by rates, or a whole ``machine`` by samples.

    Parameters
    ----------
    source : str
        ``datasheet``, ``fitted`` (datasheet plus rates fitted to published results) or ``measured``.
    fingerprint : str
        Of the machine and build for a measured profile; of its own content for a shipped one.
    quantities : mapping of str to Quantity
        ``peak_flops``, ``bandwidth``, ``memory``, ``launch``, ``cores``, as the role has them.
    efficiency : mapping of kind to (Efficiency, source)
    samples : tuple of Sample
        The measurements of a machine.
    axes : mapping of "lane/kind" to axes of its ``Table``
    held_out_error : mapping of "lane/kind" to the mean relative error on points left out
    model, dtype : str
        The shape and element type that the samples were taken with.
    build : mapping of str to str
        Versions that produced the samples.
    """

    name: str
    role: str
    source: str
    fingerprint: str
    note: str = ""
    quantities: Mapping[str, Quantity] = field(default_factory=dict)
    efficiency: Mapping[str, tuple[Efficiency, str]] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    held_out_error: Mapping[str, float] = field(default_factory=dict)
    model: str = ""
    dtype: str = ""
    build: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or not self.fingerprint:
            raise InputError(f"profile '{self.name}' needs a name and a fingerprint, got '{self.fingerprint}'")
        if self.role not in ROLES:
            raise InputError(f"profile {self.name}: role '{self.role}' is none of {', '.join(ROLES)}")
        if self.source not in SOURCES:
            raise InputError(f"profile {self.name}: source '{self.source}' is none of {', '.join(SOURCES)}")
        if self.role == "machine" and not (self.samples and self.axes):
            raise InputError(f"profile {self.name}: a machine has samples and the axes of their tables")

    def value(self, name: str) -> float:
        """The number of a quantity; InputError naming what there is."""
        if name not in self.quantities:
            raise InputError(f"profile {self.name} has no {name}; it has {', '.join(self.quantities) or 'none'}")
        return self.quantities[name].value

    def to_json(self) -> str:
        """The profile as JSON, readable and with every source in it."""
        data = asdict(self)
        data["efficiency"] = {kind: {**asdict(e), "source": src} for kind, (e, src) in self.efficiency.items()}
        return json.dumps(data, indent=1, allow_nan=False) + "\n"


def measured_profile(
    name: str,
    fingerprint: str,
    model: str,
    dtype: str,
    samples: Sequence[Sample],
    axes: Mapping[str, tuple[str, ...]],
    build: Mapping[str, str],
    quantities: Mapping[str, Quantity] | None = None,
) -> Profile:
    """The profile of a calibrated machine, with the held-out error of each of its tables.

    Parameters
    ----------
    axes : mapping of "lane/kind" to table axes
        Every kind of the samples needs its own.
    """
    groups: dict[str, list[Sample]] = {}
    for s in samples:
        groups.setdefault(f"{s.lane}/{s.kind}", []).append(s)
    if set(groups) != set(axes):
        raise InputError(f"profile {name}: samples of {sorted(groups)}, but axes of {sorted(axes)}")
    errors = {key: held_out_error(members, axes[key]) for key, members in groups.items()}
    return Profile(
        name,
        "machine",
        "measured",
        fingerprint,
        quantities=quantities or {},
        samples=tuple(samples),
        axes=axes,
        held_out_error={key: error for key, error in errors.items() if error is not None},
        model=model,
        dtype=dtype,
        build=build,
    )


def from_json(text: str, where: str = "profile") -> Profile:
    """Read what ``to_json`` wrote, or a shipped file (which has no fingerprint: it is then that of the content)."""
    try:
        data: dict[str, Any] = json.loads(text)
        shipped = f"{data['name']}@{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        return Profile(
            **{k: data[k] for k in ("name", "role", "source")},
            fingerprint=data.get("fingerprint") or shipped,
            **{k: data.get(k, "") for k in ("note", "model", "dtype")},
            **{k: data.get(k, {}) for k in ("held_out_error", "build")},
            quantities={name: Quantity(**q) for name, q in data.get("quantities", {}).items()},
            efficiency={
                kind: (Efficiency(e["compute"], e["memory"]), e["source"])
                for kind, e in data.get("efficiency", {}).items()
            },
            samples=tuple(Sample(**s) for s in data.get("samples", ())),
            axes={key: tuple(axes) for key, axes in data.get("axes", {}).items()},
        )
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{where} is not a profile: {type(error).__name__}: {error}") from error


def save_profile(profile: Profile, path: Path) -> None:
    """Write ``profile`` to ``path``; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.write_text(profile.to_json())
        temporary.replace(path)
    except OSError:  # a full disk
        temporary.unlink(missing_ok=True)
        raise


def shipped_names(role: str | None = None) -> list[str]:
    """Names of the profiles that come with the package, of one role or all."""
    return [n for n in _names() if role is None or load_profile(n).role == role]


def _names() -> list[str]:
    return sorted(f.name[:-5] for f in _folder().iterdir() if f.name.endswith(".json"))


def load_profile(name: str | Path, role: str | None = None) -> Profile:
    """A shipped profile by name (see :func:`~hybridattn.cost.catalog.spelt`), or one from a file (``.json``)."""
    if str(name).endswith(".json"):
        path = Path(name)
        if not path.is_file():
            raise InputError(f"profile file {path} does not exist")
        found = from_json(path.read_text(), str(path))
    else:
        known = _names()
        meant = spelt(str(name), known)
        if meant is None:
            raise InputError(f"profile '{name}' is unknown; shipped are {', '.join(shipped_names(role))}")
        found = from_json((_folder() / f"{meant}.json").read_text(), f"profile {meant}")
    if role is not None and found.role != role:
        raise InputError(f"profile {found.name} describes a {found.role}, a {role} is needed")
    return found


def changed(profile: Profile, **values: float) -> Profile:
    """``profile`` with other values of its quantities, which then are assumed; name and fingerprint say so."""
    known = {name: profile.quantities[name] for name in values if profile.value(name)}
    new = {name: Quantity(v, known[name].unit, "assumed", "set by the caller") for name, v in values.items()}
    said = ", ".join(f"{name} {_shown(value, known[name].unit)}" for name, value in values.items())
    name, mark = f"{profile.name} ({said})", f"{profile.fingerprint} {said}"
    return replace(profile, name=name, fingerprint=mark, quantities={**profile.quantities, **new})


def _shown(value: float, unit: str) -> str:
    prefix, scale = next(((p, s) for p, s in (("T", 1e12), ("G", 1e9)) if value >= s), ("", 1.0))
    return f"{value / scale:.4g} {prefix}{unit}" if unit != "1" else f"{value:g}"


def _folder() -> Any:
    return resources.files("hybridattn.cost") / "profiles"
