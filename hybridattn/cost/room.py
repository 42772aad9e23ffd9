"""How many tokens of K,V fit beside the weights, on the GPU and on the host; what does not fit is refused."""

from __future__ import annotations

from dataclasses import dataclass

from hybridattn.core.errors import InputError
from hybridattn.cost.parallel import together
from hybridattn.cost.profile import Profile
from hybridattn.cost.stages_cost import ModelCost

GPU_FRACTION = 0.9  # of the GPU's memory for weights and KV; the rest is activations, staging and the context
CPU_FRACTION = 0.8  # of the host's memory for KV; the rest is the system's
GB = 10**9


@dataclass(frozen=True, slots=True)
class Room:
    """Room for K,V in bytes, and tokens of it; all layers together."""

    model: str
    max_model_len: int
    token_bytes: int
    gpu_bytes: int
    cpu_bytes: int

    @property
    def gpu_tokens(self) -> int:
        return self.gpu_bytes // self.token_bytes

    @property
    def cpu_tokens(self) -> int:
        return self.cpu_bytes // self.token_bytes


def room(gpu: Profile, cpu: Profile, cost: ModelCost, gpus: int = 1) -> Room:
    """The room on ``gpus`` cards beside the weights of a model; InputError with the numbers where these do not fit."""
    gpu = together(gpu, gpus, cost.shape)
    memory, name = gpu.value("memory"), f"{cost.shape.name} {cost.dtype}"
    left = int(GPU_FRACTION * memory) - cost.weight_bytes
    if left < 0:
        raise InputError(
            f"{name} has {cost.weight_bytes / GB:.1f} GB of weights and {gpu.name} {memory / GB:.0f} GB of memory, "
            f"{GPU_FRACTION:.0%} of it for weights and KV: it needs more or larger GPUs, or a smaller dtype"
        )
    per_token = cost.kv_token_layer_bytes * cost.shape.num_layers
    host = int(CPU_FRACTION * cpu.value("memory"))
    return Room(name, cost.shape.max_model_len, per_token, left, host)


def check_context(room: Room, context: int) -> None:
    """InputError with the numbers for a context that the model cannot have, or that fits on neither tier."""
    if context > room.max_model_len:
        raise InputError(f"a context of {context:,} tokens exceeds the {room.max_model_len:,} that {room.model} has")
    if context > max(room.gpu_tokens, room.cpu_tokens):
        raise InputError(
            f"a context of {context:,} tokens of {room.model} takes {context * room.token_bytes / GB:.1f} GB of KV: "
            f"the GPU has room for {room.gpu_bytes / GB:.1f} GB beside the weights, the host for "
            f"{room.cpu_bytes / GB:.1f} GB"
        )
