"""Text to token ids and back: a facade over the ``tokenizers`` library; chats go through transformers."""

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

__all__ = ["ChatText", "TextStream", "Tokenizer"]


class ChatText(str):
    """A conversation as text, with the ids that the model reads.

    In ``token_ids`` only the marks that the template wrote are control tokens; the same spelling inside a message is
    ordinary text. What is made of it by adding or cutting is a plain ``str``, in which no spelling is a control token.
    """

    token_ids: tuple[int, ...]

    def __new__(cls, text: str, token_ids: Sequence[int]) -> ChatText:
        made = super().__new__(cls, text)
        made.token_ids = tuple(token_ids)
        return made


class Tokenizer:
    """The tokenizer of a checkpoint folder.

    Attributes
    ----------
    bos_id, eos_id : the ids that tokenizer_config.json names, or None
    prefix_ids : what is put before every text: the BOS where one is due, else nothing
    model_vocab_size : ids that the model has, where it is known; a text that needs another one is refused
    """

    model_vocab_size: int | None = None

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{folder} has no tokenizer.json")
        self._backend = _backend(path)
        self._backend.encode_special_tokens = True  # what a user writes is text, whatever it spells
        settings_path = folder / "tokenizer_config.json"
        self._settings = read_json(settings_path) if settings_path.exists() else {}
        self._folder = folder
        self.piece_table: PieceTable = piece_table(self._backend, read_json(path), str(path))
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

    def encode(self, text: str, control_tokens: bool = False) -> list[int]:
        """Token ids of ``text``, with one BOS in front where the model wants one.

        Parameters
        ----------
        text : what a user wrote, in which ``<|endoftext|>`` is thirteen characters like any others; or what
            ``apply_chat_template`` returned, whose marks are control tokens
        control_tokens : control tokens that ``text`` spells out become their ids, a BOS at its start is the one that is
            due; only for text that no user has written

        Raises
        ------
        InputError : ``text`` is no string, holds half of a character, or needs a token that the model does not have
        """
        if not isinstance(text, str):
            raise InputError(f"text must be a string, got {type(text).__name__}")
        _refuse_half_characters(text, "text")
        if isinstance(text, ChatText):
            return self._within_model(self._after_prefix(list(text.token_ids)))
        if control_tokens:
            return self._within_model(self._after_prefix(self._spelled.encode(text, add_special_tokens=False).ids))
        return self._within_model([*self.prefix_ids, *self._backend.encode(text, add_special_tokens=False).ids])

    def _within_model(self, ids: list[int]) -> list[int]:
        """``ids``; InputError for one that the tokenizer knows and the model does not."""
        size = self.model_vocab_size
        if size is not None and ids and max(ids) >= size:
            token = max(ids)
            raise InputError(
                f"the text needs the token {token} ({self.piece_table.spelling(token)!r}) of the tokenizer, but the "
                f"model has the tokens 0..{size - 1}"
            )
        return ids

    def _after_prefix(self, ids: list[int]) -> list[int]:
        """``ids`` behind what comes before every text, unless they begin with it."""
        if self.prefix_ids and tuple(ids[: len(self.prefix_ids)]) == self.prefix_ids:
            return ids
        return [*self.prefix_ids, *ids]

    @cached_property
    def _spelled(self) -> tokenizers.Tokenizer:
        """The tokenizer that takes spelled control tokens for themselves."""
        return _backend(self._folder / "tokenizer.json")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``. Bytes that are no UTF-8 become U+FFFD, one per maximal ill-formed part.

        An id that the vocabulary does not have is no text: models pad their vocabularies. InputError for one below 0.
        """
        decoder = ByteDecoder(self.piece_table, continues=False)
        parts = [
            decoder.push(token)
            for token in token_ids
            if not (skip_special_tokens and self.piece_table.is_special(token))
        ]
        return "".join(parts) + decoder.finish()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> ChatText:
        """A conversation as the model was trained on it; give it to ``encode`` or to ``LLM.generate``.

        transformers renders it, with everything that templates of that library may use. Control tokens that a message,
        a tool, a document or a variable spells out stay text. Marks that are no control tokens of the vocabulary (such
        as ``[INST]`` in some) cannot be told from what a user writes.

        Parameters
        ----------
        messages : mappings with ``role`` and ``content``
        add_generation_prompt : append what makes the model answer
        tools : functions with annotations and a docstring, or their JSON schemas
        documents : mappings with ``title`` and ``text``
        chat_template : Jinja source, or the name of one of the model's templates; default: the model's own
        continue_final_message : leave the last message open instead, for the model to go on with it
        variables : anything else that the template reads, such as ``enable_thinking``

        Raises
        ------
        InputError : the model has no chat template, or the template refuses the messages
        """
        _refuse_half_characters([messages, tools, documents, variables], "messages")
        if chat_template is None and not self.has_chat_template:
            raise InputError(f"model in {self._folder} has no chat template; give plain text")
        told = {"tools": tools and list(tools), "documents": documents and list(documents), **variables}
        told |= {"chat_template": chat_template, "continue_final_message": continue_final_message}
        told["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        try:
            conversation = list(messages)  # once: they may come from a generator
            text = self._chat.apply_chat_template(conversation, tokenize=False, **told)
            ids = self._chat.apply_chat_template(conversation, return_dict=False, sanitize_control_tokens=True, **told)
        except InputError:
            raise
        except Exception as e:  # whatever the code inside a template raises, besides its own refusals
            raise InputError(f"messages do not fit the chat template: {e}") from e
        return ChatText(text, ids)

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder holds one, in any of the forms that transformers writes."""
        files = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
        return bool(self._settings.get("chat_template")) or any((self._folder / name).exists() for name in files)

    @cached_property
    def _chat(self) -> Any:
        """The same tokenizer in transformers, which most starts need not load (seconds)."""
        from transformers import PreTrainedTokenizerFast

        names = [key for key, value in self._settings.items() if isinstance(value, Mapping) and "content" in value]
        tokens = {key: self._settings[key]["content"] for key in names}  # transformers wants them as strings
        try:
            return PreTrainedTokenizerFast.from_pretrained(self._folder, local_files_only=True, **tokens)
        except Exception as e:
            raise InputError(f"transformers cannot read the tokenizer in {self._folder}: {e}") from e


def _backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises plain Exception
        raise InputError(f"{path} is not a readable tokenizer: {e}") from e
    backend.no_truncation()
    backend.no_padding()
    return backend


def _refuse_half_characters(value: Any, name: str) -> None:
    """InputError for a string, at any depth, that holds half of a surrogate pair: it is no text."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as e:
            raise InputError(f"{name} holds half of a surrogate pair at character {e.start}: {value[e.start]!r}") from e
    elif isinstance(value, Mapping):
        for entry in value.values():
            _refuse_half_characters(entry, name)
    elif isinstance(value, list | tuple):
        for entry in value:
            _refuse_half_characters(entry, name)


def _find(framed: Sequence[int], plain: Sequence[int]) -> int:
    """Where ``plain`` begins inside ``framed``."""
    for at in range(len(framed) - len(plain) + 1):
        if list(framed[at : at + len(plain)]) == list(plain):
            return at
    raise InputError(f"the tokenizer changes a text when it adds special tokens: {list(plain)} became {list(framed)}")
