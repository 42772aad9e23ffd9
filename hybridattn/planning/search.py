"""The cheapest machine of the catalogue that serves a load, by the simulator: ``hybridattn plan --search``.

    every card x 1, 2, 4, 8 x every processor with lanes for them, the cheapest first
        weights and KV fit? --> can the GPU's step and the CPU's attention be as short as asked? --> simulate policies

Cheap means little power (board power of the cards and TDP, from the profiles) unless prices are given: prices are no
property of a machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hybridattn.core.errors import InputError
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.catalog import BESIDE, shape
from hybridattn.cost.profile import Profile, load_profile, shipped_names
from hybridattn.cost.room import room
from hybridattn.cost.stages_cost import ModelCost
from hybridattn.planning.plan import Outcome, Site

GPUS = (1, 2, 4, 8)
LANES = 16  # of PCIe for each card
_TPOT = r"(?:,?\s*tpot\s*<=?\s*([\d.]+)\s*(ms|s)\s*)?"
_LOAD = re.compile(r"\s*(\S.*?)\s+([\d,]+)\s*x\s*([\d,]+?)\s*" + _TPOT, re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Wanted:
    """``requests`` at a time of ``context`` tokens; every row's TPOT at most ``tpot_ms`` (None: any)."""

    shape: ModelShape
    context: int
    requests: int
    tpot_ms: float | None

    @staticmethod
    def parse(text: str) -> Wanted:
        """Reads ``llama3.1-8b 8192 x 64, tpot <= 80ms``."""
        found = _LOAD.fullmatch(text)
        if found is None:
            raise InputError(f"--search reads 'MODEL CONTEXT x REQUESTS, tpot <= TIME ms', got '{text}'")
        model, context, requests, tpot, unit = found.groups()
        try:
            ms = None if tpot is None else float(tpot) * (1e3 if unit.lower() == "s" else 1)
            tokens, rows = (int(n.replace(",", "")) for n in (context, requests))
        except ValueError as error:
            raise InputError(f"--search: '{text}' has a number that cannot be read") from error
        wanted = Wanted(shape(model), tokens, rows, ms)
        if min(tokens, rows) < 1 or ms == 0:
            within = "" if ms is None else f" within {ms:g} ms a token"
            raise InputError(f"--search asks for {rows} requests of {tokens} tokens{within}; each must be above 0")
        if wanted.context > wanted.shape.max_model_len:
            raise InputError(
                f"a context of {wanted.context:,} tokens exceeds the {wanted.shape.max_model_len:,} that "
                f"{wanted.shape.name} has"
            )
        return wanted


@dataclass(frozen=True, slots=True)
class Candidate:
    """``gpus`` cards beside a processor; ``cost`` in watts, or in the unit of the prices."""

    gpu: Profile
    cpu: Profile
    link: Profile
    gpus: int
    cost: float

    def __str__(self) -> str:
        return f"{self.gpus}x {self.gpu.name} beside {self.cpu.name}"


@dataclass(frozen=True, slots=True)
class Found:
    """The cheapest machine, under which policy it serves the load, and why cheaper ones do not."""

    candidate: Candidate
    outcome: Outcome
    looked_at: int
    refused: Mapping[str, int]

    def describe(self, wanted: Wanted, unit: str) -> str:
        o = self.outcome
        tpots = ", ".join(
            f"TPOT of {rows} {tier} rows {ms:.1f} ms"
            for tier, rows, ms in (("GPU", o.gpu_rows, o.gpu_tpot_ms), ("CPU", o.cpu_rows, o.cpu_tpot_ms))
            if ms is not None
        )
        cheaper = ", ".join(f"{count} {why}" for why, count in self.refused.items()) or "none"
        return (
            f"{wanted.shape.name}, {wanted.requests} x {wanted.context:,} tokens: {self.candidate} "
            f"({self.candidate.cost:,.4g} {unit})\n"
            f"  under {o.policy}: {o.tokens_per_s:,.1f} tokens/s, {tpots} (simulated)\n"
            f"  the cheapest of {self.looked_at} by {unit}; cheaper ones: {cheaper}"
        )


def catalogue(
    model: ModelShape, gpu: str | None, cpu: str | None, prices: Mapping[str, float] | None
) -> Iterator[Candidate]:
    """Machines from shipped parts (of one card or processor, where named), the cheapest first."""

    def cost(part: Profile) -> float:
        if prices is None:
            return part.value("power")
        if part.name not in prices:
            raise InputError(f"the prices have none for {part.name}; they have {', '.join(prices)}")
        return prices[part.name]

    cards = [load_profile(name, "gpu") for name in ([gpu] if gpu else shipped_names("gpu"))]
    hosts = [load_profile(name, "cpu") for name in ([cpu] if cpu else shipped_names("cpu"))]
    found = []
    for card in cards:
        if card.name not in BESIDE:
            raise InputError(f"--search looks among shipped cards, {card.name} is none: {', '.join(BESIDE)}")
        beside, link = BESIDE[card.name][0], load_profile(BESIDE[card.name][1], "link")
        for host in hosts:
            if (beside == "grace-72c") != (host.name == "grace-72c"):  # one module
                continue
            for gpus in GPUS:
                if gpus * LANES <= host.value("pcie_lanes") and model.num_kv_heads % gpus == 0:
                    found.append(Candidate(card, host, link, gpus, gpus * cost(card) + cost(host)))
    return iter(sorted(found, key=lambda c: (c.cost, c.gpus, c.gpu.name, c.cpu.name)))


def search(
    wanted: Wanted,
    dtype: str = "fp16",
    kv_dtype: str = "",
    gpu: str | None = None,
    cpu: str | None = None,
    prices: Mapping[str, float] | None = None,
) -> Found:
    """The cheapest machine on which all requests are served at once within the TPOT.

    Parameters
    ----------
    gpu, cpu : optional
        Only this card, only this processor.
    prices : mapping of profile name to number, optional
        Of a card and of a processor, in one unit; default: power in watts.

    Raises
    ------
    InputError
        None does, with what failed.
    """
    cost = ModelCost(wanted.shape, dtype, kv_dtype)
    refused: Counter[str] = Counter()
    machines = list(catalogue(wanted.shape, gpu, cpu, prices))
    for candidate in machines:
        outcome = _serves(candidate, cost, wanted)
        if isinstance(outcome, Outcome):
            return Found(candidate, outcome, len(machines), refused)
        refused[outcome] += 1
    why = ", ".join(f"{count} {why}" for why, count in refused.items())
    raise InputError(f"none of {len(machines)} machines serves that: {why}")


def _serves(c: Candidate, cost: ModelCost, wanted: Wanted) -> Outcome | str:
    """How the load is served, or why it is not."""
    try:
        found = room(c.gpu, c.cpu, cost, c.gpus)
    except InputError:
        return "with too little memory"
    gpu = min(wanted.requests, found.gpu_tokens // wanted.context)
    cpu = wanted.requests - gpu
    if cpu > found.cpu_tokens // wanted.context:
        return "with too little memory"
    site = Site.of(c.gpu, c.cpu, c.link, c.gpus, cost, wanted.context)
    costs, most_ns = site.costs, float("inf") if wanted.tpot_ms is None else wanted.tpot_ms * 1e6
    alone_ns = costs.step_ns(gpu, gpu * wanted.context) if gpu else 0
    if max(alone_ns, costs.num_layers * costs.cpu_ns(cpu, cpu * wanted.context)) > most_ns:
        return "too slow by bounds"
    limit = most_ns / alone_ns if alone_ns and wanted.tpot_ms is not None else None
    for policy in ("sync_offload", "asymmetric", "async_overlap", "adaptive") if cpu else ("gpu_only",):
        limits = {"gpu_limit": limit, "cpu_limit": limit} if policy == "adaptive" else {}
        o = site.serve(policy, wanted.requests, **limits)
        if o is None or (o.gpu_rows, o.cpu_rows) != (gpu, cpu):
            continue
        if all(ms is None or ms * 1e6 <= most_ns for ms in (o.gpu_tpot_ms, o.cpu_tpot_ms)):
            return o
    return "too slow simulated"
