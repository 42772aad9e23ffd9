"""Agent sessions: generate, pause for a tool, resume with the context kept.

    turn 0                     turn 1                        turn 2
    |prompt|generate|--pause--|tool result|generate|--pause--|...      the context grows from turn to turn

During a pause the session's KV is idle: a policy may move it to the CPU tier and back (``WorkItem.history_tokens`` is
what has to be there again, or be computed again, when the turn resumes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridattn.core.errors import InputError
from hybridattn.workload.arrivals import Arrivals, ClosedLoop
from hybridattn.workload.item import WorkItem, Workload
from hybridattn.workload.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Turn:
    """New tokens in, tokens generated, and the pause before it [ns] (0 for the first)."""

    prompt_tokens: int
    output_tokens: int
    pause_ns: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of one conversation or agent."""

    session_id: str
    start_ns: int
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        if not self.turns:
            raise InputError(f"session {self.session_id} has no turns")
        if self.turns[0].pause_ns:
            raise InputError(f"session {self.session_id}: its first turn has a pause of {self.turns[0].pause_ns} ns")

    @property
    def context_tokens(self) -> int:
        """Tokens in the context at the end."""
        return sum(t.prompt_tokens + t.output_tokens for t in self.turns)


def sessions_workload(sessions: list[Conversation], name: str = "sessions", concurrency: int | None = None) -> Workload:
    """Sessions as items: each turn follows the end of the one before, after its pause."""
    items: list[WorkItem] = []
    for s in sorted(sessions, key=lambda s: s.start_ns):
        history, previous = 0, None
        for turn in s.turns:
            start_ns = s.start_ns if previous is None else 0
            items.append(
                WorkItem(
                    start_ns, turn.prompt_tokens, turn.output_tokens, s.session_id, history, previous, turn.pause_ns
                )
            )
            previous = len(items) - 1
            history += turn.prompt_tokens + turn.output_tokens
    return Workload(name, tuple(items), concurrency)


def agent_sessions(
    count: int,
    turns: int,
    arrivals: Arrivals,
    first_prompt: Lengths,
    tool_result: Lengths,
    outputs: Lengths,
    mean_pause_ns: int,
    seed: int = 0,
) -> Workload:
    """``count`` sessions of ``turns`` turns; pauses are exponential with the given mean."""
    if count < 1 or turns < 1:
        raise InputError(f"agent sessions need count and turns of at least 1, got {count} and {turns}")
    if mean_pause_ns < 0:
        raise InputError(f"mean_pause_ns must not be negative, got {mean_pause_ns}")
    rngs = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(5)]
    starts = arrivals.draw(rngs[0], count).tolist()
    first = first_prompt.draw(rngs[1], count).tolist()
    results = tool_result.draw(rngs[2], count * turns).reshape(count, turns).tolist()
    generated = outputs.draw(rngs[3], count * turns).reshape(count, turns).tolist()
    pauses = np.rint(rngs[4].exponential(mean_pause_ns, (count, turns))).astype(np.int64).tolist()
    sessions = [
        Conversation(
            f"session-{i}",
            starts[i],
            tuple(
                Turn(first[i] if k == 0 else results[i][k], generated[i][k], 0 if k == 0 else pauses[i][k])
                for k in range(turns)
            ),
        )
        for i in range(count)
    ]
    closed = arrivals if isinstance(arrivals, ClosedLoop) else None
    return sessions_workload(sessions, "agent sessions", closed.concurrency if closed else None)
