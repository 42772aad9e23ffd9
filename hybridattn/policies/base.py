"""The policy contract: who goes to which tier, how CPU rows are grouped, and what becomes of a micro-batch.

JOIN    the micro-batch's attention is ready: its rows enter the GPU's next linear stage
SKIP    go on without it and ask again when the GPU comes by this layer in the next step
WAIT    wait until it is ready, at most ``max_wait_ns``, then JOIN; past that bound, SKIP
DETOUR  it gets the linear stage of its layer alone, right after that of the GPU rows; one that is not ready is waited
        for, at most ``max_wait_ns``

``ask`` decides so about a micro-batch that waits at the layer of the GPU. Those that wait elsewhere are one question
for all, ``detour``: which of them, if any, gets the linear stage of its own layer now.

The order in which a policy is asked, for one step:

    move_up -> prompts, cold_pages -> begin -> dispatch
        -> at each layer: ask, for each micro-batch there; no_detour, detour, until None

``begin``, ``prompts``, ``move_up``, ``cold_pages`` and ``detour`` cost time at every step or layer, so a policy has to
declare them (``hooks``).

Decisions depend on the views seen so far and on the cost model given at construction, on nothing else: no device, no
clock, no random source. Those of a micro-batch and of a layer are asked for in the layer loop: the executor shows its
own objects, current at the time of asking, which a policy reads and does not keep.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from hybridattn.core.errors import InputError
from hybridattn.core.op import SKIPPED
from hybridattn.core.params import as_number
from hybridattn.core.records import LayoutRecord
from hybridattn.core.stages import CPU_TIER, GPU_TIER
from hybridattn.cost.costs import Costs
from hybridattn.policies.renamed import MEMBERS, NAMES

HOOKS = frozenset({"begin", "prompts", "detour", "move_up", "cold_pages"})


class Decision(Enum):
    """What becomes of a micro-batch at its layer."""

    JOIN = "join"
    SKIP = "skip"
    WAIT = "wait"
    DETOUR = "detour"


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that waits for admission. ``index`` counts arrivals from 0; blocks are pages of its known ``tokens``
    (``blocks_now``) and of all it may ever hold (``blocks_max``). It is one of ``waiting``; the GPU tier serves
    ``gpu_rows`` requests, those whose prompts are under way included."""

    index: int
    blocks_now: int
    blocks_max: int
    tokens: int = 1
    waiting: int = 1
    gpu_rows: int = 0


@dataclass(frozen=True, slots=True)
class TierView:
    """Pages of a tier."""

    free: int
    total: int

    def admits(self, request: RequestView) -> bool:
        return request.blocks_now <= self.free and request.blocks_max <= self.total


class ColdView(NamedTuple):
    """The requests whose newest tokens lie on the GPU tier, one that may begin now included: how many they are, the
    pages that they hold on both tiers, those of them that lie on the CPU tier, pages of the GPU tier in all, and tokens
    of a page."""

    requests: int
    pages: int
    cold: int
    gpu_pages: int
    page_size: int


class StepView(NamedTuple):
    """Before a step. Rows and ``kv_tokens`` are those of all requests that decode.

    ``tokens`` counts what was made so far (a CPU row that advanced one layer counts 1/L); ``cpu_factor`` is measured
    over priced time of CPU attention so far, ``gpu_factor`` the same of the GPU's linear stages; ``waiting`` counts
    requests that wait for admission, ``gpu_coming`` and ``cpu_coming`` those of each tier whose prompts are under way,
    ``coming_tokens`` what these know so far.
    """

    number: int
    now_ns: int
    gpu_rows: int
    gpu_kv_tokens: int
    cpu_rows: int
    cpu_kv_tokens: int
    prefill_tokens: int
    tokens: float
    cpu_factor: float
    waiting: int = 0
    gpu_coming: int = 0
    cpu_coming: int = 0
    coming_tokens: int = 0
    gpu_factor: float = 1.0


class DispatchView(NamedTuple):
    """Before a step: CPU rows that wait for their next token, micro-batches in flight, and GPU rows of the step.

    ``idle_kv_tokens`` is what each idle row attends to, oldest request first; ``gpu_kv_tokens`` what the decode rows of
    the step attend to together; ``prefill`` its prompt chunks as (tokens, kv_tokens). New micro-batches get the numbers
    from ``next_number`` on; ``flying`` are those in flight as (number, rows).
    """

    idle_rows: int
    micro_batches: int
    gpu_rows: int
    idle_kv_tokens: tuple[int, ...] = ()
    gpu_kv_tokens: int = 0
    prefill: tuple[tuple[int, int], ...] = ()
    next_number: int = 0
    flying: tuple[tuple[int, int], ...] = ()

    @property
    def flying_rows(self) -> int:
        return sum(rows for _, rows in self.flying)


class PromptView(NamedTuple):
    """Before a step: prompts that the CPU tier could take (``candidates``, tokens of each, in order of arrival).

    Beside them what is settled already: decode rows of the GPU tier, chunks of other prompts as (tokens, kv_tokens),
    idle CPU rows.
    """

    candidates: tuple[int, ...]
    gpu_rows: int
    gpu_kv_tokens: int
    prefill: tuple[tuple[int, int], ...]
    idle_kv_tokens: tuple[int, ...]


class MicroBatchView(Protocol):
    """A micro-batch of ``size`` rows that waits for its attention of ``layer``, or whose attention is ready.
    ``same_step``: that attention was submitted during the current step.

    ``kv_tokens`` is what its rows attend to together. ``return_ns`` is when its attention is predicted to be back, or
    was (0 where the policy does not ask for forecasts).
    """

    @property
    def number(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def layer(self) -> int: ...
    @property
    def ready(self) -> bool: ...
    @property
    def same_step(self) -> bool: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def return_ns(self) -> int: ...


@dataclass(slots=True)
class LayerView:
    """Where the GPU is: at the start of its attention of ``layer`` (ask), or of the linear stage after it (detour).

    ``gpu_kv_tokens`` is what the step's decode rows attend to, ``tokens`` the rows of the linear stage that comes (ask)
    or runs (detour), prompt tokens included; ``gpu_free_ns`` and ``cpu_free_ns`` are when GPU and CPU are predicted to
    have done all they were given (0 where the policy does not ask for forecasts).
    """

    layer: int
    num_layers: int
    gpu_rows: int
    now_ns: int
    gpu_kv_tokens: int = 0
    tokens: int = 0
    gpu_free_ns: int = 0
    cpu_free_ns: int = 0


class Policy:
    """Base: first come, GPU first, then CPU; one micro-batch of all idle rows; no detours.

    Parameters
    ----------
    cpu_fraction : float, optional
        Force this share of requests (by order of arrival) onto the CPU tier and the others onto the GPU tier.

    Attributes
    ----------
    priority : class of its ops on the cpu.attention lane
    hooks : which of ``begin``, ``prompts``, ``move_up``, ``cold_pages`` and ``detour`` are called at all; with
        ``detour`` the driver keeps up with the GPU at every layer while a micro-batch is in flight, which ``ask`` needs
        as well where it answers DETOUR
    next_detour_ns : ``detour`` is not asked before this time, nor is ``no_detour``
    dispatch_cap : most idle rows that ``dispatch`` wants to see, oldest first (None: all)
    swap_in_below : share of the GPU tier's pages in use below which requests of the CPU tier move up, oldest first, and
        new prompts leave the GPU tier to them; with it, a GPU tier that is full moves its youngest request down instead
        of computing it again later (None: no moves; also none where the stages cannot move K,V)
    cold_only_when_full : ``cold_pages`` wants no cold page as long as the GPU tier has room for all
    splits_first : a request that is placed on the CPU tier lies on both instead, as long as ``cold_pages`` allows it
    moves_block : a step waits for the moves that begin with it, and the requests that moved take part in it
    takes_detours : ``detour`` may be wanted in the coming step; else the driver need not keep up with the GPU for it
    choices : changes of the layout, the latest ones, of the policies that plan
    costs : cost model of the policies that have one
    forecasts : the executor fills the predicted times of the views, by ``costs``
    """

    name = "base"
    tiers: tuple[str, ...] = (GPU_TIER, CPU_TIER)
    hooks: frozenset[str] = frozenset()
    priority = SKIPPED
    next_detour_ns = 0
    dispatch_cap: int | None = None
    forecasts = False
    cold_only_when_full = True
    splits_first = False
    swap_in_below: float | None = None
    moves_block = False
    costs: Costs | None = None
    choices: Collection[LayoutRecord] = ()
    cpu_fraction: float | None = None

    def __init_subclass__(cls) -> None:
        """A hook that is defined must be declared, and nothing may have a name of earlier versions."""
        super().__init_subclass__()
        for old, new in MEMBERS.items():
            if old in cls.__dict__:
                raise InputError(f"policy class {cls.__name__}: '{old}' is {new} now")
        if not isinstance(cls.hooks, frozenset | set):
            raise InputError(f"policy class {cls.__name__}: hooks must be a set of names, got {cls.hooks!r}")
        unknown = sorted(cls.hooks - HOOKS)
        if unknown:
            raise InputError(f"policy class {cls.__name__}: hook '{unknown[0]}' is none of {', '.join(sorted(HOOKS))}")
        missing = sorted(name for name in HOOKS - cls.hooks if name in cls.__dict__)
        if missing:
            raise InputError(
                f"policy class {cls.__name__} defines {missing[0]}(), which is called only when it is declared: "
                f"add '{missing[0]}' to its hooks"
            )

    def __init__(self, cpu_fraction: float | None = None) -> None:
        share = None if cpu_fraction is None else as_number(cpu_fraction)
        if cpu_fraction is not None and (share is None or not 0.0 <= share <= 1.0):
            raise InputError(f"cpu_fraction must lie in 0..1, got {cpu_fraction!r}")
        if share and CPU_TIER not in self.tiers:
            raise InputError(
                f"cpu_fraction {cpu_fraction} asks for the CPU tier, which policy '{self.name}' does not use"
            )
        self.cpu_fraction = share

    @property
    def steps_by_layout(self) -> dict[str, int]:
        """In how many steps each layout decided; empty where nothing is planned."""
        return {}

    @property
    def takes_detours(self) -> bool:
        return "detour" in self.hooks

    def allowed(self, index: int) -> tuple[str, ...]:
        """Tiers that request ``index`` may live on, best first."""
        if self.cpu_fraction is None:
            return self.tiers
        share = self.cpu_fraction
        forced = int((index + 1) * share + 1e-9) > int(index * share + 1e-9)
        return (CPU_TIER,) if forced else (GPU_TIER,)

    def place(self, request: RequestView, tiers: dict[str, TierView]) -> str | None:
        """The tier that takes the request now; None: it waits, and with fewer free pages it would wait as well."""
        for tier in self.allowed(request.index):
            if tiers[tier].admits(request):
                return tier
        return None

    def prompts(self, view: PromptView) -> int:
        """How many of the candidates, in order, to read in the coming step. Only with the hook ``prompts``."""
        return len(view.candidates)

    def move_up(self, gpu_rows: int, cpu_rows: int) -> bool:
        """One of the ``cpu_rows`` requests that decode on the CPU tier should join the ``gpu_rows`` on the GPU tier.
        Only with the hook ``move_up``.

        Asked, request by request, while the GPU tier has pages for all that its requests and that one may ever hold,
        so that nobody has to go down again.
        """
        return False

    def cold_pages(self, view: ColdView) -> tuple[int, int]:
        """How many of the pages should lie on the CPU tier at least, and how many may where the GPU tier has no room
        for all. Each request's oldest pages do, never its newest. Only with the hook ``cold_pages``, without which a
        request lies on one tier as a whole.
        """
        return 0, 0

    def move_down(self, gpu_rows: int, tokens: int) -> bool:
        """The GPU tier, which serves ``gpu_rows`` requests, is full: the youngest of them, of ``tokens`` tokens, should
        decode on on the CPU tier instead of being computed again later. Asked where the stages can move K,V."""
        return False

    def begin(self, view: StepView) -> None:
        """A step begins: the place to plan. Only with the hook ``begin``.

        The simulator leaves out steps of the same GPU rows as the one before, while nobody else runs or waits.
        """

    def dispatch(self, view: DispatchView) -> tuple[int, ...]:
        """Sizes of the micro-batches to dispatch now from the idle rows, in order; the rest stays idle."""
        return (view.idle_rows,) if view.idle_rows else ()

    def ask(self, micro_batch: MicroBatchView, at: LayerView) -> Decision:
        """What becomes of a micro-batch that waits at the layer of the GPU."""
        raise NotImplementedError

    def priority_of(self, number: int) -> int:
        """Class of the ops of micro-batch ``number`` on the cpu.attention lane."""
        return self.priority

    def no_detour(self, at: LayerView) -> bool:
        """No detour is wanted now, whichever micro-batches are ready. Asked before ``detour``, which looks at all of
        them."""
        return False

    def detour(self, micro_batches: Sequence[MicroBatchView], at: LayerView) -> int | None:
        """Number of a micro-batch that gets a detour now; None: none. Only with the hook ``detour``.

        ``micro_batches`` are all in flight, ready or not. Asked while at least one is ready at another layer than the
        GPU's next; the others that are ready at the layer of the one named share its detour.
        """
        return None

    def max_wait_ns(self, micro_batch: MicroBatchView, at: LayerView) -> int | None:
        """Longest wait for ``micro_batch`` after WAIT or a detour of one that is not ready; None: the engine's
        time-out."""
        return None


def __getattr__(name: str) -> Any:
    """Names of earlier versions are told the new one."""
    if name in NAMES:
        raise ImportError(f"'{name}' is called '{NAMES[name]}' now")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
