"""The control path as a server in front of an engine: tokenise, then schedule every step, on cores that it shares.

    request   |arrives|--queue--|tokenise|                                         first token
    tokenizer            FIFO   |########|--> ready
    driver                                |schedule|step|schedule|step|...  ->     |
    engine                                         |GPU |        |GPU |

Cores. ``threads`` that all want to run (attention workers W, control threads K, busy processes M) share N cores evenly,
as a fair scheduler gives them over times of many milliseconds; none runs faster than alone:

    speed s = min(1, N / (W + K + M))

Tokenising. T tokenizer threads, first come, first served; request i with p_i prompt tokens, arrived at a_i, starts when
it is its turn and a thread is free, and takes (r + p_i t) / s, with r per request and t per token on a core of its own.

Scheduling. The driver spends c / s before each step, and o / s and q / s for every op that it submits and future that
it polls. The GPU waits for the first of these and hides the others as far as the driver runs ahead.

What this leaves out: wake-up latencies, priorities and pinning, that a thread which slept gets its core sooner than its
fair share says, and that neighbours on the same caches, or on the other hardware thread of a core, make the same work
take more CPU time. Where cores are hardware threads the last weighs most, and the model is too optimistic
(``control_path_host`` measures share and CPU time apart).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hybridattn.core.errors import InputError

OWN, SHARED, BUSY = "cores of its own", "workers on all cores", "workers on all cores, other processes too"
LAYOUTS = {"own": OWN, "shared": SHARED, "busy": BUSY}


@dataclass(frozen=True, slots=True)
class Cores:
    """``cores`` and who wants to run on them: attention workers, control threads and busy processes."""

    cores: int
    workers: int
    control: int
    busy: int = 0

    def __post_init__(self) -> None:
        if self.cores < 1 or self.control < 1 or self.workers < 0 or self.busy < 0:
            raise InputError(
                f"cores need at least one core and one control thread and no negative number of others, got "
                f"{self.cores} cores, {self.workers} workers, {self.control} control threads, {self.busy} busy"
            )

    @property
    def speed(self) -> float:
        """Share of a core that each of them gets."""
        return min(1.0, self.cores / (self.workers + self.control + self.busy))

    @property
    def attention_share(self) -> float:
        """What is left of the attention speed that all cores together have, in proportion to the workers' core time.

        An upper bound of the loss: where bandwidth saturates, the last workers add less than their share.
        """
        return self.workers * self.speed / self.cores

    @staticmethod
    def laid_out(layout: str, cores: int, control: int, attends: bool, busy: int) -> Cores:
        """``own``: workers leave cores for the control threads (one worker at least remains); ``shared``: a worker on
        every core; ``busy``: as that, beside ``busy`` processes of others. No worker runs where no attention is on the
        CPU (``attends`` is false)."""
        if layout not in LAYOUTS:
            raise InputError(f"sharing '{layout}' is none of {', '.join(LAYOUTS)}")
        workers = max(1, cores - control) if layout == "own" else cores
        return Cores(cores, workers if attends else 0, control, busy if layout == "busy" else 0)


@dataclass(frozen=True, slots=True)
class ControlPath:
    """What the control path costs on a core of its own [ns]: see the top of this file for what each is."""

    request_ns: float
    token_ns: float
    schedule_ns: float
    op_ns: float
    poll_ns: float
    tokenizers: int = 1

    def __post_init__(self) -> None:
        for name in ("request_ns", "token_ns", "schedule_ns", "op_ns", "poll_ns"):
            if getattr(self, name) < 0:
                raise InputError(f"control path: {name} must not be negative, got {getattr(self, name)}")
        if self.tokenizers < 1:
            raise InputError(f"control path: tokenizers must be at least 1, got {self.tokenizers}")

    def ready_ns(self, arrivals_ns: Sequence[int], prompt_tokens: Sequence[int], speed: float) -> list[int]:
        """When each request has been tokenised; arrivals in order."""
        if not 0 < speed <= 1:
            raise InputError(f"speed of the control path must lie in (0, 1], got {speed}")
        free = [0] * self.tokenizers
        found = []
        for arrival_ns, tokens in zip(arrivals_ns, prompt_tokens, strict=True):
            start_ns = max(arrival_ns, heapq.heappop(free))
            end_ns = start_ns + round((self.request_ns + tokens * self.token_ns) / speed)
            heapq.heappush(free, end_ns)
            found.append(end_ns)
        return found
