"""What a run leaves behind: one record per request, one per step. Metrics are pure functions of these."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybridattn.core.errors import InputError


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, without its text. Times are the device's clock in nanoseconds.

    ``token_ns[i]`` is when output token ``i`` was known to the driver. ``finish_reason`` is ``stop``, ``length``,
    ``abort`` or ``error``; anything but the first two is a failure. ``tier`` is where its KV lived last;
    ``recomputed_tokens`` counts those whose K,V was lost by a preemption, ``reused_tokens`` those of the prompt whose
    K,V was found: of its session, or of another request's prompt.
    """

    request_id: str
    arrival_ns: int
    end_ns: int
    prompt_tokens: int
    token_ns: tuple[int, ...]
    finish_reason: str
    tier: str = "gpu"
    scheduled_ns: int | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0
    reused_tokens: int = 0
    error: str | None = None

    def __post_init__(self) -> None:
        if self.end_ns < self.arrival_ns:
            raise InputError(
                f"request {self.request_id}: end_ns {self.end_ns} lies before arrival_ns {self.arrival_ns}"
            )
        if any(a > b for a, b in zip(self.token_ns, self.token_ns[1:], strict=False)):
            raise InputError(f"request {self.request_id}: token_ns goes back in time")

    @property
    def output_tokens(self) -> int:
        return len(self.token_ns)

    @property
    def failed(self) -> bool:
        return self.finish_reason not in ("stop", "length")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the GPU over the layers (or, with ``gpu_rows == 0``, one round of detours).

    ``layers_advanced`` counts micro-batch-layers: a micro-batch of any size that went from layer l to l+1 counts one.
    ``micro_batches`` is the number of micro-batches in flight when the step began, those dispatched by it included.
    """

    index: int
    start_ns: int
    end_ns: int
    gpu_rows: int
    prefill_tokens: int
    cpu_rows: int
    micro_batches: int
    layers_advanced: int
    polls_made: int
    polls_hit: int
    joins: int
    skips: int
    waits: int
    detours: int

    @property
    def polls_missed(self) -> int:
        return self.polls_made - self.polls_hit


@dataclass(frozen=True, slots=True)
class LayoutRecord:
    """A policy that plans has changed how CPU rows are served: since which step, how, for which load, and by whom it
    was chosen (a closed form, a simulation, or memory). ``tokens_per_s`` is what was predicted, if anything."""

    step: int
    at_ns: int
    layout: str
    load: str
    by: str
    tokens_per_s: float | None = None

    def __str__(self) -> str:
        rate = "" if self.tokens_per_s is None else f", {self.tokens_per_s:.4g} tokens/s predicted"
        return f"{self.layout} for {self.load}, by {self.by}{rate}"


@dataclass(slots=True)
class RunRecords:
    """Everything metrics need of one run."""

    num_layers: int
    requests: list[RequestRecord] = field(default_factory=list, repr=False)
    steps: list[StepRecord] = field(default_factory=list, repr=False)
    layouts: list[LayoutRecord] = field(default_factory=list, repr=False)
