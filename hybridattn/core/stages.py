"""The stages contract: what a model does in a step, as ops for a device.

The executor calls these in the driver's thread, in the order of the picture below, and submits what they return.
``TorchStages`` returns ops that compute; ``PricedStages`` returns ops that only have a price. One GPU step, one
micro-batch of CPU rows standing at layer l (time runs to the right):

    gpu.compute   |attention(l, G)|linear(l, G + micro-batch): post(l), pre(l+1)|attention(l+1, G)|...
    gpu.h2d          |fetch_output(l, micro-batch)|
    gpu.d2h                                                                |send_qkv(l+1, micro-batch)|
    cpu.attention  ...(l, micro-batch)|                                                          |(l+1, micro-batch) ...

A row whose K,V lie on both tiers (a split row) has its hot part attended to on the GPU and its cold part on the CPU, at
the same time; the next linear stage waits for both:

    gpu.compute   |attention(l, G): hot parts|          |merge(l)|linear(l, G)|
    gpu.d2h       |send_q(l)|
    cpu.attention           |cold_attention(l)|
    gpu.h2d                                   |fetch_cold(l)|

Integers, tables and token ids that an op needs are read when the op is made, not when it runs: the driver changes
requests while ops are in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from hybridattn.core.device import DecodeStep, Future
from hybridattn.core.errors import InputError
from hybridattn.core.op import Op
from hybridattn.core.page_table import CPU_TIER, GPU_TIER, PageTable
from hybridattn.core.page_table import TIERS as TIERS


class RequestLike(Protocol):
    """What stages read of a request (``hybridattn.core.request.Request``)."""

    request_id: str
    token_ids: list[int]  # prompt, then output
    num_prompt: int
    pages: PageTable
    tier: str  # of its next token's K,V
    params: Any  # SamplingParams


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one request that go through all layers on the GPU in one step.

    ``tier`` is where their K,V goes: a prefill of a CPU-tier request computes on the GPU and hands its K,V down.
    ``samples`` says that the logits of the last token are wanted. Tokens in whole pages, oldest first: ``gone`` ones,
    whose pages a window has left behind, then ``cold`` ones of a GPU-tier request, whose K,V lie on the CPU tier.
    """

    request: RequestLike
    tier: str
    start: int
    num_tokens: int
    samples: bool
    prefill: bool
    cold: int = 0
    gone: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.start < 0:
            raise InputError(f"segment of {self.request.request_id}: start {self.start}, num_tokens {self.num_tokens}")
        if not self.prefill and (self.num_tokens != 1 or self.tier != GPU_TIER):
            raise InputError(f"segment of {self.request.request_id}: a decode row is one token of a GPU-tier request")
        if self.cold and not (self.tier == GPU_TIER and 0 < self.cold and self.hot_from <= self.start):
            raise InputError(
                f"segment of {self.request.request_id}: {self.cold} cold tokens after {self.gone}, start {self.start}, "
                f"{self.tier} tier"
            )

    @property
    def hot_from(self) -> int:
        """Position of the first key of a GPU-tier request that lies on the GPU tier."""
        return self.gone + self.cold

    @property
    def unseen(self) -> int:
        """Tokens of it that the request does not have yet: 1 where the step before samples it, else 0."""
        return max(0, self.start + self.num_tokens - len(self.request.token_ids))

    @property
    def loads(self) -> int:
        """Tokens of a prompt, earlier than its own, whose K,V come up for its attention."""
        return self.start if self.tier == CPU_TIER else self.cold


@dataclass(frozen=True, slots=True)
class Batch:
    """The GPU rows of one step: decode rows, ``split`` ones first, then ``prefills``.

    ``decode_kv_tokens`` is what decode rows attend to on the GPU together, ``cold_kv_tokens`` what split ones do on the
    CPU.
    """

    segments: tuple[Segment, ...]
    split: tuple[Segment, ...] = field(init=False, repr=False, compare=False)
    prefills: tuple[Segment, ...] = field(init=False, repr=False, compare=False)
    decode_kv_tokens: int = field(init=False, repr=False, compare=False)
    cold_kv_tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kv_tokens = [s.start + 1 - s.gone for s in self.segments if not s.prefill]
        cold = [s.cold for s in self.segments if s.cold and not s.prefill]
        split, prefills = self.segments[: len(cold)], self.segments[len(kv_tokens) :]
        if not all([s.prefill for s in prefills]):
            raise InputError("batch: decode rows must come before prefill segments")
        if cold and not all([s.cold for s in split]):
            raise InputError("batch: split rows must come before other decode rows")
        object.__setattr__(self, "split", split)
        object.__setattr__(self, "prefills", prefills)
        object.__setattr__(self, "decode_kv_tokens", sum(kv_tokens) - sum(cold))
        object.__setattr__(self, "cold_kv_tokens", sum(cold))

    @property
    def num_decodes(self) -> int:
        return len(self.segments) - len(self.prefills)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.prefill_tokens

    @property
    def prefill_tokens(self) -> int:
        return sum([s.num_tokens for s in self.prefills])

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Of each prefill segment the tokens, and the keys that the last of them attends to."""
        return tuple([(s.num_tokens, s.start + s.num_tokens) for s in self.prefills])

    @property
    def offloaded(self) -> tuple[Segment, ...]:
        """Prefill segments whose K,V goes to the CPU tier."""
        return tuple([s for s in self.prefills if s.tier == CPU_TIER])

    @property
    def loaded(self) -> tuple[Segment, ...]:
        """Prefill segments for which K,V of earlier tokens come up."""
        return tuple([s for s in self.prefills if s.loads])


@dataclass(frozen=True, slots=True)
class CpuRow:
    """One token of a CPU-tier request on its way through the layers."""

    request: RequestLike
    position: int


class MicroBatch:
    """CPU rows that move through the layers together.

    Owns the slots ``[first_slot, first_slot + len(rows))`` of the residual and exchange slabs from its dispatch to its
    end. ``layer`` is where its attention is in flight (``future``, from its first layer on) or finished. ``dead`` marks
    rows whose request was aborted or preempted: they ride along, attend to nothing, and their result is discarded.

    Policies see it as a ``hybridattn.policies.base.MicroBatchView``: the executor keeps ``size`` (its rows),
    ``kv_tokens`` (of the rows alive), ``layer``, ``ready``, ``same_step`` and ``return_ns`` current.
    """

    __slots__ = (
        "dead", "first_slot", "kv_tokens", "layer", "number", "ready", "requests", "return_ns", "rows", "same_step",
        "size", "submitted_ns", "future",
    )  # fmt: skip

    future: Future

    def __init__(self, number: int, rows: Sequence[CpuRow], first_slot: int) -> None:
        self.number = number
        self.rows = tuple(rows)
        self.size = len(self.rows)
        self.requests = tuple(r.request.request_id for r in rows)
        self.first_slot = first_slot
        self.layer = -1
        self.ready = False
        self.same_step = True
        self.submitted_ns = 0
        self.return_ns = 0
        self.dead: set[int] = set()
        self.kv_tokens = 0
        self.count_kv_tokens()

    def count_kv_tokens(self) -> None:
        """Keys of the rows that are alive."""
        dead = self.dead
        if not dead:
            self.kv_tokens = sum([r.position + 1 for r in self.rows])
        else:
            self.kv_tokens = sum([r.position + 1 for i, r in enumerate(self.rows) if i not in dead])


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row of logits from which no token can be drawn. ``reason`` is one sentence without the row's number."""

    row: int
    reason: str

    def __str__(self) -> str:
        return f"logits of row {self.row} {self.reason}"


class Sampled(NamedTuple):
    """A token that a request got, or why it got none."""

    request: RequestLike
    token_id: int | RowFault
    time_ns: int


class Stages(Protocol):
    """A model, cut at attention. Every method returns an op; none of them blocks or computes."""

    num_layers: int

    def begin(self, batch: Batch) -> None:
        """Plan the GPU rows of the coming step (tables, positions, token ids)."""
        ...

    def dispatch(self, micro_batch: MicroBatch) -> None:
        """Plan a new micro-batch (tables, positions, token ids)."""
        ...

    def replan(self, micro_batch: MicroBatch) -> None:
        """Rows of ``micro_batch`` died: their blocks must not be touched by attention ops made from now on."""
        ...

    def attention(self, layer: int, batch: Batch) -> Op:
        """gpu.compute: writes K,V of GPU-tier rows and attends to what lies there, or was loaded."""
        ...

    def linear(self, layer: int, batch: Batch | None, micro_batches: Sequence[MicroBatch]) -> Op:
        """gpu.compute: post(layer) and pre(layer + 1) for the rows present.

        ``layer == -1`` embeds and does pre(0) only; the last layer does post, the head and sampling, and its future's
        result is a list of token ids: sampling segments first, then the rows of the micro-batches, dead ones included.
        A row without a token has a ``RowFault`` there: its request fails, and nobody else.
        """
        ...

    def send_qkv(self, micro_batch: MicroBatch) -> Op:
        """gpu.d2h: q, k, v of the micro-batch at its layer go down."""
        ...

    def cpu_attention(self, micro_batch: MicroBatch, priority: int) -> Op:
        """cpu.attention: appends k, v to the CPU pages, then attends."""
        ...

    def fetch_output(self, micro_batch: MicroBatch) -> Op:
        """gpu.h2d: the attention output of the micro-batch goes up."""
        ...

    def send_q(self, layer: int, batch: Batch) -> Op:
        """gpu.d2h: q of the split rows goes down."""
        ...

    def cold_attention(self, layer: int, batch: Batch) -> Op:
        """cpu.attention: the split rows attend to their cold pages, which gives a part of the output and its lse."""
        ...

    def fetch_cold(self, layer: int, batch: Batch) -> Op:
        """gpu.h2d: those parts and their lse go up."""
        ...

    def merge(self, layer: int, batch: Batch) -> Op:
        """gpu.compute: the two parts of each split row become its output."""
        ...

    def load_kv(self, layer: int, segment: Segment) -> Op:
        """gpu.h2d: K,V of this layer's ``segment.loads`` first tokens go up into the staging area."""
        ...

    def offload_kv(self, layer: int, segment: Segment) -> Op:
        """gpu.d2h: K,V of this segment at this layer are packed into the CPU pages."""
        ...

    def finish(self, micro_batch: MicroBatch) -> None:
        """The micro-batch ended; its per-micro-batch state may go."""
        ...


@runtime_checkable
class RunStages(Stages, Protocol):
    """Stages that can do several layers of the GPU rows in one op."""

    def layers(self, first: int, stop: int, batch: Batch) -> Op | None:
        """gpu.compute: attention and linear stage of layers ``first`` to ``stop - 1``, the model's last not among them,
        for the GPU rows alone; None where this step's go one by one."""
        ...


@runtime_checkable
class AheadStages(Stages, Protocol):
    """Stages that can plan a decode step before the tokens of the one before have come down."""

    def can_follow(self, batch: Batch) -> bool:
        """Whether the next step may be decode rows of ``batch`` that each begin with the token that ``batch``, planned
        last and without micro-batches beside it, samples for them: their segments start where their requests end."""
        ...


@runtime_checkable
class RepeatedStages(Stages, Protocol):
    """Stages that know the ops of a decode step whose rows are all ``step`` tokens further on."""

    def alone(self, batch: Batch, step: int) -> DecodeStep:
        """``step`` 0 is ``batch`` itself; asked for in order."""
        ...
