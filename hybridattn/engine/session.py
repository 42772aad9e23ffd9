"""A conversation whose context is kept between its turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hybridattn.core.errors import InputError
from hybridattn.core.params import SamplingParams
from hybridattn.engine.call import Call, Output, Piece

Begin = Callable[[str, list[int], str | Sequence[int], SamplingParams | None], Call]


class Session:
    """Turns of one conversation; made by :meth:`hybridattn.LLM.session`.

        generate | pause: K,V go down, others use the GPU tier | generate: K,V come up, only new tokens are computed

    Several sessions may share an LLM: whichever stream is read, all go on.

    Attributes
    ----------
    token_ids : context so far: prompts and answers of all turns
    turns : the output of each turn that has ended
    """

    def __init__(self, name: str, begin: Begin, end: Callable[[str], None]) -> None:
        self.name = name
        self.token_ids: list[int] = []
        self.turns: list[Output] = []
        self._begin, self._end = begin, end
        self._busy = self._closed = False

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Output:
        """The next turn: ``prompt`` is what is new (a tool's result, a question), as text or token ids."""
        for _ in self.stream(prompt, params):
            pass
        return self.turns[-1]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[Piece]:
        """Like :meth:`generate`, token by token. A stream that is closed early leaves the context as it was before."""
        if self._closed:
            raise InputError(f"session {self.name} is closed")
        if self._busy:
            raise InputError(f"session {self.name}: the turn before has not ended yet")
        call = self._begin(self.name, self.token_ids, prompt, params)
        self._busy = True
        return self._pieces(call)

    def _pieces(self, call: Call) -> Iterator[Piece]:
        try:
            yield from call.pieces()
            (output,) = call.outputs()
            self.turns.append(output)
            self.token_ids = [*output.prompt_token_ids, *output.token_ids]
        finally:
            self._busy = False
            if self._closed:  # meanwhile
                self.close()

    def close(self) -> None:
        """Forget the context, that of an unfinished turn at its end; idempotent."""
        self._closed = True
        self._end(self.name)
        self.token_ids = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
