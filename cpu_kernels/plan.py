"""`plan_decode`: check everything once, divide the work, and give back a plan that runs on every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_kernels import backends
from cpu_kernels.arrays import View, floats, integers, number, whole
from cpu_kernels.handed import Handed, take
from cpu_kernels.pages import KVPages, shared_slot
from cpu_kernels.reach import Reach, flags, reach_of

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
        Entries of pages that hold no allowed key may be anything.
    seq_lens : ndarray int32 ``[n]``
        Keys of each row, an appended one included; 0 is an empty row.
    reach : Reach
        Which of its keys each row attends to.
    slots : ndarray int64 ``[n]``
        Where the newest token of each row lies; -1 for rows that append nothing.
    num_q_heads, group : int
        Query heads, and query heads per KV head.
    sm_scale, logits_soft_cap : float
        Scale of the scores; cap of the scaled scores (0: off).
    alibi_slopes : ndarray float32 ``[num_q_heads]`` or ``[n, num_q_heads]``, or None
    sinks : ndarray float32, like `alibi_slopes`; -inf where a head or row has none
    split_tokens : int
        Tokens of one split, a multiple of the page size.
    read_once : bool
        Pages that several rows begin with are read once for all of them.
    shared_slot : str
        Why nothing can be appended: two rows have one slot. Empty where they do not.
    """

    pages: KVPages
    block_table: np.ndarray
    seq_lens: np.ndarray
    reach: Reach
    slots: np.ndarray
    num_q_heads: int
    group: int
    sm_scale: float
    logits_soft_cap: float
    alibi_slopes: np.ndarray | None
    sinks: np.ndarray | None
    split_tokens: int
    shared_slot: str = ""
    read_once: bool = False

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def windowed(self) -> bool:
        """Whether some row attends to fewer than all of its keys."""
        return bool((self.reach.last - self.reach.first < self.seq_lens).any())


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
    def on_pool(self) -> bool:
        """Whether a `WorkerPool` takes this plan: native ones and kernels in numba."""
        return hasattr(self._impl, "fill")

    @property
    def native(self) -> Any:
        """The native implementation (for the pool)."""
        if not self.on_pool:
            raise ValueError(
                "a WorkerPool runs native plans and kernels in numba only; this plan has backend "
                f"{self.backend!r}: use plan.run"
            )
        return self._impl

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V (and scales) that one run has to read, per layer, counted by tokens."""
        reach, layout = self.inputs.reach, self.pages.layout
        tokens = int((reach.last - reach.first).sum())
        return tokens * self.pages.num_kv_heads * (layout.head_bytes // layout.page_size)

    def workspace(self) -> Any:
        """Make a workspace for `run`; a caller that runs often keeps one per thread."""
        return self._impl.workspace()

    def hand(self, q: Any, out: Any, lse: Any = None, *, k_new: Any = None, v_new: Any = None) -> Handed:
        """Check arrays once for many jobs: a pool takes the result in place of ``q``, with no other array. They must
        stay where they are."""
        return take(self.inputs, q, out, lse, k_new, v_new)

    def run(
        self,
        q: Any,
        out: Any = None,
        lse: Any = None,
        *,
        layer: int = 0,
        k_new: Any = None,
        v_new: Any = None,
        workspace: Any = None,
    ) -> tuple[Any, Any]:
        """Attend with one query per row, in the calling thread.

        Parameters
        ----------
        q : array ``[n, num_q_heads, head_dim]``
            fp32, bf16 or fp16 (NumPy or torch; NumPy uint16 is bf16).
        out : array ``[n, num_q_heads, head_dim]``
            Written; fp32, bf16 or fp16. Any strides with a contiguous last axis. Without it, both results are made.
        lse : float32 ``[n, num_q_heads]``, optional
            Written: natural log of the sum of exponentials (sinks included); -inf for a row without keys.
        layer : int
            Layer of the pages.
        k_new, v_new : array ``[n, num_kv_heads, head_dim]``, optional
            The newest token of each row: appended to its page first, then attended to.
        workspace : optional
            From `workspace()`; by default one is kept by the plan.

        Returns
        -------
        out, lse
            As given (`lse` may be None then), or made.

        Raises
        ------
        ValueError, TypeError
            For a wrong shape, dtype, stride or layer.
        """
        if out is None:
            out, lse = results_like(q, out, lse)
        self._impl.run(q, out, lse, layer, k_new, v_new, workspace)
        return out, lse


def results_like(q: Any, out: Any, lse: Any) -> tuple[Any, Any]:
    """Results of a run, made where they are absent: `out` as `q`, `lse` float32 of its rows and heads."""
    if isinstance(q, np.ndarray):
        return (
            np.empty(q.shape, q.dtype) if out is None else out,
            np.empty(q.shape[:2], np.float32) if lse is None else lse,
        )
    shape = View("q", q).shape
    made = q.detach().new_empty(shape) if out is None else out
    return made, q.detach().float().new_empty(shape[:2]) if lse is None else lse


def paged_decode_attention(
    q: Any,
    pages: KVPages,
    block_table: Any,
    seq_lens: Any,
    *,
    layer: int = 0,
    out: Any = None,
    lse: Any = None,
    k_new: Any = None,
    v_new: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """`plan_decode` and `DecodePlan.run` in one call, for a caller with one layer. Returns ``out, lse``.

    `options` are those of `plan_decode`.
    """
    view = View("q", q)
    if len(view.shape) != 3:
        raise ValueError(f"q has shape {list(view.shape)}, expected [n, num_q_heads, head_dim]")
    plan = plan_decode(pages, block_table, seq_lens, view.shape[1], **options)
    return plan.run(q, *results_like(q, out, lse), layer=layer, k_new=k_new, v_new=v_new)


def plan_decode(
    pages: KVPages,
    block_table: Any,
    seq_lens: Any,
    num_q_heads: int,
    *,
    sm_scale: float | None = None,
    window_left: Any = -1,
    window_right: Any = -1,
    causal: Any = True,
    logits_soft_cap: float | None = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    with_sinks: Any = True,
    key_start: Any = None,
    query_pos: Any = None,
    slot_mapping: Any = None,
    block_size: int | None = None,
    isa: str | None = None,
    backend: str = "native",
    split_tokens: int | None = None,
    read_once: bool = False,
) -> DecodePlan:
    """Check a decode step and divide its work. All refusals happen here.

    Parameters
    ----------
    pages : KVPages
        K and V.
    block_table : int ``[n, max_blocks]``
        Page numbers of each row. Entries without an allowed key (past the last, before the window) are never read.
    seq_lens : int ``[n]``
        Keys of each row, including a token appended by the run. 0: the row is empty (out 0, lse -inf).
    num_q_heads : int
        A multiple of the pages' KV heads.
    sm_scale : float, optional
        Scale of the scores; default ``head_dim ** -0.5``.
    window_left, window_right : int, or int ``[n]``
        Keys before and after the query that are attended to, beside its own position; -1 or None for all.
    causal : bool, or bool ``[n]``
        No key after the query is attended to (as with ``window_right=0``).
    logits_soft_cap : float
        ``cap * tanh(score / cap)`` on the scaled scores, before the mask; 0 or None for none.
    alibi_slopes : float ``[num_q_heads]`` or ``[n, num_q_heads]``, optional
        Adds ``slope * (key position - query position)`` to the (capped) scores.
    sinks : float ``[num_q_heads]`` or ``[n, num_q_heads]``, optional
        A logit per head that takes part in the denominator alone (and in lse); -inf for none. An empty row stays empty.
    with_sinks : bool, or bool ``[n]``
        Rows that count their sinks: of a sequence in several parts, one.
    key_start : int ``[n]``, optional
        Position of each row's first key, 0 by default: a row may be a part of a sequence.
    query_pos : int ``[n]``, optional
        Position of each query; default ``key_start + seq_lens - 1``, its last key's.
    slot_mapping : int ``[n]``, optional
        Slot of the newest token, ``page * page_size + offset``, -1 to append nothing to a row. It must be where the
        block table puts the row's last key (the default).
    block_size : int, optional
        Tokens of a block of the table where that is several pages: a multiple of the page size.
    isa : str, optional
        ISA level; default `cpu_kernels.isa.detect`.
    backend : str
        A name of `cpu_kernels.backends`: ``native``, ``torch``, ``ipex``, ``numba``, ...
    split_tokens : int, optional
        A longer row is computed in fixed splits of this many tokens (default 2048) and merged in order, so that a
        row's result does not depend on the batch or on the number of threads.
    read_once : bool
        Rows that begin with the same pages have these read once for many of them (native back end; the others read
        them for each). A row's result may then depend on the batch in its last bits. Off by default.

    Returns
    -------
    DecodePlan

    Raises
    ------
    ValueError, TypeError
        Naming the argument, the sequence and the numbers.
    """
    lens = lengths("seq_lens", seq_lens)
    heads = whole("num_q_heads", num_q_heads)
    group = _check_heads(heads, pages.num_kv_heads)
    reach = reach_of(lens, key_start, query_pos, causal, window_left, window_right)
    table = integers("block_table", block_table, np.int32, 2)
    table = check_table(pages, table, lens, reach, block_size)
    scale = pages.head_dim**-0.5 if sm_scale is None else number("sm_scale", sm_scale)
    split = DEFAULT_SPLIT_TOKENS if split_tokens is None else whole("split_tokens", split_tokens)
    if split < pages.page_size or split % pages.page_size:
        raise ValueError(f"split_tokens is {split}, expected a multiple of the page size {pages.page_size}")
    slots = _slots(pages, table, lens, slot_mapping)
    shared = shared_slot(slots)
    if shared and slot_mapping is not None:
        raise ValueError(shared)
    slopes = None if alibi_slopes is None else floats("alibi_slopes", alibi_slopes, heads, len(lens))
    inputs = DecodeInputs(
        pages, table, lens, reach, slots, heads, group, scale, soft_cap(logits_soft_cap), slopes,
        sinks_of(sinks, with_sinks, heads, len(lens)), split, shared, read_once,
    )  # fmt: skip
    return DecodePlan(inputs, backend, isa)


def soft_cap(value: Any) -> float:
    """The cap of the scores; 0 is off."""
    cap = 0.0 if value is None else number("logits_soft_cap", value)
    if cap < 0:
        raise ValueError(f"logits_soft_cap is {cap}, expected 0 or None (off) or a positive number")
    return cap


def sinks_of(sinks: Any, with_sinks: Any, heads: int, rows: int) -> np.ndarray | None:
    """Sinks per head, or per row and head where some rows leave theirs out."""
    counted = flags("with_sinks", with_sinks, rows)
    if sinks is None:
        return None
    values = floats("sinks", sinks, heads, rows, absent=True)
    if counted.all():
        return values
    return np.where(counted[:, None], values, np.float32(-np.inf)).astype(np.float32, order="C")


def _check_heads(num_q_heads: int, num_kv_heads: int) -> int:
    if num_q_heads < 1 or num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads {num_q_heads} is not a positive multiple of num_kv_heads {num_kv_heads}")
    group = num_q_heads // num_kv_heads
    if group > MAX_GROUP:
        raise ValueError(
            f"num_q_heads {num_q_heads} over num_kv_heads {num_kv_heads} is a group of {group}, at most {MAX_GROUP}"
        )
    return group


def lengths(name: str, values: Any) -> np.ndarray:
    """Lengths of the sequences, int32, none below 0."""
    lens = integers(name, values, np.int32, 1)
    if len(lens) and lens.min() < 0:
        seq = int(np.argmin(lens))
        raise ValueError(f"{name}[{seq}] is {lens[seq]}, expected 0 or more")
    return lens


def check_table(
    pages: KVPages, table: np.ndarray, lens: np.ndarray, reach: Reach, block_size: int | None
) -> np.ndarray:
    """Refuse a table that does not name a page for every allowed key; return it in pages, int32."""
    if len(table) != len(lens):
        raise ValueError(f"block_table has {len(table)} rows, but seq_lens has {len(lens)}")
    size, width = pages.page_size if block_size is None else whole("block_size", block_size), table.shape[1]
    if size < pages.page_size or size % pages.page_size:
        raise ValueError(f"block_size is {size}, expected a multiple of the page size {pages.page_size}")
    ratio = size // pages.page_size
    need = -(-lens.astype(np.int64) // size)
    if len(lens) and need.max() > width:
        seq = int(np.argmax(need > width))
        what = "pages" if ratio == 1 else "blocks"
        raise ValueError(
            f"block_table is too short for sequence {seq}: its {lens[seq]} tokens need {need[seq]} {what} of {size}, "
            f"the table has {width} columns ({width * size} tokens)"
        )
    column, count = np.arange(width), pages.num_pages // ratio
    used = (column >= (reach.first // size)[:, None]) & (column < -(-reach.last // size)[:, None])
    bad = used & ((table < 0) | (table >= count))
    if bad.any():
        seq, at = (int(x) for x in np.argwhere(bad)[0])
        what = "page" if ratio == 1 else "block"
        raise ValueError(
            f"block_table[{seq}, {at}] is {what} {table[seq, at]}, but the pool has {what}s 0 to {count - 1} "
            f"(sequence {seq} has {lens[seq]} tokens)"
        )
    if ratio == 1:
        return table
    known = np.where((table < 0) | (table >= count), -1, table)  # so that the product fits
    split = known[:, :, None] * ratio + np.arange(ratio)
    return np.where(known[:, :, None] < 0, -1, split).reshape(len(table), width * ratio).astype(np.int32)


def _slots(pages: KVPages, table: np.ndarray, lens: np.ndarray, slot_mapping: Any) -> np.ndarray:
    """Return the slot of each row's newest token, checked against `slot_mapping` where that is given."""
    size = pages.page_size
    last = np.maximum(lens.astype(np.int64) - 1, 0)
    if table.shape[1] == 0:
        slots = np.full(len(lens), -1, np.int64)
    else:
        page = table[np.arange(len(lens)), last // size].astype(np.int64)
        slots = np.where((lens > 0) & (page >= 0) & (page < pages.num_pages), page * size + last % size, -1)
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
