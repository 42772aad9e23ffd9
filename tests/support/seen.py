"""A micro-batch as a policy sees it, made by hand."""

from __future__ import annotations

from typing import NamedTuple


class Seen(NamedTuple):
    """Any ``hybridattn.policies.base.MicroBatchView``."""

    number: int
    size: int
    layer: int
    ready: bool
    same_step: bool = False
    kv_tokens: int = 0
    return_ns: int = 0
