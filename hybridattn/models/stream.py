"""Text as it is generated: whole characters only, and nothing that may still turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from hybridattn.models.pieces import ByteDecoder, PieceTable


class TextStream:
    """Incremental text of one request.

    What ``push`` and ``finish`` return, joined, is the text of all tokens up to the stop string, which is not part of
    it. The tokens continue a prompt, so a space at their start is kept. Cutting the same text into other tokens gives
    the same result: the stop string that is complete first wins, of two that end together the longer one.

    Control tokens take part in stop strings by their spelling (``<|im_end|>``) even when they are left out of the text.
    Time per token depends on the length of the stop strings, not on the text so far.

    Parameters
    ----------
    pieces : the vocabulary, ``Tokenizer.piece_table``
    stop : stop strings, none of them empty
    skip_special_tokens : leave control tokens out of the text
    """

    def __init__(self, pieces: PieceTable, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        self._pieces = pieces
        self._decoder = ByteDecoder(pieces, continues=True)
        self._stop = tuple(stop)
        self._skip = skip_special_tokens
        self._held: list[tuple[str, bool]] = []  # text that may begin a stop string, and whether it is visible
        self._finished = False
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """A stop string has appeared; nothing more comes out."""
        return self.stop_string is not None

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that is now certain; often empty.

        An id that the vocabulary does not have is no text. InputError for one below 0.
        """
        if self._finished or self.stopped:
            return ""
        if self._skip and self._pieces.is_special(token_id):
            self._held.append((self._pieces.spelling(token_id), False))
        else:
            self._held.append((self._decoder.push(token_id), True))
        return self._release()

    def finish(self) -> str:
        """Ends the text and returns what was held back; an incomplete character becomes U+FFFD."""
        if self._finished or self.stopped:
            return ""
        self._finished = True
        self._held.append((self._decoder.finish(), True))
        out = self._release()
        return out if self.stopped else out + self._take(sum(len(text) for text, _ in self._held))

    def _release(self) -> str:
        full = "".join(text for text, _ in self._held)
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := full.find(stop)) >= 0]
        if not found:
            return self._take(len(full) - self._possible_prefix(full))
        _, at, self.stop_string = min(found)
        out = self._take(at)
        self._held.clear()
        return out

    def _possible_prefix(self, full: str) -> int:
        """Length of the longest end of ``full`` that begins a stop string."""
        longest = min(len(full), max(map(len, self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            tail = full[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _take(self, length: int) -> str:
        """Removes the first ``length`` held characters and returns the visible ones."""
        out: list[str] = []
        rest: list[tuple[str, bool]] = []
        for text, visible in self._held:
            cut = min(length, len(text))
            length -= cut
            if visible:
                out.append(text[:cut])
            if cut < len(text):
                rest.append((text[cut:], visible))
        self._held = rest
        return "".join(out)
