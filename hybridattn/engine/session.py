"""A conversation whose context is kept between its turns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from hybridattn.core.errors import InputError
from hybridattn.core.params import SamplingParams
from hybridattn.engine.call import Call, Output

# name, context so far, prompt, params, who takes the outputs at the end
Begin = Callable[
    [str, list[int], str | Sequence[int], SamplingParams | None, Callable[[list[Output]], None]],
    Call,
]


class Session:
    """Turns of one conversation; made by :meth:`hybridattn.LLM.session`.

        generate | pause: K,V go down, others use the GPU tier | generate: K,V come up, only new tokens are computed

    Several sessions may share an LLM: whichever stream is read, all go on.

    Attributes
    ----------
    token_ids : context so far: prompts and answers of all turns that did not fail
    turns : the output of each turn that has ended
    """

    def __init__(self, name: str, begin: Begin, end: Callable[[str], None]) -> None:
        self.name = name
        self.token_ids: list[int] = []
        self.turns: list[Output] = []
        self._begin_turn, self._forget = begin, end
        self._turn: weakref.ref[Call] | None = None
        self._closed = False

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Output:
        """The next turn: ``prompt`` is what is new (a tool's result, a question), as text or token ids.

        A turn that fails by itself has the reason ``error``; the context is then what it was before.
        """
        with self.stream(prompt, params) as call:
            for _ in call:
                pass
        return self.turns[-1]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Call:
        """Like :meth:`generate`, token by token. A stream that is closed or dropped early, begun or not, leaves the
        context as it was before, and the session is free for its next turn."""
        if self._closed:
            raise InputError(f"session {self.name} is closed")
        turn = self._turn() if self._turn is not None else None
        if turn is not None and not turn.ended:
            raise InputError(f"session {self.name}: the turn before has not ended yet")
        call = self._begin_turn(self.name, self.token_ids, prompt, params, self._end_turn)
        self._turn = weakref.ref(call)
        return call

    def _end_turn(self, outputs: list[Output]) -> None:
        (output,) = outputs
        self.turns.append(output)
        if not self._closed and output.finish_reason in ("stop", "length"):
            self.token_ids = [*output.prompt_token_ids, *output.token_ids]

    def close(self) -> None:
        """Forget the context, that of an unfinished turn at its end; idempotent."""
        self._closed = True
        self._forget(self.name)
        self.token_ids = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
