"""The roofline price of an op: launch time plus the slower of arithmetic and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridattn.core.errors import InputError
from hybridattn.core.op import Work


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of the peak flop rate and of the peak bandwidth that a kind of work reaches, each in (0, 1]."""

    compute: float
    memory: float

    def __post_init__(self) -> None:
        for name in ("compute", "memory"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise InputError(f"efficiency {name} must be in (0, 1], got {value}")


@dataclass(frozen=True, slots=True)
class Roofline:
    """``price = launch_ns + max(flops / (peak * compute), bytes / (bandwidth * memory))``.

    Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009; the launch term is ours.

    Parameters
    ----------
    peak_flops : float
        Peak rate [flop/s].
    bandwidth : float
        Peak bandwidth [byte/s]. 1 GB/s is 1 byte/ns.
    launch_ns : int
        Time per op that neither flops nor bytes explain [ns].
    efficiency : mapping of kind to Efficiency
        The kinds that can be priced; any other is refused.

    Notes
    -----
    The price is four float operations, which costs less than finding it in a cache; so nothing is memoised here.
    """

    peak_flops: float
    bandwidth: float
    launch_ns: int
    efficiency: Mapping[str, Efficiency]
    _per_kind: dict[str, tuple[float, float]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("peak_flops", "bandwidth"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise InputError(f"{name} must be positive and finite, got {value}")
        if self.launch_ns < 0:
            raise InputError(f"launch_ns must not be negative, got {self.launch_ns}")
        per_kind = {
            kind: (1e9 / (self.peak_flops * e.compute), 1e9 / (self.bandwidth * e.memory))
            for kind, e in self.efficiency.items()
        }
        object.__setattr__(self, "_per_kind", per_kind)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._per_kind)

    def price_ns(self, work: Work) -> int:
        """Time for ``work`` [ns]; InputError for a kind without an efficiency."""
        try:
            ns_per_flop, ns_per_byte = self._per_kind[work.kind]
        except KeyError:
            raise InputError(f"no roofline for {work!r}; this one prices {', '.join(self._per_kind)}") from None
        compute, memory = work.flops * ns_per_flop, work.num_bytes * ns_per_byte
        return self.launch_ns + int((compute if compute > memory else memory) + 0.5)
