"""Simulated machines by name: a model on a machine, with an engine on it, or with a CPU of another speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from hybridattn.core.config import EngineConfig
from hybridattn.core.errors import InputError
from hybridattn.cost.catalog import BESIDE, SHAPES, shape, spelt
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import SUSTAINED_DRAM, machine
from hybridattn.cost.priced_stages import PricedStages
from hybridattn.cost.pricing import Pricing
from hybridattn.cost.profile import Profile, Quantity, load_profile
from hybridattn.cost.roofline import Efficiency
from hybridattn.cost.room import check_context, room
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.devices.sim import SimDevice
from hybridattn.engine.engine import Engine
from hybridattn.policies.base import Policy

CONFIGS = Path(__file__).parents[1] / "configs"
HARDWARE = CONFIGS / "hardware"
TIMEOUT_NS = 10**13  # virtual time is free: nothing simulated here is a stall


def group_file(group: str, name: str) -> str | None:
    """The file of ``configs/model`` or ``configs/hardware`` that ``name`` means: its own name, or that of the shape or
    card in it, however spelt; None where there is none."""
    files = {p.stem: p for p in (CONFIGS / group).glob("*.yaml")}
    if name in files:
        return name
    card, model = spelt(name, BESIDE), spelt(name, SHAPES)
    for stem, path in sorted(files.items()):
        found = OmegaConf.load(path)
        if group == "model" and model and found.shape == model:
            return stem
        if group == "hardware" and card and found.gpu == card and found.cpu == BESIDE[card][0]:
            return stem
    return spelt(name, files)


@dataclass(frozen=True, slots=True)
class Place:
    """A machine, a model and the tokens that each request attends to, written ``t4/llama2-7b/400``.

    The machine is the name of a file under ``configs/hardware``. ``more`` is a number that some experiments write
    behind it (``t4/llama2-7b/400/25``); they say what it means.
    """

    hardware: str
    model: str
    context: int
    more: float | None = None

    @staticmethod
    def parse(text: str) -> Place:
        parts = text.split("/")
        try:
            more = float(parts[3]) if len(parts) > 3 else None
            hardware, model = group_file("hardware", parts[0]) or parts[0], spelt(parts[1], SHAPES) or parts[1]
            return Place(hardware, model, int(parts[2]), more)
        except (IndexError, ValueError) as error:
            raise InputError(f"settings.place must read hardware/model/context, got '{text}'") from error

    @property
    def parts(self) -> tuple[str, str, str]:
        """Profile names of GPU, CPU and link."""
        path = HARDWARE / f"{self.hardware}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in HARDWARE.glob("*.yaml")))
            raise InputError(f"settings.place names the hardware '{self.hardware}'; known are {known}")
        found = OmegaConf.load(path)
        return found.gpu, found.cpu, found.link

    def costs(self, cpu_gb_s: float | None = None) -> Costs:
        """The model on the machine, whose CPU reads K,V at ``cpu_gb_s`` in attention; None: as its profile says."""
        return priced(self.model, machine(*self.parts) if cpu_gb_s is None else pricing_at(*self.parts, cpu_gb_s))

    def gpu_rows(self, kv_share: float, most: int) -> int:
        """Requests that a share of the GPU's K,V memory holds: at least 2, which must fit, at most ``most``.

        The host may be any: its memory and, in most of these experiments, its speed are not the profile's.
        """
        gpu, cpu, _ = self.parts
        found = room(load_profile(gpu), load_profile(cpu), ModelCost(shape(self.model), "fp16"))
        check_context(found, self.context)
        if 2 * self.context > found.gpu_tokens:
            raise InputError(f"{self}: two requests do not fit into the {found.gpu_tokens:,} tokens of KV on the GPU")
        return max(2, min(most, int(found.gpu_tokens * kv_share) // self.context))

    def __str__(self) -> str:
        return f"{self.hardware} {self.model} ctx {self.context}"


def priced(model: str, pricing: Pricing, dtype: str = "fp16") -> Costs:
    """A model by name on a priced machine."""
    return Costs(ModelCost(shape(model), dtype), pricing)


def engine_on(costs: Costs, policy: Policy, config: EngineConfig) -> Engine:
    """An engine on a simulated device that keeps no spans."""
    return Engine(PricedStages(costs.cost.shape, costs.cost.dtype), open_sim(costs.pricing), policy, config)


def open_sim(pricing: Pricing) -> SimDevice:
    """A simulated device that keeps no spans."""
    return SimDevice(pricing, record=False)


def pricing_at(gpu: str, cpu: str, link: str, cpu_gb_s: float, cpu_launch_ns: int | None = None) -> Pricing:
    """The machine with CPU attention as :func:`cpu_at` says."""
    return machine(gpu, cpu_at(load_profile(cpu, "cpu"), cpu_gb_s, cpu_launch_ns), link)


def cpu_at(part: Profile, cpu_gb_s: float, cpu_launch_ns: int | None = None) -> Profile:
    """A CPU with attention at ``cpu_gb_s`` (10^9 bytes of K,V a second).

    ``cpu_launch_ns`` is what comes before each CPU attention; default the profile's.
    """
    quantities = dict(part.quantities)
    if cpu_launch_ns is not None:
        quantities["launch"] = Quantity(float(cpu_launch_ns), "ns", "assumed", "set by the experiment")
    if cpu_gb_s * 1e9 > SUSTAINED_DRAM * part.value("bandwidth"):  # a faster host than this one
        more = Quantity(cpu_gb_s * 1e9 / SUSTAINED_DRAM, "B/s", "assumed", "set by the experiment")
        quantities["bandwidth"] = more
    memory = cpu_gb_s * 1e9 / quantities["bandwidth"].value
    efficiency = dict(part.efficiency)
    old, _ = efficiency["decode_attention"]
    efficiency["decode_attention"] = Efficiency(old.compute, memory), f"{cpu_gb_s:g} GB/s, set by the experiment"
    name = f"{part.name} at {cpu_gb_s:g} GB/s" + ("" if cpu_launch_ns is None else f", launch {cpu_launch_ns} ns")
    return replace(part, quantities=quantities, efficiency=efficiency, fingerprint=name)
