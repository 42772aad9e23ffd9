"""The profile of this machine: where it lies, and the cost model that it gives for one model."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from hybridattn.core.errors import InputError
from hybridattn.core.folders import NO_CACHE, cache_dir
from hybridattn.core.op import CPU, D2H, H2D
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import driver_of, measured_machine
from hybridattn.cost.profile import Profile, load_profile
from hybridattn.cost.stages_cost import ModelCost

TILE = ("decode_tile_keys", "decode_tile_stages")  # quantities of a card's profile


def default_path() -> Path:
    """Where ``hybridattn calibrate`` writes the profile of this machine unless told otherwise.

    InputError for a user without a home folder.
    """
    cache = cache_dir()
    if cache is None:
        raise InputError(f"there is no place for the profile of this machine: {NO_CACHE}, or name a profile")
    return cache / "this-machine.json"


def card_path() -> Path:
    """Where the profile of this machine's card lies (``python -m hybridattn.calibration.card``)."""
    return default_path().with_name("card.json")


def decode_tile(fingerprint: str) -> tuple[int, int] | None:
    """Keys and stages of the decode kernel that were fastest on the card of this fingerprint; None: nobody measured."""
    path = None if cache_dir() is None else card_path()
    if path is None or not path.is_file():
        return None
    profile = load_profile(path)
    if profile.fingerprint != fingerprint or any(name not in profile.quantities for name in TILE):
        return None
    keys, stages = (int(profile.value(name)) for name in TILE)
    return keys, stages


def profile_here(given: str | Path | Profile | None = None) -> Profile:
    """The profile that was named or given, else the one of this machine.

    Raises
    ------
    InputError
        There is none, with how to make one; or what was named is no profile of a measured machine.
    """
    if isinstance(given, Profile):
        found = given
    elif given is None:
        path = default_path()
        if not path.is_file():
            raise InputError(
                f"there is no profile of this machine at {path}: run `hybridattn calibrate`, or name another profile"
            )
        found = load_profile(path)
    elif isinstance(given, str | Path):
        found = load_profile(given)
    else:
        raise InputError(f"profile must be a path, a name or a Profile, got {given!r}")
    if found.role != "machine":
        raise InputError(f"profile {found.name} describes a {found.role}, a measured machine is needed")
    return found


def costs_here(profile: Profile, shape: ModelShape, dtype: str, kv_dtype: str, fingerprint: str) -> Costs:
    """The cost model of this machine for one model.

    Parameters
    ----------
    fingerprint : str
        Of this machine and build (``Device.profile``).

    Raises
    ------
    InputError
        A profile of another machine, model or dtype, or of an older version; the message says what to run.
    """
    again = f"run `hybridattn calibrate --model MODEL --dtype {dtype}`"
    if profile.fingerprint != fingerprint:
        raise InputError(
            f"profile {profile.name} was measured on {profile.fingerprint}, this is {fingerprint}: {again} here"
        )
    wanted, measured = (shape.name, dtype, kv_dtype), (profile.model, profile.dtype, profile.dtype)
    if wanted != measured:
        raise InputError(
            f"profile {profile.name} was measured with {_model(*measured)}, not with {_model(*wanted)}: {again}, and "
            f"name its file with --profile, there and as the profile here"
        )
    try:
        driver = driver_of(profile)
    except InputError as error:
        raise InputError(f"{error}: it was made by an earlier version, so {again} once more") from error
    late = [driver["wake_ns"], *(driver["handover_ns"][lane] for lane in (D2H, CPU, H2D))]
    round_trip_ns = round(sum(fmean(times) for times in late))
    return Costs(ModelCost(shape, dtype), measured_machine(profile, shape.name, dtype, fingerprint), round_trip_ns)


def _model(name: str, dtype: str, kv_dtype: str) -> str:
    return f"{name} {dtype}" + (f" and K,V of {kv_dtype}" if kv_dtype != dtype else "")
