"""A profile of a measured machine with made-up samples: what ``hybridattn calibrate`` would write, at once."""

from __future__ import annotations

from hybridattn.calibration.samples import AXES
from hybridattn.core.op import CPU, D2H, GPU, H2D, LANES
from hybridattn.cost.costs import Costs
from hybridattn.cost.machine import late_name
from hybridattn.cost.profile import Profile, Quantity, measured_profile
from hybridattn.cost.table import Sample
from hybridattn.policies.fixed import GpuOnly

ROWS, CONTEXTS, SIZES = (1, 2, 8, 64, 2048), (1, 64, 512), (1, 10**4, 10**8, 10**12)


def made_profile(fingerprint: str, model: str, dtype: str = "fp32", cpu_factor: float = 1.0, **changes) -> Profile:
    """Linear stages take 1 ms whatever the rows, so CPU rows that ride along are free; attention 1 us a key on the GPU
    and ``cpu_factor`` times as long on the CPU."""
    samples = []
    for rows in ROWS:
        for kind, ns in (("linear", 1_000_000), ("head", 100_000), ("other", 1000)):
            samples.append(Sample(GPU, kind, rows, 0, 0.0, 0, ns))
        for context in CONTEXTS:
            for lane, factor in ((GPU, 1.0), (CPU, cpu_factor)):
                ns = round(1000 * factor * rows * context) + 1
                samples.append(Sample(lane, "decode_attention", rows, rows * context, 0.0, 0, ns))
    for size in SIZES:
        samples.append(Sample(GPU, "prefill_attention", 1, 0, float(size), 0, size // 1000 + 1))
        samples += [Sample(lane, "copy", 1, 0, 0.0, size, size // 10 + 1000) for lane in (D2H, H2D)]
    late = [late_name(name, i) for name in ("wake", *LANES) for i in range(1, 10)]
    names = ("submit", "poll", "micro_batch_op", *late)
    quantities = {name: Quantity(1000.0, "ns", "measured", "made up") for name in names}
    given = {"name": "made-up", "quantities": quantities, **changes}
    return measured_profile(
        given["name"], fingerprint, model, dtype, samples, AXES, {"torch": "any"}, given["quantities"]
    )


class Priced(GpuOnly):
    """A policy of the user's own that cannot do without a cost model."""

    name = "priced"

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self.costs = costs
