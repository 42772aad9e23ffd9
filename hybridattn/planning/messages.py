"""What a planner and its process say to each other: one JSON object a line, which only becomes data of known types."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

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
    """What all questions have in common. The first line."""

    profile: Profile
    shape: ModelShape
    dtype: str

    def costs(self) -> Costs:
        return costs_here(self.profile, self.shape, self.dtype, self.dtype, self.profile.fingerprint)

    def line(self) -> bytes:
        return _line({"profile": self.profile.to_json(), "shape": asdict(self.shape), "dtype": self.dtype})

    @staticmethod
    def read(line: bytes) -> Setup:
        said = json.loads(line)
        return Setup(from_json(said["profile"]), ModelShape(**said["shape"]), said["dtype"])


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to a question that could not be answered."""

    reason: str

    def line(self) -> bytes:
        return _line({"failed": self.reason})


def question_line(question: LayoutQuestion) -> bytes:
    return _line(asdict(question))


def read_question(line: bytes) -> LayoutQuestion:
    said = json.loads(line)
    discount = tuple((Layout(**layout), factor) for layout, factor in said.pop("discount"))
    return LayoutQuestion(Load(**said.pop("load")), limits=Limits(**said.pop("limits")), discount=discount, **said)


@dataclass(frozen=True, slots=True)
class Found:
    """A layout, what is predicted of it, and the processor time that the answer took."""

    layout: Layout
    expected: Prediction
    cpu_ns: int

    def line(self) -> bytes:
        assert isinstance(self.expected, Steady)  # what ``by_simulation`` predicts
        return _line({"layout": asdict(self.layout), "expected": asdict(self.expected), "cpu_ns": self.cpu_ns})


def read_answer(line: bytes) -> Found | Failed:
    said = json.loads(line)
    if "failed" in said:
        return Failed(said["failed"])
    return Found(Layout(**said["layout"]), Steady(**said["expected"]), said["cpu_ns"])


def _line(said: object) -> bytes:
    return json.dumps(said).encode() + b"\n"
