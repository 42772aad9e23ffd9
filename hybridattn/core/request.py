"""A request's life: waiting -> prefill -> decode -> finished, with preemption back to waiting."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from hybridattn.core.page_table import GPU_TIER, PageTable
from hybridattn.core.records import RequestRecord
from hybridattn.core.stages import CpuRow


class State(Enum):
    WAITING = "waiting"  # in the queue, holds no pages
    PREFILL = "prefill"  # admitted; not all known tokens have their K,V yet
    DECODE = "decode"  # one token at a time
    MOVING = "moving"  # its K,V is being copied to the other tier: no row of it runs
    LEAVING = "leaving"  # aborted or preempted while its CPU row is in flight: pages are held until the future ends
    FINISHED = "finished"
    PAUSED = "paused"  # finished, and keeps its K,V for the next turn of its session


class DeclaredTokens:
    """Token ids of a simulated request: only how many there are, and how many of the first all such requests share.
    Every id reads as 0."""

    __slots__ = ("count", "shared")

    def __init__(self, count: int, shared: int = 0) -> None:
        self.count = count
        self.shared = min(shared, count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> int:
        if not -self.count <= at < self.count:
            raise IndexError(f"token {at} of {self.count}")
        return 0

    def append(self, token_id: int) -> None:
        self.count += 1

    def extend(self, token_ids: Sequence[int]) -> None:
        self.count += len(token_ids)


class Request:
    """One prompt on its way. Times are the device's clock in nanoseconds.

    ``token_ids`` is the prompt followed by the output. ``num_computed`` counts tokens whose K,V is (or, once the ops
    already submitted have run, will be) in ``pages``, or was when it was preempted; ``tier`` is where the next one's
    goes, and where all lie that are on their way.
    """

    __slots__ = (
        "arrival_ns",
        "end_ns",
        "error",
        "events",
        "finish_reason",
        "in_flight",
        "index",
        "keep",
        "max_tokens",
        "num_computed",
        "num_prompt",
        "page_names",
        "pages",
        "params",
        "preemptions",
        "recomputed_tokens",
        "request_id",
        "requeue",
        "reused_tokens",
        "row",
        "scheduled_ns",
        "session",
        "state",
        "text",
        "tier",
        "token_ids",
        "token_ns",
    )

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt: Sequence[int] | DeclaredTokens,
        max_tokens: int,
        params: Any,
        arrival_ns: int,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.token_ids: Any = (
            DeclaredTokens(len(prompt), prompt.shared) if isinstance(prompt, DeclaredTokens) else list(prompt)
        )
        self.num_prompt = len(prompt)
        self.max_tokens = max_tokens
        self.params = params
        self.arrival_ns = arrival_ns
        self.text: Any = None  # a TextStream where text is wanted
        self.events: Any = None  # a list where the caller collects events
        self.session = ""  # whose context it takes up
        self.keep = False  # its end leaves K,V behind for the session's next turn
        self.state = State.WAITING
        self.tier = GPU_TIER
        self.pages = PageTable()  # filled and emptied by the KV manager
        self.page_names: list[bytes] = []  # of its first whole pages (``hybridattn.kv.prefixes``)
        self.num_computed = 0
        self.in_flight = False  # one of its rows belongs to a micro-batch
        self.row: CpuRow | None = None  # the next one, once its page is there, while it waits on the CPU tier
        self.requeue = False  # LEAVING because of preemption, not of an end
        self.preemptions = 0
        self.recomputed_tokens = 0  # whose K,V was lost with its pages
        self.reused_tokens = 0  # whose K,V was there when it began
        self.scheduled_ns: int | None = None
        self.end_ns = 0
        self.token_ns: list[int] = []
        self.finish_reason: str | None = None
        self.error: str | None = None

    @property
    def at_rest(self) -> bool:
        """It decodes, no row of it is in flight, and none of its pages is on its way."""
        return self.state is State.DECODE and not self.in_flight and self.pages.goes_to is None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def max_cached(self) -> int:
        """Tokens whose K,V may ever be held: the last output token needs none."""
        return self.num_prompt + max(self.max_tokens, 1) - 1

    def record(self) -> RequestRecord:
        return RequestRecord(
            request_id=self.request_id,
            arrival_ns=self.arrival_ns,
            end_ns=self.end_ns,
            prompt_tokens=self.num_prompt,
            token_ns=tuple(self.token_ns),
            finish_reason=self.finish_reason or "error",
            tier=self.tier,
            scheduled_ns=self.scheduled_ns,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            reused_tokens=self.reused_tokens,
            error=self.error,
        )
