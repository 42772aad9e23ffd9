"""One call of ``generate`` or ``stream``: its requests, and the loop that serves them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridattn.core.errors import InputError
from hybridattn.core.params import SamplingParams
from hybridattn.core.records import RequestRecord
from hybridattn.core.request import Request
from hybridattn.engine.engine import Engine
from hybridattn.metrics.latency import e2el_ns, tpot_ns, ttft_ns


@dataclass(frozen=True, slots=True)
class Output:
    """What a prompt became. ``record`` holds times in nanoseconds, ``metrics`` what follows from them in seconds."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    tier: str
    record: RequestRecord = field(repr=False)

    @property
    def metrics(self) -> dict[str, int | float | None]:
        """Counts of tokens and preemptions; TTFT, TPOT (None below two tokens) and end-to-end latency in seconds."""
        r = self.record
        times = {"ttft_s": ttft_ns(r), "tpot_s": tpot_ns(r), "e2el_s": e2el_ns(r)}
        return {
            "prompt_tokens": r.prompt_tokens,
            "output_tokens": r.output_tokens,
            "preemptions": r.preemptions,
            **{name: None if ns is None else ns / 1e9 for name, ns in times.items()},
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a stream: what it adds to the text of prompt ``index``, and the reason if it was the last."""

    index: int
    text: str
    token_id: int
    finish_reason: str | None


class Call:
    """Requests that were added together. Several calls may share an engine: whoever steps it, each keeps its tokens."""

    def __init__(
        self,
        engine: Engine,
        new_text: Callable[[SamplingParams], Any] | None,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: Sequence[SamplingParams],
        session: str = "",
    ) -> None:
        self._engine = engine
        self._session = session
        self._new_text = new_text
        self._prompts = [text for text, _ in prompts]
        self._requests: list[Request] = []
        try:
            for (_, ids), chosen in zip(prompts, params, strict=True):
                self._requests.append(self._add(ids, chosen))
        except InputError:
            self._abort()  # all or nothing
            raise
        self._texts: list[list[str]] = [[] for _ in self._requests]

    def _add(self, ids: list[int], params: SamplingParams) -> Request:
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))  # drawn once: a preempted request must repeat itself
        request = self._engine.add(ids, params.max_tokens, params, session=self._session)
        request.events = []
        if self._new_text is not None:
            request.text = self._new_text(params)
        return request

    def pieces(self) -> Iterator[Piece]:
        """Each token as it comes; closing the iterator aborts what is unfinished."""
        try:
            left = len(self._requests)
            while left:
                waiting = [(i, event) for i, r in enumerate(self._requests) for event in r.events]
                for request in self._requests:
                    request.events.clear()
                if not waiting:
                    self._engine.step()
                for index, event in waiting:
                    self._texts[index].append(event.text)
                    left -= event.finish_reason is not None
                    yield Piece(index, event.text, event.token_id, event.finish_reason)
        finally:
            self._abort()

    def _abort(self) -> None:
        for request in self._requests:
            if request.finish_reason is None:
                self._engine.abort(request.request_id)

    def outputs(self) -> list[Output]:
        return [
            Output(
                request_id=r.request_id,
                prompt=self._prompts[i],
                prompt_token_ids=tuple(r.token_ids[: r.num_prompt]),
                text="".join(self._texts[i]),
                token_ids=tuple(r.token_ids[r.num_prompt :]),
                finish_reason=r.finish_reason or "error",
                tier=r.tier,
                record=r.record(),
            )
            for i, r in enumerate(self._requests)
        ]
