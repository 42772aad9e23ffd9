"""The bytes behind each token id, and their incremental decoding to text.

Two families of vocabularies exist among the supported models:

- byte-level BPE (Llama 3, Qwen, SmolLM): a piece spells bytes, one printable character each (Radford et al. 2019,
  GPT-2);
- SentencePiece with byte fallback (Llama 2, Mistral, Phi-3): a piece is text with U+2581 for a space; a byte that no
  piece covers is a token of its own, spelled ``<0xEA>``.

Decoding through bytes makes streaming exact: a character appears with the token that completes it, once, in constant
time per token.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from typing import Any, Protocol

import tokenizers

from hybridattn.core.errors import InputError

_LARGEST_ID = 2**32 - 1  # what the library takes
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceTable(Protocol):
    """What a token id stands for."""

    strips_first_space: bool  # the vocabulary marks the start of a text with a space that is not text

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...

    def spelling(self, token_id: int) -> str:
        """The token as it is written in a stop string, e.g. ``<|im_end|>``."""
        ...


class ByteDecoder:
    """Turns the bytes of successive tokens into text as soon as characters are complete."""

    __slots__ = ("_at_start", "_decoder", "_pieces")

    def __init__(self, pieces: PieceTable, continues: bool) -> None:
        """``continues``: the tokens go on a text, so that a space at their start is text in every vocabulary."""
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = pieces.strips_first_space and not continues

    def push(self, token_id: int) -> str:
        """The characters that this token completes; ill-formed bytes before them become U+FFFD."""
        data = self._pieces.token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """U+FFFD if the last character is incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)


class _Pieces:
    """Spelling and kind of each id, from the tokenizers library.

    An id that the vocabulary does not have has no spelling and no bytes: models have more ids than their tokenizers
    where the vocabulary is padded, and may draw one.
    """

    strips_first_space = False

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._special = {i for i, token in added.items() if token.special}

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def spelling(self, token_id: int) -> str:
        piece = self._added.get(token_id)
        if piece is None and token_id < 0:
            raise InputError(f"token id {token_id} is not in the vocabulary")
        if piece is None and token_id <= _LARGEST_ID:
            piece = self._backend.id_to_token(token_id)
        return piece or ""


class ByteLevelPieces(_Pieces):
    """Byte-level BPE. A piece with a character outside the byte alphabet is plain text (an added token)."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__(backend)
        self._byte_of = byte_alphabet()

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.spelling(token_id)
        try:
            return bytes([self._byte_of[c] for c in piece])
        except KeyError:
            return piece.encode("utf-8")


class SentencePieces(_Pieces):
    """SentencePiece with byte fallback. Only a whole piece ``<0xEA>`` is a byte; the same text typed by a user is not,
    because it reaches the vocabulary as several pieces."""

    def __init__(self, backend: tokenizers.Tokenizer, strips_first_space: bool) -> None:
        super().__init__(backend)
        self.strips_first_space = strips_first_space

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.spelling(token_id)
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode("utf-8")


def byte_alphabet() -> dict[str, int]:
    """The byte that each character of the byte-level alphabet stands for: the library gives the characters alone.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def piece_table(backend: tokenizers.Tokenizer, content: Mapping[str, Any], name: str) -> PieceTable:
    """The table for a tokenizer, chosen by the ``decoder`` that its tokenizer.json declares.

    InputError for a decoder of another family.
    """
    decoder = content.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return ByteLevelPieces(backend)
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strips = any(_strips_first_space(step) for step in steps)
        return SentencePieces(backend, strips)
    raise InputError(f"{name}: a tokenizer with decoder {sorted(map(str, kinds))} is not supported")


def _strips_first_space(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Strip":
        return step.get("content") == " " and step.get("start", 0) >= 1
    return step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"
