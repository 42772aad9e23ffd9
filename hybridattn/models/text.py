"""Text to token ids and back: a facade over the ``tokenizers`` library, without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from hybridattn.core.errors import InputError
from hybridattn.models.config import read_json
from hybridattn.models.pieces import ByteDecoder, PieceTable, piece_table
from hybridattn.models.stream import TextStream

__all__ = ["TextStream", "Tokenizer"]


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    Attributes
    ----------
    bos_id, eos_id : the ids that tokenizer_config.json names, or None
    prefix_ids : what is put before every text: the BOS where one is due, else nothing
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{folder} has no tokenizer.json")
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises plain Exception
            raise InputError(f"{path} is not a readable tokenizer: {e}") from e
        self._backend.no_truncation()
        self._backend.no_padding()
        settings_path = folder / "tokenizer_config.json"
        self._settings = read_json(settings_path) if settings_path.exists() else {}
        self._folder = folder
        self.pieces: PieceTable = piece_table(self._backend, read_json(path), str(path))
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        self.prefix_ids = self._prefix()

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def _named_id(self, key: str) -> int | None:
        """The id of a token that the settings name, as a string or as ``{"content": ...}``."""
        token = self._settings.get(key)
        content = token.get("content") if isinstance(token, Mapping) else token
        if content is None:
            return None
        return self._backend.token_to_id(content)

    def _prefix(self) -> tuple[int, ...]:
        """The setting ``add_bos_token`` decides where it is given, else the post-processor of tokenizer.json."""
        add_bos = self._settings.get("add_bos_token")
        if add_bos is not None:
            return (self.bos_id,) if add_bos and self.bos_id is not None else ()
        probe = "a"
        plain = self._backend.encode(probe, add_special_tokens=False).ids
        framed = self._backend.encode(probe, add_special_tokens=True).ids
        return tuple(framed[: _find(framed, plain)])

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``. One BOS where the model wants one, also if the text (a chat template) begins with it.

        Control tokens that are spelled out in the text become their ids.
        """
        if not isinstance(text, str):
            raise InputError(f"text must be a string, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"text holds half of a surrogate pair at character {e.start}: {text[e.start]!r}") from e
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if self.prefix_ids and tuple(ids[: len(self.prefix_ids)]) == self.prefix_ids:
            return ids
        return [*self.prefix_ids, *ids]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``. Bytes that are no UTF-8 become U+FFFD, one per maximal ill-formed part.

        InputError for an id that the vocabulary does not have.
        """
        decoder = ByteDecoder(self.pieces, continues=False)
        parts = [
            decoder.push(token) for token in token_ids if not (skip_special_tokens and self.pieces.is_special(token))
        ]
        return "".join(parts) + decoder.finish()

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template, or None."""
        path = self._folder / "chat_template.jinja"
        if path.exists():
            return path.read_text(encoding="utf-8")
        template = self._settings.get("chat_template")
        return template if isinstance(template, str) else None

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation as the model was trained on it; encode it with ``encode``.

        Parameters
        ----------
        messages : mappings with ``role`` and ``content``
        add_generation_prompt : append what makes the model answer

        Raises
        ------
        InputError : the model has no chat template, or the template refuses the messages
        """
        from jinja2 import TemplateError  # here, because most starts need no template engine
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self.chat_template is None:
            raise InputError(f"model in {self._folder} has no chat template; give plain text")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        special = {key: self._special_text(key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **special)
        except TemplateError as e:
            raise InputError(f"messages do not fit the chat template: {e}") from e

    def _special_text(self, key: str) -> str:
        token = self._settings.get(key)
        return str(token.get("content") if isinstance(token, Mapping) else token or "")


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _find(framed: Sequence[int], plain: Sequence[int]) -> int:
    """Where ``plain`` begins inside ``framed``."""
    for at in range(len(framed) - len(plain) + 1):
        if list(framed[at : at + len(plain)]) == list(plain):
            return at
    raise InputError(f"the tokenizer changes a text when it adds special tokens: {list(plain)} became {list(framed)}")
