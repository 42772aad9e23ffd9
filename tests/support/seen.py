"""A cohort as a policy sees it, made by hand."""

from __future__ import annotations

from typing import NamedTuple


class Seen(NamedTuple):
    """Any ``hybridattn.policies.base.CohortView``."""

    number: int
    size: int
    layer: int
    ready: bool
    same_pass: bool = False
    keys: int = 0
    return_ns: int = 0
