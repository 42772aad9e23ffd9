"""A cell: a machine with a CPU of a given speed, a model and a steady load. What policies are compared on."""

from __future__ import annotations

from dataclasses import dataclass, field

from experiments.machines import Place
from hybridattn.core.errors import InputError
from hybridattn.cost.costs import Costs
from hybridattn.policies.load import Load


@dataclass
class CellSettings:
    """``settings`` of the experiments that compare policies cell by cell.

    place : hardware/model/context, or with the CPU's speed behind it: hardware/model/context/GB per second
    output : tokens that each request makes, which says how many prompts are read meanwhile; null: very long outputs,
        no prompts
    cpu_gb_s : 10^9 bytes of K,V a second in CPU attention; null: as the place or the profile says
    ratio : CPU-held per GPU-held requests
    kv_share : by hardware, the share of the GPU's K,V memory that is used (a GPU shared or capped); others use all
    most_gpu_rows, most_cpu_rows : requests on each tier at most
    """

    place: str = "a10/llama3.1-8b/1000"
    output: int | None = None
    cpu_gb_s: float | None = None
    ratio: float = 1.0
    kv_share: dict[str, float] = field(default_factory=dict)
    most_gpu_rows: int = 40
    most_cpu_rows: int = 640

    def __post_init__(self) -> None:
        if self.ratio < 0 or (self.cpu_gb_s is not None and self.cpu_gb_s <= 0) or (self.output or 1) < 1:
            raise InputError(
                f"a cell needs a ratio of at least 0, a positive cpu_gb_s and an output of at least 1, got "
                f"{self.ratio}, {self.cpu_gb_s} and {self.output}"
            )


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell with its prices. ``costs`` is kept, so that what was priced once stays priced."""

    place: Place
    costs: Costs
    load: Load
    name: str  # all but the ratio

    @staticmethod
    def of(s: CellSettings) -> Cell:
        """Rows: what the used share of the GPU's K,V memory holds, and ``ratio`` times as many on the CPU."""
        place = Place.parse(s.place)
        gb_s = place.more if s.cpu_gb_s is None else s.cpu_gb_s
        rows = place.gpu_rows(s.kv_share.get(place.hardware, 1.0), s.most_gpu_rows)
        per_token = 0.0 if s.output is None else (place.context - s.output / 2) / s.output
        load = Load(rows, min(s.most_cpu_rows, round(rows * s.ratio)), place.context, per_token)
        speed = "" if gb_s is None else f" {gb_s:g} GB/s"
        name = f"{place} out {'-' if s.output is None else s.output}{speed}"
        return Cell(place, place.costs(gb_s), load, name)

    def columns(self, ratio: float | None = None) -> dict[str, str]:
        """What tells its row apart; without a ratio where an experiment varies that itself."""
        name = self.name if ratio is None else f"{self.name} {ratio:g}:1"
        return {"hardware": self.place.hardware, "model": self.place.model, "cell": name}
