"""What a policy may answer: policies are other people's code."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hybridattn.core.errors import InputError
from hybridattn.core.params import as_integer
from hybridattn.core.stages import TIERS
from hybridattn.policies.base import Policy


def refused(policy: Policy, hook: str, expected: str, answer: Any) -> InputError:
    """The sentence about an answer that nobody can act on."""
    return InputError(f"policy '{policy.name}': {hook}() must return {expected}, got {answer!r}")


def whole_numbers(policy: Policy, hook: str, expected: str, answer: Any) -> tuple[int, ...]:
    """A tuple or list of integers of at least 0.

    Raises
    ------
    InputError : it is not; the message names policy, hook and answer
    """
    numbers = [as_integer(n) for n in answer] if isinstance(answer, tuple | list) else [None]
    found = tuple([n for n in numbers if n is not None and n >= 0])
    if len(found) != len(numbers):
        raise refused(policy, hook, expected, answer)
    return found


def tiers_of(policy: Policy, answer: Any) -> Collection[str]:
    """What ``allowed`` said; InputError where it holds anything but tiers."""
    if not isinstance(answer, Collection) or any(tier not in TIERS for tier in answer):
        raise refused(policy, "allowed", f"tiers of {', '.join(TIERS)}", answer)
    return answer
