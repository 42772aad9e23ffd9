"""What a GPU generation can do: decided by its compute capability, never by trying and catching."""

from dataclasses import dataclass

import torch

from gpu_kernels.environment import interpreted

# Largest shared memory of one block, bytes, by compute capability (CUDA C++ programming guide, table of technical
# specifications per compute capability; 1 KiB of the SM's total is kept by the system from 8.0 on).
_SHARED_BYTES = {
    75: 65_536,
    80: 166_912,
    86: 101_376,
    87: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    120: 101_376,
}


@dataclass(frozen=True, slots=True)
class Capability:
    """A compute capability as one number (``major * 10 + minor``; 0 is Triton's interpreter)."""

    sm: int

    def __post_init__(self) -> None:
        if self.sm != 0 and self.sm < 75:
            raise ValueError(f"sm: compute capability {self.sm / 10:.1f} is older than 7.5, the oldest supported")

    @property
    def interpreter(self) -> bool:
        return self.sm == 0

    @property
    def bf16(self) -> bool:
        """Matrix products in bf16 exist from 8.0 on; Triton's interpreter computes them through a 16-bit integer."""
        return self.sm >= 80

    @property
    def half(self) -> torch.dtype:
        """The 16-bit type to use on this device."""
        return torch.bfloat16 if self.bf16 else torch.float16

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one block may use, in bytes; a newer, unlisted generation counts as its nearest older."""
        known = [sm for sm in _SHARED_BYTES if sm <= self.sm]
        return _SHARED_BYTES[max(known)] if known else _SHARED_BYTES[75]

    def refuse_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Raise if ``dtype`` can't be computed with here."""
        if dtype is not torch.bfloat16 or self.bf16:
            return
        if self.interpreter:
            raise ValueError(f"{name}: bfloat16 under Triton's interpreter gives wrong numbers; use float32 or float16")
        raise ValueError(
            f"{name}: bfloat16 needs compute capability 8.0 or newer, this device has {self.sm / 10:.1f}; use float16"
        )


def capability_of(device: torch.device) -> Capability:
    """The capability of a CUDA device, or the interpreter's where the kernels are interpreted.

    Raises
    ------
    RuntimeError
        for a device on which the kernels can't run at all.
    """
    if interpreted():
        return Capability(0)
    if device.type != "cuda":
        raise RuntimeError(
            f"device: the kernels run on CUDA tensors and got '{device}'; to run them on the CPU, set "
            "TRITON_INTERPRET=1 before Triton is first imported"
        )
    major, minor = torch.cuda.get_device_capability(device)
    return Capability(major * 10 + minor)
