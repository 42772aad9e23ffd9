"""Tensor parallelism: N equal GPUs as one card, and what their communication costs.

Each GPU holds 1/N of the weights of every layer and of the KV heads, so memory, bandwidth and flop rate add up; each
has its own link to the one host, as far as the host's memory keeps up. After attention's output projection and after
the MLP the partial sums of all rows are added over the GPUs: two all-reduces a layer (Megatron-LM, arXiv 1909.08053).
The logits are gathered at the end. In a ring, for m bytes (rows x width x element), B bytes/s to the next GPU:

    all-reduce    base + 2 (N - 1) hop + 2 (N - 1) / N x m / (share B)     (Patarasuk, Yuan: JPDC 69(2), 2009)
    all-gather    base +   (N - 1) hop +   (N - 1) / N x m / (share B)

``hop`` and ``B`` are the card's; ``base``, how ``hop`` grows and ``share`` are those of the better one of NCCL's LL and
Simple protocols in NCCL's own model (NVIDIA/nccl, src/graph/tuning.cc). The embedding's all-reduce counts as one of the
pair that pre(0) is charged with, like every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridattn.core.errors import InputError
from hybridattn.core.op import GPU, Work
from hybridattn.core.shapes import ModelShape, dtype_bytes
from hybridattn.cost.machine import SUSTAINED_DRAM, machine
from hybridattn.cost.pricing import PriceModel, Pricing
from hybridattn.cost.profile import Profile
from hybridattn.cost.stages_cost import ModelCost

PROTOCOLS = ((6600, 1.0, 0.5), (8400, 5.7, 1.0))  # base [ns], hop over that of the card, share of the bandwidth


@dataclass(frozen=True, slots=True)
class Ring:
    """``gpus`` cards in a ring."""

    gpus: int
    hop_ns: float
    bandwidth: float

    def ns(self, rounds: int, num_bytes: int) -> float:
        """``rounds`` times round the ring (all-reduce 2, all-gather 1) with ``num_bytes`` in all."""
        steps, moved = rounds * (self.gpus - 1), rounds * (self.gpus - 1) / self.gpus * num_bytes
        return min(base + steps * hop * self.hop_ns + moved / (share * self.bandwidth) * 1e9
                   for base, hop, share in PROTOCOLS)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Joined:
    """The price of a stage on one GPU and of joining its parts: ``times`` collectives of ``row_bytes`` a row."""

    model: PriceModel
    ring: Ring
    times: int
    rounds: int
    row_bytes: int

    def price_ns(self, work: Work) -> int:
        joining = self.times * self.ring.ns(self.rounds, work.rows * self.row_bytes) if work.rows else 0.0
        return self.model.price_ns(work) + round(joining)


def together(gpu: Profile, gpus: int, shape: ModelShape) -> Profile:
    """``gpus`` cards as one: memory, bandwidth, flop rate and power add up.

    InputError for a number of GPUs that the KV heads cannot be divided by.
    """
    if gpus < 1 or shape.num_kv_heads % gpus:
        raise InputError(f"gpus must divide the {shape.num_kv_heads} KV heads of {shape.name}, got {gpus}")
    if gpus == 1:
        return gpu
    names = [n for n in ("peak_flops", "bandwidth", "memory", "power") if n in gpu.quantities]
    summed = {n: replace(gpu.quantities[n], value=gpus * gpu.value(n)) for n in names}
    name, mark = f"{gpus}x{gpu.name}", f"{gpus}x{gpu.fingerprint}"
    return replace(gpu, name=name, fingerprint=mark, quantities={**gpu.quantities, **summed})


def parallel_machine(gpu: Profile, cpu: Profile, link: Profile, gpus: int, cost: ModelCost) -> Pricing:
    """Prices of a model on ``gpus`` cards (see :func:`together`), each with a link of its own to the host."""
    cards = together(gpu, gpus, cost.shape)
    if gpus == 1:
        return machine(gpu, cpu, link)
    most = max(link.value("bandwidth"), SUSTAINED_DRAM * cpu.value("bandwidth"))
    width = replace(link.quantities["bandwidth"], value=min(gpus * link.value("bandwidth"), most))
    links = replace(link, name=f"{gpus}x{link.name}", fingerprint=f"{gpus}x{link.fingerprint}",
                    quantities={**link.quantities, "bandwidth": width})  # fmt: skip
    pricing = machine(cards, cpu, links)
    ring = Ring(gpus, gpu.value("peer_hop"), gpu.value("peer_bandwidth"))
    element = dtype_bytes(cost.dtype)
    joined = {
        (GPU, "linear"): (2, 2, cost.shape.hidden_size * element),
        (GPU, "head"): (1, 1, cost.shape.vocab_size * element),
    }
    models = {key: Joined(pricing.models[key], ring, *how) for key, how in joined.items()}
    return replace(pricing, models={**pricing.models, **models})
