"""What is measured: the reference case and what is compared with it."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Case:
    """One shape.

    Attributes
    ----------
    name : str
    group, heads, dim, page : int
        Query heads per KV head, KV heads, head dim, page size.
    dtype : str
        KV dtype.
    lens : tuple of int
        Tokens of each sequence.
    against : str
        Name of a case measured in the same rounds; its ratio is reported.
    peers : bool
        Whether other libraries compute the same case in the same rounds.
    neighbour : bool
        Measure beside a busy process as well.
    backend : str
        A name of `cpu_kernels.backends`.
    common : int
        Tokens that all sequences begin with, in the same pages.
    read_once : bool
        These are read once for many sequences.
    """

    name: str
    group: int
    heads: int = 8
    dim: int = 128
    page: int = 32
    dtype: str = "bf16"
    lens: tuple[int, ...] = (4096,) * 16
    against: str = ""
    peers: bool = False
    neighbour: bool = False
    backend: str = "native"
    common: int = 0
    read_once: bool = False

    def __post_init__(self) -> None:
        if not self.lens or min(self.lens) < 1:
            raise ValueError(f"case {self.name}: lens must be one or more positive lengths")
        if self.common % self.page or not 0 <= self.common <= min(self.lens):
            raise ValueError(f"case {self.name}: common must be whole pages of {self.page} within all lens")


REFERENCE = tuple(Case(f"group{g}", g, peers=True) for g in (1, 4, 8))
SHAPES = (
    Case("smollm2", 3, heads=3, dim=64, lens=(4096,) * 64, against="group4"),
    Case("dim80", 4, dim=80, lens=(4096,) * 26, against="group4"),
    Case("dim96", 4, dim=96, lens=(4096,) * 21, against="group4"),
    Case("dim256", 4, dim=256, lens=(4096,) * 8, against="group4"),
    Case("group5", 5, against="group4"),
    Case("group7", 7, against="group8"),
    Case("page16", 4, page=16, against="group4"),
    Case("page64", 4, page=64, against="group4"),
    Case("page128", 4, page=128, against="group4"),
)
DTYPES = (
    *(Case(f"{d}-group1", 1, dtype=d, against="group1") for d in ("int8", "fp8", "fp16", "fp32")),
    *(Case(f"{d}-group4", 4, dtype=d, against="group4") for d in ("int8", "fp8")),
)
DIVISION = (
    Case("one-of-131072", 4, lens=(131_072,), against="group4"),
    Case("256-of-100", 4, lens=(100,) * 256, against="group4"),
)
NEIGHBOUR = (Case("neighbour", 4, neighbour=True),)
NUMBA = tuple(
    Case(f"{name}-group{g}", g, against=f"group{g}", backend=name)
    for name in ("numba", "numba_topk_approx")
    for g in (1, 4, 8)
)
COMMON = tuple(
    Case(f"common-group{g}", g, lens=(4352,) * 16, common=4096, read_once=True, against=f"each-group{g}")
    for g in (1, 4, 8)
)
EACH = tuple(replace(case, name=case.against, read_once=False, against="") for case in COMMON)
SETS = {
    "reference": REFERENCE,
    "shapes": SHAPES,
    "dtypes": DTYPES,
    "division": DIVISION,
    "neighbour": NEIGHBOUR,
    "numba": NUMBA,
    "common": COMMON,
}


def ragged(trace: Path, count: int = 64) -> Case:
    """Make a case from the first context lengths of an Azure LLM inference trace (CSV, column ``ContextTokens``)."""
    with trace.open(newline="") as file:
        lens = [max(1, int(row["ContextTokens"])) for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
    return Case("azure-ragged", 4, lens=tuple(lens), against="group4")
