"""A workload as data: which request arrives when, with how many tokens in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hybridattn.core.errors import InputError


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request to come.

    Parameters
    ----------
    arrival_ns : int
        From the start of the run; 0 for an item that follows another.
    prompt_tokens, output_tokens : int
        New tokens in and out. Outputs of 0 appear only where a trace was read with ``keep_empty``.
    session : str
        The session it belongs to, empty for a request on its own.
    history_tokens : int
        Tokens of earlier turns that are in its context beside the prompt.
    after : int, optional
        Index of the item whose end brings this one, ``delay_ns`` later (the pause for a tool or for a person).
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    history_tokens: int = 0
    after: int | None = None
    delay_ns: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise InputError(f"work item: prompt_tokens must be at least 1, got {self.prompt_tokens}")
        for name in ("arrival_ns", "output_tokens", "history_tokens", "delay_ns"):
            if getattr(self, name) < 0:
                raise InputError(f"work item: {name} must not be negative, got {getattr(self, name)}")

    @property
    def context_tokens(self) -> int:
        """Tokens in its context when it ends."""
        return self.history_tokens + self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Items in order of arrival, and where they come from.

    Parameters
    ----------
    concurrency : int, optional
        A closed loop: at most this many of the items without ``after`` are unfinished at a time, each next one arrives
        ``think_ns`` after an end (but not before its own ``arrival_ns``). ``None`` is an open loop.
    dropped : mapping of reason to number of rows left out on the way.
    """

    name: str
    items: tuple[WorkItem, ...]
    concurrency: int | None = None
    think_ns: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise InputError(f"workload {self.name}: concurrency must be at least 1, got {self.concurrency}")
        if self.think_ns < 0:
            raise InputError(f"workload {self.name}: think_ns must not be negative, got {self.think_ns}")
        last_ns = 0
        for i, item in enumerate(self.items):
            if item.after is not None:
                if not 0 <= item.after < i:
                    raise InputError(
                        f"workload {self.name}: item {i} follows item {item.after}, which is not before it"
                    )
                continue
            if item.arrival_ns < last_ns:
                raise InputError(
                    f"workload {self.name}: item {i} arrives at {item.arrival_ns} ns, the one before it at {last_ns} ns"
                )
            last_ns = item.arrival_ns

    def __len__(self) -> int:
        return len(self.items)

    @property
    def duration_ns(self) -> int:
        """Time of the last scheduled arrival: how long a replay lasts at least."""
        return max((i.arrival_ns for i in self.items), default=0)

    @property
    def rate_per_s(self) -> float | None:
        """Scheduled arrivals per second between the first and the last; ``None`` when all come at once."""
        times = [i.arrival_ns for i in self.items if i.after is None]
        return (len(times) - 1) * 1e9 / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else None

    def scaled(self, time_scale: float) -> Workload:
        """Arrivals and pauses times ``time_scale``: 0.1 replays ten times as fast."""
        if not 0 < time_scale < float("inf"):
            raise InputError(f"time_scale must be positive and finite, got {time_scale}")

        def scale(i: WorkItem) -> WorkItem:
            return replace(i, arrival_ns=round(i.arrival_ns * time_scale), delay_ns=round(i.delay_ns * time_scale))

        return replace(self, items=tuple(map(scale, self.items)), think_ns=round(self.think_ns * time_scale))

    def take(self, count: int, *, replacement: bool = False, seed: int = 0) -> Workload:
        """The first ``count`` items; with ``replacement``, that many drawn at random, in order of arrival.

        More than there are without ``replacement`` is refused; so are items that follow others, whose order matters.
        """
        if count < 1:
            raise InputError(f"count must be at least 1, got {count}")
        if not replacement:
            if count > len(self):
                raise InputError(
                    f"workload {self.name} has {len(self)} requests, {count} were asked for without replacement"
                )
            return replace(self, items=self.items[:count])
        if any(i.after is not None for i in self.items):
            raise InputError(f"workload {self.name} has items that follow others: it cannot be drawn with replacement")
        drawn = sorted(np.random.default_rng(seed).integers(0, len(self), count).tolist())
        return replace(self, items=tuple(self.items[i] for i in drawn))

    def within(self, max_model_len: int) -> Workload:
        """Without the items whose context exceeds ``max_model_len``; their number goes to ``dropped``."""
        return self._filtered(lambda i: i.context_tokens <= max_model_len, f"longer than {max_model_len} tokens")

    def _filtered(self, keep: Callable[[WorkItem], bool], reason: str) -> Workload:
        if any(i.after is not None for i in self.items):
            raise InputError(f"workload {self.name} has items that follow others: single ones cannot be left out")
        kept = tuple(i for i in self.items if keep(i))
        dropped = {**self.dropped, reason: len(self) - len(kept)} if len(kept) < len(self) else self.dropped
        return replace(self, items=kept, dropped=dropped)

    def describe(self) -> str:
        """One line to print before a run: how many, how long, how big, what was left out."""
        if not self.items:
            return f"{self.name}: no requests"
        prompt = sum(i.prompt_tokens for i in self.items) / len(self)
        output = sum(i.output_tokens for i in self.items) / len(self)
        rate = f"{self.rate_per_s:.3g} requests/s" if self.rate_per_s else "all at once"
        if self.concurrency is not None:
            rate = f"closed loop of {self.concurrency}"
        text = f"{self.name}: {len(self)} requests, arrivals over {self.duration_ns / 1e9:.1f} s ({rate})"
        text += f", mean {prompt:.0f} tokens in and {output:.0f} out"
        return text + "".join(f"; {n} dropped ({reason})" for reason, n in self.dropped.items())


class Feed:
    """Says which items arrive as others end: closed loops and sessions. Owned by whoever drives the run.

        start()         item 0 (t=0)   item 1 (t=0)                 concurrency 2
        ended(0, 50)                              item 2 (t=50)

    Every item arrives exactly once, provided that every item that arrived is reported as ended.
    """

    __slots__ = ("_followers", "_next", "_starters", "workload")

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._starters = [i for i, item in enumerate(workload.items) if item.after is None]
        self._next = 0
        self._followers: dict[int, list[int]] = {}
        for i, item in enumerate(workload.items):
            if item.after is not None:
                self._followers.setdefault(item.after, []).append(i)

    def start(self) -> list[tuple[int, int]]:
        """``(arrival_ns, index)`` of all items known at the start."""
        limit = self.workload.concurrency
        self._next = len(self._starters) if limit is None else min(limit, len(self._starters))
        return [(self.workload.items[i].arrival_ns, i) for i in self._starters[: self._next]]

    def ended(self, index: int, end_ns: int) -> list[tuple[int, int]]:
        """``(arrival_ns, index)`` of the items that the end of item ``index`` brings.

        A session's slot in a closed loop passes on when its last turn ends.
        """
        items = self.workload.items
        followers = self._followers.get(index, [])
        found = [(end_ns + items[i].delay_ns, i) for i in followers]
        if not followers and self.workload.concurrency is not None and self._next < len(self._starters):
            i = self._starters[self._next]
            self._next += 1
            found.append((max(end_ns + self.workload.think_ns, items[i].arrival_ns), i))
        return found
