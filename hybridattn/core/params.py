"""How the tokens of a request are chosen and when it ends."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from hybridattn.core.errors import InputError

MAX_SEED = 2**64 - 1

# How each choice is switched off here: elsewhere None or -1 says so.
_OFF = {
    "top_k": "0 or -1 keeps all",
    "top_p": "1.0 keeps all",
    "min_p": "0.0 keeps all",
    "temperature": "0 takes the likeliest token",
    "repetition_penalty": "1.0 is off",
    "presence_penalty": "0.0 is off",
    "frequency_penalty": "0.0 is off",
    "min_tokens": "0 is off",
    "seed": "None lets the engine choose",
}


class NoEffectWarning(UserWarning):
    """An option was given that cannot act beside the others."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Choices of one request. The default is greedy decoding of 16 tokens.

    Parameters
    ----------
    max_tokens : most tokens to generate, at least 1
    temperature : 0 takes the likeliest token (lowest id among equals); above 0 divides the logits; ``inf`` is uniform
        over the tokens that the filters keep
    top_k : keep the k likeliest tokens; -1 or 0 keeps all
    top_p : keep the likeliest tokens whose probabilities add up to at least this, in [0, 1]; the token that crosses the
        sum is kept, so that at least one remains
    min_p : keep tokens at least this likely relative to the likeliest, in [0, 1]
    seed : of the request's draws, in [0, 2**64); None lets the engine choose one when the request is created
    stop : strings that end the request; they are not part of the text. One string may be given bare
    stop_token_ids : ids that end the request, also under ``ignore_eos``
    ignore_eos : go on after an end-of-sequence token
    min_tokens : end-of-sequence and stop ids cannot be drawn before this many tokens were
    repetition_penalty : divides positive and multiplies negative logits of tokens in prompt or output; above 0, 1 = off
    presence_penalty : subtracted from the logits of tokens that are in the output; in [-2, 2]
    frequency_penalty : subtracted once per occurrence in the output; in [-2, 2]
    skip_special_tokens : leave control tokens out of the text
    cache_salt : with an engine that shares prefixes, K,V are shared with requests of the same salt only

    Numbers may be of any kind that is exact (NumPy's, 0-d arrays) and ids may come as an array; they are kept as
    Python's own.

    Raises
    ------
    InputError : a value outside its range; the message names the argument and the value

    Warns
    -----
    NoEffectWarning : a filter (top_k, top_p, min_p) at temperature 0, which takes the likeliest token whatever it keeps
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    skip_special_tokens: bool = True
    cache_salt: str = ""

    def __post_init__(self) -> None:
        self._normalise()
        self._check_integer("max_tokens", 1)
        self._check_integer("min_tokens", 0)
        self._check_integer("top_k", -1)
        if self.seed is not None:
            self._check_integer("seed", 0, MAX_SEED)
        self._check_number("temperature", 0.0, math.inf)
        self._check_number("top_p", 0.0, 1.0)
        self._check_number("min_p", 0.0, 1.0)
        self._check_number("presence_penalty", -2.0, 2.0)
        self._check_number("frequency_penalty", -2.0, 2.0)
        self._check_number("repetition_penalty", 0.0, 1e6)
        if self.repetition_penalty == 0:
            raise InputError("repetition_penalty must be above 0, got 0; 1.0 is off")
        if self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        self._check_switch("ignore_eos")
        self._check_switch("skip_special_tokens")
        if not isinstance(self.cache_salt, str):
            raise InputError(f"cache_salt must be a text, got {self.cache_salt!r}")
        self._check_stops()
        self._say_what_cannot_act()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def ending_ids(self, eos_ids: Collection[int]) -> frozenset[int]:
        """Ids that end the request: the user's stop ids, and the model's end-of-sequence ids unless ignored."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))

    def _normalise(self) -> None:
        """Lists and arrays become tuples and a bare stop string a tuple of one, so that the object stays hashable."""
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Iterable) or getattr(value, "ndim", 1) != 1):
                raise InputError(f"{name} must be a list, got {value!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", () if stop is None else tuple(stop))
        object.__setattr__(self, "stop_token_ids", () if self.stop_token_ids is None else tuple(self.stop_token_ids))

    def _check_integer(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        number = as_integer(value)
        if number is None:
            raise InputError(f"{name} must be an integer, got {value!r}" + self._off(name, value))
        if number < low or (high is not None and number > high):
            bounds = f"at least {low}{f' and at most {high}' if high else ''}"
            raise InputError(f"{name} must be {bounds}, got {number}" + self._off(name, number))
        object.__setattr__(self, name, number)

    def _check_number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        number = as_number(value)
        if number is None:
            raise InputError(f"{name} must be a number, got {value!r}" + self._off(name, value))
        if not low <= number <= high:  # false for NaN as well
            raise InputError(f"{name} must be between {low:g} and {high:g}, got {value}" + self._off(name, number))
        object.__setattr__(self, name, number)

    def _check_switch(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool) and type(value).__name__ != "bool":  # NumPy's is no subclass
            raise InputError(f"{name} must be True or False, got {value!r}")
        object.__setattr__(self, name, bool(value))

    def _check_stops(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InputError(f"stop must hold non-empty strings, got {text!r}")
        ids = tuple(as_integer(token) for token in self.stop_token_ids)
        for given, token in zip(self.stop_token_ids, ids, strict=True):
            if token is None or token < 0:
                raise InputError(f"stop_token_ids must hold ids of at least 0, got {given!r}")
        object.__setattr__(self, "stop", tuple(map(str, self.stop)))
        object.__setattr__(self, "stop_token_ids", ids)

    @staticmethod
    def _off(name: str, value: Any) -> str:
        """Where other libraries say "off" with None or -1: what says so here."""
        return f"; {_OFF[name]}" if name in _OFF and (value is None or value == -1) else ""

    def _say_what_cannot_act(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("top_k", "top_p", "min_p") if self.greedy else ():
            value = getattr(self, name)
            if value != defaults[name] and (name, value) != ("top_k", 0):
                warnings.warn(
                    f"{name} {value} has no effect at temperature 0, which takes the likeliest token",
                    NoEffectWarning,
                    stacklevel=4,
                )


def as_integer(value: Any) -> int | None:
    """A Python integer of any exact one (NumPy's, a 0-d array of integers); None for all else, truth values too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_number(value: Any) -> float | None:
    """A float of any real number (NumPy's, a 0-d array); None for all else, truth values too."""
    dtype = str(getattr(value, "dtype", type(value).__name__))
    single = isinstance(value, Real) or (hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0)
    if "bool" in dtype or not single:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
