"""What a planner and its process say to each other: one JSON object a line, which only becomes data of known types."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from hybridattn.core.shapes import ModelShape
from hybridattn.cost.costs import Costs
from hybridattn.cost.here import costs_here
from hybridattn.cost.profile import Profile, from_json
from hybridattn.planning.steady import Steady
from hybridattn.policies.layouts import Layout
from hybridattn.policies.load import Limits, Load, Prediction
from hybridattn.policies.planning import LayoutQuestion


@dataclass(frozen=True, slots=True)
class Setup:
    """What all questions have in common. The first line. ``table``: the file in which answers are kept, if any."""

    profile: Profile
    shape: ModelShape
    dtype: str
    table: str | None = None

    def costs(self) -> Costs:
        return costs_here(self.profile, self.shape, self.dtype, self.dtype, self.profile.fingerprint)

    def line(self) -> bytes:
        said = {"profile": self.profile.to_json(), "shape": asdict(self.shape), "dtype": self.dtype}
        return _line({**said, "table": self.table})

    @staticmethod
    def read(line: bytes) -> Setup:
        said = json.loads(line)
        return Setup(from_json(said["profile"]), ModelShape(**said["shape"]), said["dtype"], said["table"])


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to a question that could not be answered."""

    reason: str

    def line(self) -> bytes:
        return _line({"failed": self.reason})


def said_question(question: LayoutQuestion) -> dict[str, Any]:
    return asdict(question)


def told_question(said: dict[str, Any]) -> LayoutQuestion:
    discount = tuple((Layout(**layout), factor) for layout, factor in said["discount"])
    return LayoutQuestion(
        Load(**said["load"]), said["cpu_factor"], Limits(**said["limits"]), said["min_gain"], discount,
        said["split"],
    )  # fmt: skip


def said_answer(layout: Layout, expected: Prediction) -> dict[str, Any]:
    assert isinstance(expected, Steady)  # what ``by_simulation`` predicts
    return {"layout": asdict(layout), "expected": asdict(expected)}


def told_answer(said: dict[str, Any]) -> tuple[Layout, Prediction]:
    return Layout(**said["layout"]), Steady(**said["expected"])


def question_line(question: LayoutQuestion) -> bytes:
    return _line(said_question(question))


def read_question(line: bytes) -> LayoutQuestion:
    return told_question(json.loads(line))


@dataclass(frozen=True, slots=True)
class Found:
    """A layout, what is predicted of it, and the processor time that the answer took."""

    layout: Layout
    expected: Prediction
    cpu_ns: int

    def line(self) -> bytes:
        return _line({**said_answer(self.layout, self.expected), "cpu_ns": self.cpu_ns})


def read_answer(line: bytes) -> Found | Failed:
    said = json.loads(line)
    if "failed" in said:
        return Failed(said["failed"])
    return Found(*told_answer(said), said["cpu_ns"])


def _line(said: object) -> bytes:
    return json.dumps(said).encode() + b"\n"
