"""`plan_decode`: check everything once, divide the work, and give back a plan that runs on every layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_kernels import backends
from cpu_kernels.arrays import floats, integers
from cpu_kernels.pages import KVPages

DEFAULT_SPLIT_TOKENS = 2048

MAX_GROUP = 128  # a kernel is unrolled over its group: larger ones would take minutes to compile


@dataclass(frozen=True, slots=True, eq=False)
class DecodeInputs:
    """What a decode plan was asked for, checked and copied; the same for every back end.

    Attributes
    ----------
    pages : KVPages
        The pool (not copied).
    block_table : ndarray int32 ``[n, max_pages]``
        Entries past a sequence's last page may hold anything.
    seq_lens : ndarray int32 ``[n]``
        Keys of each row, an appended one included; 0 is an empty row.
    slots : ndarray int64 ``[n]``
        Where the newest token of each row lies; -1 for rows that append nothing.
    num_q_heads, group : int
        Query heads, and query heads per KV head.
    sm_scale, logits_soft_cap : float
        Scale of the scores; cap of the scaled scores (0: off).
    window_left : int
        Keys before the newest that are attended to; -1 for all.
    alibi_slopes, sinks : ndarray float32 ``[num_q_heads]`` or None
    split_tokens : int
        Tokens of one split, a multiple of the page size.
    """

    pages: KVPages
    block_table: np.ndarray
    seq_lens: np.ndarray
    slots: np.ndarray
    num_q_heads: int
    group: int
    sm_scale: float
    window_left: int
    logits_soft_cap: float
    alibi_slopes: np.ndarray | None
    sinks: np.ndarray | None
    split_tokens: int

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    def first_keys(self) -> np.ndarray:
        """Return the first position each row attends to, int64 ``[n]``."""
        lens = self.seq_lens.astype(np.int64)
        if self.window_left < 0:
            return np.zeros_like(lens)
        return np.maximum(lens - 1 - self.window_left, 0)


class DecodePlan:
    """A checked decode step over one block table; serves every layer of its pages and any number of threads.

    Made by `plan_decode`. `run` computes in the calling thread without the GIL; `WorkerPool.submit` computes on the
    pool. Both are re-entrant: each call in flight has its own workspace.
    """

    def __init__(self, inputs: DecodeInputs, backend: str, isa: str | None) -> None:
        self.inputs, self.backend = inputs, backend
        self._impl = backends.make(backend, inputs, isa)

    @property
    def pages(self) -> KVPages:
        return self.inputs.pages

    @property
    def isa(self) -> str | None:
        """ISA level of the native kernel, None on other back ends."""
        return getattr(self._impl, "level", None)

    @property
    def native(self) -> Any:
        """The native implementation (for the pool)."""
        if self.backend != "native":
            raise ValueError(
                f"a WorkerPool runs native plans only; this plan has backend {self.backend!r}: use plan.run"
            )
        return self._impl

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V (and scales) that one run has to read, per layer, counted by tokens."""
        inputs, layout = self.inputs, self.pages.layout
        tokens = int((inputs.seq_lens.astype(np.int64) - inputs.first_keys()).sum())
        return tokens * self.pages.num_kv_heads * (layout.head_bytes // layout.page_size)

    def workspace(self) -> Any:
        """Make a workspace for `run`; a caller that runs often keeps one per thread."""
        return self._impl.workspace()

    def run(
        self,
        q: Any,
        out: Any,
        lse: Any = None,
        *,
        layer: int = 0,
        k_new: Any = None,
        v_new: Any = None,
        workspace: Any = None,
    ) -> None:
        """Attend with one query per row, in the calling thread.

        Parameters
        ----------
        q : array ``[n, num_q_heads, head_dim]``
            fp32, bf16 or fp16 (NumPy or torch; NumPy uint16 is bf16).
        out : array ``[n, num_q_heads, head_dim]``
            Written; fp32, bf16 or fp16. Any strides with a contiguous last axis.
        lse : float32 ``[n, num_q_heads]``, optional
            Written: natural log of the sum of exponentials (sinks included); -inf for a row without keys.
        layer : int
            Layer of the pages.
        k_new, v_new : array ``[n, num_kv_heads, head_dim]``, optional
            The newest token of each row: appended to its page first, then attended to.
        workspace : optional
            From `workspace()`; by default one is kept by the plan.

        Raises
        ------
        ValueError, TypeError
            For a wrong shape, dtype, stride or layer.
        """
        self._impl.run(q, out, lse, layer, k_new, v_new, workspace)


def plan_decode(
    pages: KVPages,
    block_table: Any,
    seq_lens: Any,
    num_q_heads: int,
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    slot_mapping: Any = None,
    isa: str | None = None,
    backend: str = "native",
    split_tokens: int | None = None,
) -> DecodePlan:
    """Check a decode step and divide its work. All refusals happen here.

    Parameters
    ----------
    pages : KVPages
        K and V.
    block_table : int ``[n, max_pages]``
        Page numbers of each row. Columns past the last used page are never read.
    seq_lens : int ``[n]``
        Keys of each row, including a token appended by the run. 0: the row is empty (out 0, lse -inf).
    num_q_heads : int
        A multiple of the pages' KV heads.
    sm_scale : float, optional
        Scale of the scores; default ``head_dim ** -0.5``.
    window_left : int
        Attend to the last ``window_left + 1`` positions; -1 for all.
    logits_soft_cap : float
        ``cap * tanh(score / cap)`` on the scaled scores, before the mask; 0 for none.
    alibi_slopes : float ``[num_q_heads]``, optional
        Adds ``slope * (key position - query position)`` to the (capped) scores.
    sinks : float ``[num_q_heads]``, optional
        A logit per head that takes part in the denominator alone (and in lse). An empty row stays empty.
    slot_mapping : int ``[n]``, optional
        Slot of the newest token, ``page * page_size + offset``, -1 to append nothing to a row. It must be where the
        block table puts position ``seq_len - 1`` (the default).
    isa : str, optional
        ISA level; default `cpu_kernels.isa.detect`.
    backend : str
        ``native``, ``torch`` or ``ipex``.
    split_tokens : int, optional
        A longer row is computed in fixed splits of this many tokens (default 2048) and merged in order, so that a
        row's result does not depend on the batch or on the number of threads.

    Returns
    -------
    DecodePlan

    Raises
    ------
    ValueError, TypeError
        Naming the argument, the sequence and the numbers.
    """
    lens = integers("seq_lens", seq_lens, np.int32, 1)
    table = integers("block_table", block_table, np.int32, 2)
    group = _check_heads(num_q_heads, pages.num_kv_heads)
    _check_table(pages, table, lens)
    scale = pages.head_dim**-0.5 if sm_scale is None else float(sm_scale)
    if not math.isfinite(scale):
        raise ValueError(f"sm_scale is {scale}, expected a finite number")
    if window_left < -1:
        raise ValueError(f"window_left is {window_left}, expected -1 (off) or a count of keys")
    if not (math.isfinite(logits_soft_cap) and logits_soft_cap >= 0):
        raise ValueError(f"logits_soft_cap is {logits_soft_cap}, expected 0 (off) or a positive number")
    split = DEFAULT_SPLIT_TOKENS if split_tokens is None else int(split_tokens)
    if split < pages.page_size or split % pages.page_size:
        raise ValueError(f"split_tokens is {split}, expected a multiple of the page size {pages.page_size}")
    inputs = DecodeInputs(
        pages, table, lens, _slots(pages, table, lens, slot_mapping), int(num_q_heads), group, scale, int(window_left),
        float(logits_soft_cap),
        None if alibi_slopes is None else floats("alibi_slopes", alibi_slopes, num_q_heads),
        None if sinks is None else floats("sinks", sinks, num_q_heads),
        split,
    )  # fmt: skip
    return DecodePlan(inputs, backend, isa)


def _check_heads(num_q_heads: int, num_kv_heads: int) -> int:
    if num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads {num_q_heads} is not a positive multiple of num_kv_heads {num_kv_heads}")
    group = num_q_heads // num_kv_heads
    if group > MAX_GROUP:
        raise ValueError(
            f"num_q_heads {num_q_heads} over num_kv_heads {num_kv_heads} is a group of {group}, at most {MAX_GROUP}"
        )
    return group


def _check_table(pages: KVPages, table: np.ndarray, lens: np.ndarray) -> None:
    if len(table) != len(lens):
        raise ValueError(f"block_table has {len(table)} rows, but seq_lens has {len(lens)}")
    if len(lens) and lens.min() < 0:
        seq = int(np.argmin(lens))
        raise ValueError(f"seq_lens[{seq}] is {lens[seq]}, expected 0 or more")
    size, width = pages.page_size, table.shape[1]
    need = -(-lens.astype(np.int64) // size)
    if len(lens) and need.max() > width:
        seq = int(np.argmax(need))
        raise ValueError(
            f"block_table is too short for sequence {seq}: its {lens[seq]} tokens need {need[seq]} pages of {size}, "
            f"the table has {width} columns ({width * size} tokens)"
        )
    used = np.arange(width) < need[:, None]
    bad = used & ((table < 0) | (table >= pages.num_pages))
    if bad.any():
        seq, column = (int(x) for x in np.argwhere(bad)[0])
        raise ValueError(
            f"block_table[{seq}, {column}] is page {table[seq, column]}, but the pool has pages 0 to "
            f"{pages.num_pages - 1} (sequence {seq} has {lens[seq]} tokens)"
        )


def _slots(pages: KVPages, table: np.ndarray, lens: np.ndarray, slot_mapping: Any) -> np.ndarray:
    """Return the slot of each row's newest token, checked against `slot_mapping` where that is given."""
    size = pages.page_size
    last = np.maximum(lens.astype(np.int64) - 1, 0)
    if table.shape[1] == 0:
        slots = np.full(len(lens), -1, np.int64)
    else:
        pages_of_last = table[np.arange(len(lens)), last // size].astype(np.int64)
        slots = np.where(lens > 0, pages_of_last * size + last % size, -1)
    if slot_mapping is None:
        return slots
    asked = integers("slot_mapping", slot_mapping, np.int64, 1)
    if len(asked) != len(lens):
        raise ValueError(f"slot_mapping has {len(asked)} entries, but there are {len(lens)} sequences")
    wrong = (asked != -1) & (asked != slots)
    if wrong.any():
        seq = int(np.argmax(wrong))
        raise ValueError(
            f"slot_mapping[{seq}] is {asked[seq]}, but position {lens[seq] - 1} of sequence {seq} lies in slot "
            f"{slots[seq]}"
        )
    return asked
