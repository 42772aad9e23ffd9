"""Machines from profiles: the ``Pricing`` of a GPU, a CPU and a link, or of a measured machine."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import replace
from typing import Any

from hybridattn.core.errors import InputError
from hybridattn.core.op import CPU, D2H, GPU, H2D, LANES
from hybridattn.cost.pricing import PriceModel, Pricing
from hybridattn.cost.profile import Profile, changed, load_profile
from hybridattn.cost.roofline import Efficiency, Roofline
from hybridattn.cost.table import Sample, table_from_samples

# What DRAM sustains of its peak when several agents read it at once; measured machines replace it by their own figure.
SUSTAINED_DRAM = 0.85
FULL_SOCKET = 0.7  # of the bandwidth that attention draws on all cores of a socket, assumed


def roofline_of(profile: Profile) -> Roofline:
    """The roofline of a GPU, CPU or link; a link only moves bytes, so that its flop rate never binds."""
    return Roofline(
        peak_flops=1.0 if profile.role == "link" else profile.value("peak_flops"),
        bandwidth=profile.value("bandwidth"),
        launch_ns=int(profile.value("launch")),
        efficiency={kind: e for kind, (e, _) in profile.efficiency.items()},
    )


def dram_contention(cpu: Profile, link: Profile) -> float:
    """Factor on CPU attention and copies while both run: what they ask of the DRAM over what it sustains, at least 1.

    A CPU whose attention is bound by its cores leaves DRAM bandwidth for copies; one that uses all of it does not.
    """
    asked = cpu.value("bandwidth") * cpu.efficiency["decode_attention"][0].memory
    asked += link.value("bandwidth") * link.efficiency["copy"][0].memory
    return max(1.0, asked / (SUSTAINED_DRAM * cpu.value("bandwidth")))


def with_cores(cpu: Profile, cores: int) -> Profile:
    """``cpu`` with more or fewer cores: flop rate and attention grow with them, attention up to ``FULL_SOCKET``."""
    if cores < 1:
        raise InputError(f"cores must be at least 1, got {cores}")
    more = cores / cpu.value("cores")
    found = changed(cpu, cores=cores, peak_flops=cpu.value("peak_flops") * more)
    attention, source = cpu.efficiency["decode_attention"]
    memory = min(attention.memory * more, max(attention.memory, FULL_SOCKET))
    scaled = Efficiency(attention.compute, memory), f"{source}; scaled to {cores} cores"
    return replace(found, efficiency={**cpu.efficiency, "decode_attention": scaled})


def machine(gpu: str | Profile, cpu: str | Profile, link: str | Profile) -> Pricing:
    """Prices of ``gpu`` with ``cpu`` beside it over ``link``, each a shipped name, a file or a profile.

    Examples
    --------
    >>> machine("t4", "xeon-8259cl-8c", "pcie3-x16").name
    't4+xeon-8259cl-8c+pcie3-x16'
    """
    parts = {
        role: load_profile(p, role) if not isinstance(p, Profile) else p
        for role, p in (("gpu", gpu), ("cpu", cpu), ("link", link))
    }
    for role, part in parts.items():
        if part.role != role:
            raise InputError(f"profile {part.name} describes a {part.role}, a {role} is needed")
    rooflines = {role: roofline_of(part) for role, part in parts.items()}
    models: dict[tuple[str, str], PriceModel] = {}
    for lane, role in ((GPU, "gpu"), (CPU, "cpu"), (D2H, "link"), (H2D, "link")):
        models |= {(lane, kind): rooflines[role] for kind in rooflines[role].kinds}
    name = "+".join(part.name for part in parts.values())
    digest = hashlib.sha256("|".join(p.fingerprint for p in parts.values()).encode()).hexdigest()[:8]
    shared = dram_contention(parts["cpu"], parts["link"])
    pairs = [(CPU, D2H), (CPU, H2D), (D2H, CPU), (H2D, CPU)] if shared > 1 else []
    return Pricing(name, f"{name}@{digest}", models, dict.fromkeys(pairs, shared))


def late_name(name: str, part: int) -> str:
    """The quantity of a profile that holds how late lane ``name``, or a ``wake``, is: part 1 to 9 of its times."""
    return f"{name}.{part}" if name == "wake" else f"handover.{name}.{part}"


def card_driver_of(link: Profile) -> dict[str, Any]:
    """What the driver of a card costs whose primitives are priced in ``link`` (``hybridattn.calibration.card``), as
    ``SimDevice`` takes it: an op is a replay and an event, and CPU attention begins a hand-over late, by a word where
    the card has them, else by a host call. Empty for a link without these prices."""
    found = link.quantities
    if not {"event", "replay"} <= set(found):
        return {}
    handover = next((round(found[way].value) for way in ("bell_awake", "host_call_awake") if way in found), 0)
    return {"submit_ns": round(found["event"].value + found["replay"].value), "handover_ns": {CPU: handover}}


def driver_of(profile: Profile) -> dict[str, Any]:
    """What the driver and the lanes' threads of a measured machine cost, as ``SimDevice`` takes it."""

    def parts(name: str) -> tuple[int, ...]:
        return tuple(round(profile.value(late_name(name, i))) for i in range(1, 10))

    return {
        "submit_ns": round(profile.value("submit")),
        "poll_ns": round(profile.value("poll")),
        "wake_ns": parts("wake"),
        "handover_ns": {lane: parts(lane) for lane in LANES},
        "steals_ns": round(profile.value("micro_batch_op")),
    }


def measured_machine(profile: Profile, model: str, dtype: str, fingerprint: str) -> Pricing:
    """Prices of a measured machine, as tables through its samples.

    Refused when the samples come from another machine, another model shape or another dtype: tables over rows and keys
    hold for one shape only.
    """
    if profile.role != "machine":
        raise InputError(f"profile {profile.name} describes a {profile.role}, a measured machine is needed")
    if profile.source == "measured" and profile.fingerprint != fingerprint:
        raise InputError(
            f"profile {profile.name} was measured on {profile.fingerprint}, this is {fingerprint}: calibrate here"
        )
    if (profile.model, profile.dtype) != (model, dtype):
        raise InputError(
            f"profile {profile.name} was measured with {profile.model} {profile.dtype}, not {model} {dtype}"
        )
    groups: dict[str, list[Sample]] = defaultdict(list)
    for s in profile.samples:
        groups[f"{s.lane}/{s.kind}"].append(s)
    models: dict[tuple[str, str], PriceModel] = {}
    for key, samples in groups.items():
        if key not in profile.axes:
            raise InputError(f"profile {profile.name} has samples of {key} but no axes for their table")
        models[samples[0].lane, samples[0].kind] = table_from_samples(samples, profile.axes[key])
    return Pricing(profile.name, profile.fingerprint, models)
