"""Objects from a typed configuration: the priced machine, the policy, the workload."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from experiments.schema import App, Target
from hybridattn.core.errors import HybridAttnError, InputError
from hybridattn.core.stages import CPU_TIER
from hybridattn.cost.catalog import shape
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import card_driver_of
from hybridattn.cost.parallel import parallel_machine
from hybridattn.cost.priced_stages import with_exposed
from hybridattn.cost.pricing import Pricing
from hybridattn.cost.profile import Profile, load_profile
from hybridattn.cost.room import Room, room
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.planning.predict import by_simulation
from hybridattn.policies.base import Policy
from hybridattn.policies.registry import POLICIES, make_policy, policy_class
from hybridattn.workload.item import Workload

ROOT = Path(__file__).parents[1]


def pricing_of(app: App) -> Pricing:
    """Prices of the machine of ``hardware``."""
    return parallel_machine(*profiles_of(app), app.hardware.gpus, cost_of(app))


def profiles_of(app: App) -> tuple[Profile, Profile, Profile]:
    """GPU, CPU and link of ``hardware``."""
    h = app.hardware
    gpu, cpu, link = (load_profile(profile_name(getattr(h, role)), role) for role in ("gpu", "cpu", "link"))
    return gpu, cpu, link


def profile_name(name: str) -> str:
    """A name of ``hardware`` for ``load_profile``: a relative path is one from here or from the project's root."""
    if name.endswith(".json") and not Path(name).is_file() and (ROOT / name).is_file():
        return str(ROOT / name)
    return name


def cost_of(app: App) -> ModelCost:
    """Work of the model of ``model``."""
    return ModelCost(shape(app.model.shape), app.model.dtype)


def costs_of(app: App) -> Costs:
    """The model of ``model`` on the machine of ``hardware``, with what ``device`` exposes at each linear stage."""
    return Costs(cost_of(app), with_exposed(pricing_of(app), round(app.device.exposed_us * 1e3)))


def kv_room(app: App) -> Room:
    """Room for K,V on the GPU and on the CPU tier: as configured, else what fits beside the weights, which must fit."""
    h, (card, host, _) = app.hardware, profiles_of(app)
    found = room(card, host, cost_of(app), h.gpus)
    gpu, cpu = (
        held if tokens is None else tokens * found.token_bytes
        for held, tokens in ((found.gpu_bytes, h.gpu_kv_tokens), (found.cpu_bytes, h.cpu_kv_tokens))
    )
    return replace(found, gpu_bytes=gpu, cpu_bytes=cpu)


def policy_of(app: App, costs: Costs | None = None) -> Policy:
    """The policy of ``policy``: its ``_target_`` is a name of the registry or an import path."""
    predict = by_simulation() if costs is not None else None  # for the policies that plan
    return make_policy(import_path(app.policy._target_), costs, predict, **policy_options(app))


def policy_options(app: App) -> dict[str, Any]:
    """Options of ``policy`` that are given."""
    return {k: v for k, v in app.policy.options.items() if v is not None}


def known_options(policy: Any) -> list[str]:
    """Options that the class of ``policy`` has; a share of the CPU tier where it uses that tier."""
    cls = policy_class(import_path(policy._target_))
    names = [name for name in inspect.signature(cls).parameters if name not in ("costs", "predict")]
    return [name for name in names if name != "cpu_fraction" or CPU_TIER in cls.tiers]


def check_options(policy: Any) -> None:
    """InputError for an option of ``policy`` that its class does not have."""
    known = known_options(policy)
    for name, value in policy.options.items():
        if value is not None and name not in known:
            raise InputError(f"policy {policy.label} has no option '{name}'; it has {', '.join(known) or 'none'}")


def import_path(target: str) -> str:
    """``_target_`` of a policy as the registry takes it: a name, or ``module:Class``."""
    if target in POLICIES:
        return target
    module, _, name = target.rpartition(".")
    return f"{module}:{name}"


def sim_device(app: App, pricing: Pricing, record: bool = False) -> SimDevice:
    """A simulated device with the driver's costs of ``device``, or where they are 0 with those that its link knows."""
    d, known = app.device, card_driver_of(profiles_of(app)[2])
    given = {"submit_ns": round(d.submit_us * 1e3), "poll_ns": round(d.poll_us * 1e3)}
    return SimDevice(pricing, record=record, **(known | {name: ns for name, ns in given.items() if ns}))


def workload_of(app: App) -> Workload:
    """The workload of ``workload``: its ``_target_`` called with its options, drawn anew for every repeat.

    A target that takes a ``seed`` gets that of its options (else ``app.seed``) plus the number of the repeat.
    """
    target = app.workload
    if takes_seed(target):
        seed = target.options.get("seed", app.seed) + app.repeat
        target = replace(target, options={**target.options, "seed": seed})
    found = made(target)
    if not isinstance(found, Workload):
        raise InputError(f"workload {app.workload.label}: {app.workload._target_} made a {type(found).__name__}")
    return found


def takes_seed(target: Target) -> bool:
    """Whether ``_target_`` has a parameter ``seed``."""
    try:
        return "seed" in inspect.signature(get_object(target._target_)).parameters
    except Exception:  # nothing at that path, or nothing that tells its parameters: `made` says what is wrong
        return False


def made(target: Target) -> Any:
    """What ``_target_`` makes of its options; an InputError of ours is passed on as it is."""
    try:
        return instantiate({"_target_": target._target_, **target.options})
    except InstantiationException as error:
        if isinstance(error.__cause__, HybridAttnError):
            raise error.__cause__ from error
        raise InputError(f"{target.label}: {str(error).splitlines()[0]}") from error
