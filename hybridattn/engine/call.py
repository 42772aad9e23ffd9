"""One call of ``generate`` or ``stream``: its requests, their tokens as they come, and what they became."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridattn.core.params import SamplingParams
from hybridattn.core.records import RequestRecord
from hybridattn.core.request import Request
from hybridattn.engine.engine import Engine
from hybridattn.metrics.latency import e2el_ns, tpot_ns, ttft_ns

SHOWN = 60  # characters of an answer in its repr


@dataclass(frozen=True, slots=True, repr=False)
class Output:
    """What a prompt became.

    ``finish_reason`` is ``stop``, ``length``, ``abort``, or ``error``: then this request failed alone, and ``error``
    says in one sentence why; ``text`` and ``token_ids`` are what came before. ``record`` holds times in nanoseconds,
    ``metrics`` what follows from them in seconds.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    tier: str
    record: RequestRecord
    error: str | None = None

    def __repr__(self) -> str:
        """The beginning of the text and what became of the request; not the tokens of a long prompt."""
        text = self.text if len(self.text) <= SHOWN else self.text[:SHOWN] + "..."
        error = f", {self.error}" if self.error else ""
        end = f"{len(self.token_ids)} tokens, {self.finish_reason}, {self.tier} tier{error}"
        return f"<Output {self.request_id}: {text!r}, {end}>"

    @property
    def metrics(self) -> dict[str, int | float | None]:
        """Counts of tokens and preemptions; TTFT, TPOT (None below two tokens) and end-to-end latency in seconds."""
        r = self.record
        times = {"ttft_s": ttft_ns(r), "tpot_s": tpot_ns(r), "e2el_s": e2el_ns(r)}
        return {
            "prompt_tokens": r.prompt_tokens,
            "output_tokens": r.output_tokens,
            "preemptions": r.preemptions,
            "recomputed_tokens": r.recomputed_tokens,
            "reused_tokens": r.reused_tokens,
            **{name: None if ns is None else ns / 1e9 for name, ns in times.items()},
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a stream: what it adds to the text of prompt ``index``, and the reason if it was the last.

    A prompt that fails has a last piece without a token (``token_id`` None, reason ``error``), or with one that has no
    text; ``error`` says why.
    """

    index: int
    text: str
    token_id: int | None
    finish_reason: str | None
    error: str | None = None


class Call:
    """Requests that were added together; an iterator over their tokens, each as it comes.

    It ends with its last piece, with :meth:`close`, or when nobody holds it any more, begun or not: what is unfinished
    then is aborted. Several calls may share an engine: whoever steps it, each keeps its tokens.

    Parameters
    ----------
    on_end : called once with the outputs when the last piece is handed out; never for a call that was closed before
    """

    def __init__(
        self,
        engine: Engine,
        new_text: Callable[[SamplingParams], Any] | None,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: Sequence[SamplingParams],
        session: str = "",
        on_end: Callable[[list[Output]], None] = lambda outputs: None,
    ) -> None:
        self._engine = engine
        self._session = session
        self._new_text = new_text
        self._on_end = on_end
        self._prompts = [text for text, _ in prompts]
        self._requests: list[Request] = []
        self._texts: list[list[str]] = [[] for _ in prompts]
        self._pieces: deque[Piece] = deque()
        self.ended = False
        with engine.at_work:  # an interrupt comes when this call knows its requests
            try:
                for (_, ids), chosen in zip(prompts, params, strict=True):
                    self._requests.append(self._add(ids, chosen))
            except BaseException:
                self._abort()  # all or nothing
                raise
            self._let_go = engine.hold(self, [r.request_id for r in self._requests])

    def _add(self, ids: list[int], params: SamplingParams) -> Request:
        if params.seed is None and not params.greedy:
            params = replace(params, seed=secrets.randbits(63))  # drawn once: a preempted request must repeat itself
        request = self._engine.add(ids, params.max_tokens, params, session=self._session)
        request.events = []
        if self._new_text is not None:
            request.text = self._new_text(params)
        return request

    # -- tokens ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        """The next token; steps the engine until there is one."""
        while not self._pieces and not self.ended:
            finished = self._collect()
            if not self._pieces:
                if finished:
                    self._end()
                else:
                    self._step()
        if not self._pieces:
            raise StopIteration
        piece = self._pieces.popleft()
        if not self._pieces and not self.ended and self._collect() and not self._pieces:
            self._end()
        return piece

    @property
    def num_prompts(self) -> int:
        """How many prompts it answers."""
        return len(self._prompts)

    def pieces(self) -> Call:
        """The iterator over the tokens, which is the call itself."""
        return self

    def _step(self) -> None:
        try:
            self._engine.step()
        except BaseException:
            self.close()
            raise

    def _collect(self) -> bool:
        """Takes over what came since; whether nothing more will come. Another thread may be in a step: waits for it."""
        with self._engine.at_work.turn:
            for index, request in enumerate(self._requests):
                for event in request.events:
                    self._texts[index].append(event.text)
                    self._pieces.append(Piece(index, event.text, event.token_id, event.finish_reason, event.error))
                request.events.clear()
            return all(r.finish_reason is not None for r in self._requests)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.ended = True
        self._let_go()
        self._on_end(self.outputs())

    def close(self) -> None:
        """Abort what is unfinished; there are no more pieces. Idempotent, also before the first piece."""
        if not self.ended:
            self.ended = True
            self._let_go()
            self._abort()
            self._collect()
            self._pieces.clear()

    def _abort(self) -> None:
        self._engine.abort(*(r.request_id for r in self._requests if r.finish_reason is None))

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def outputs(self) -> list[Output]:
        """What the prompts became, in their order; after an early end with the reason ``abort`` where it was cut."""
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
                error=r.error,
            )
            for i, r in enumerate(self._requests)
        ]
