"""What a configuration may say: typed groups, so that a misspelt key or an impossible value fails at composition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf


@dataclass
class Hardware:
    """A machine by names of shipped profiles or paths of profile files. KV room not given follows from the profiles.

    gpus : as many of the card, tensor parallel, beside the one CPU (simulated, as ``hybridattn plan --gpus`` does)
    """

    label: str = MISSING
    gpu: str = MISSING
    cpu: str = MISSING
    link: str = MISSING
    gpu_kv_tokens: int | None = None
    cpu_kv_tokens: int | None = None
    gpus: int = 1

    @property
    def name(self) -> str:
        """What rows, panels and reports call it."""
        return self.label if self.gpus == 1 else f"{self.gpus}x {self.label}"


@dataclass
class Model:
    """A shape of ``hybridattn.cost.catalog`` for simulations, and what ``LLM(model=...)`` loads on real devices."""

    label: str = MISSING
    shape: str = MISSING
    dtype: str = "fp16"
    load: str = ""


@dataclass
class Target:
    """Something of the user's choice: the import path of a class or function, and its arguments."""

    label: str = MISSING
    _target_: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Device:
    """Where it runs. The times are those of a simulated driver and apply to ``sim`` only.

    exposed_us : extra time of every linear stage while CPU rows are in flight (a launch that is not hidden)
    backend : of the CPU attention on a real device: a name that ``hybridattn doctor`` shows, or a module of your own
    """

    name: str = MISSING
    submit_us: float = 0.0
    poll_us: float = 0.0
    exposed_us: float = 0.0
    backend: str = "native"


@dataclass
class Tracker:
    """A second sink beside the result folder."""

    name: str = "none"
    project: str = "hybridattn"
    mode: str = "offline"
    tags: list[str] = field(default_factory=list)
    timeout_s: float = 60.0


@dataclass
class Paths:
    """results : root of the result folders; data : folder of public traces, which are not shipped."""

    results: str = "results"
    data: str = "data"


@dataclass
class Further:
    """A further column of the same sweep over the same x."""

    y: str = MISSING
    y_label: str = ""
    relative: bool = False
    log_y: bool = False
    enough: bool = False
    lower_is_better: bool = False


@dataclass
class Analysis:
    """How rows become figures and a crossover.

    x, y : columns; ``y`` of a series over that of ``baseline`` is its gain where ``relative``
    panels : columns whose values make a panel each
    candidate : the series whose crossover goes to summary.json, in the first panel (``panel`` chooses another one)
    theory : name of a line of ``hybridattn.analysis.theory`` drawn beside the points
    published : a file of published points under experiments/published
    enough : say from which x on a doubling of it helps by less than 5 %
    lower_is_better : less of ``y`` is an improvement, for ``enough``
    more : further columns, each with a figure of its own: mappings of ``y`` and of any of ``y_label``, ``relative``,
        ``log_y``, ``enough`` and ``lower_is_better``
    """

    x: str = ""
    x_label: str = ""
    unit: str = ""
    y: str = ""
    y_label: str = ""
    series: str = "policy"
    panels: list[str] = field(default_factory=list)
    baseline: str = ""
    candidate: str = ""
    panel: str = ""
    relative: bool = True
    log_x: bool = False
    log_y: bool = False
    theory: str = ""
    published: str = ""
    enough: bool = False
    lower_is_better: bool = False
    more: list[Further] = field(default_factory=list)


@dataclass
class App:
    """The root. ``point``, a ``package.module:function``, does one point of a sweep.

    question, title : what the experiment asks, for its report, and the head of its figures
    verdict : ``package.module:function`` that takes the rows of the points that ran and returns lines to print at the
        end; empty: a function ``verdict`` in the module of ``point``, where there is one
    also : experiments whose sweeps come after this one, each with rows, figures and a folder of its own, as they stand
        in their files; left out when the command line changes what is swept
    seed : of everything drawn at random; repeat ``i`` of a point draws with ``seed + i``
    beside : the folder of the sweep that this one comes after
    """

    name: str = ""
    question: str = ""
    title: str = ""
    point: str = ""
    verdict: str = ""
    also: list[str] = field(default_factory=list)
    results_root: str = "results"
    settings: dict[str, Any] = field(default_factory=dict)
    repeats: int = 1
    repeat: int = 0
    seed: int = 0
    beside: str = ""
    point_seconds: float = 1.0  # expected, for the projection before anything is known
    resume: Any = False  # true: the latest folder of this experiment; or the path of one
    fail_fast: bool = False
    hardware: Hardware = field(default_factory=Hardware)
    model: Model = field(default_factory=Model)
    workload: Target = field(default_factory=Target)
    policy: Target = field(default_factory=Target)
    device: Device = field(default_factory=Device)
    tracker: Tracker = field(default_factory=Tracker)
    paths: Paths = field(default_factory=Paths)
    analysis: Analysis = field(default_factory=Analysis)


def register() -> None:
    """Make the schemas known to hydra. Idempotent."""
    store = ConfigStore.instance()
    store.store(name="schema", node=App)
    options = OmegaConf.structured(Target)
    OmegaConf.set_struct(options.options, False)  # a policy takes what its class has: `build.check_options`
    groups = {"hardware": Hardware, "model": Model, "workload": Target, "policy": options, "device": Device}
    for group, node in {**groups, "tracker": Tracker, "paths": Paths}.items():
        store.store(group=group, name="schema", node=node)
