"""Attention of several query tokens per sequence over paged K/V, for use without a GPU.

The native form runs every query token as a decode row of its own (same pages, its own keys): exact, all features, all
levels, K/V re-read from the cache. The torch form gathers a sequence's pages and calls scaled-dot-product attention,
which is faster for long prompts.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from cpu_kernels.arrays import View, floats, integers
from cpu_kernels.backends import why_absent
from cpu_kernels.pages import KVPages
from cpu_kernels.plan import DecodePlan, check_table, lengths, plan_decode, results_like
from cpu_kernels.pool import WorkerPool
from cpu_kernels.reach import flags, reach_at, relative_query, sides

_PER_SEQUENCE = ("alibi_slopes", "sinks")


def prefill_attention(
    q: Any,
    pages: KVPages,
    block_table: Any,
    query_start_loc: Any,
    seq_lens: Any,
    *,
    query_lens: Any = None,
    layer: int = 0,
    out: Any = None,
    lse: Any = None,
    causal: Any = True,
    window_left: Any = -1,
    window_right: Any = -1,
    key_start: Any = None,
    query_pos: Any = None,
    with_sinks: Any = True,
    block_size: int | None = None,
    backend: str = "native",
    pool: WorkerPool | None = None,
    timeout_s: float = 600.0,
    **options: Any,
) -> tuple[Any, Any]:
    """Attend with consecutive tokens of each sequence, by default its last ones; their K/V are in the pages already.

    Parameters
    ----------
    q : array ``[num_tokens, num_q_heads, head_dim]``
        Tokens of all sequences one after the other; fp32, bf16 or fp16.
    pages : KVPages
    block_table : int ``[n, max_blocks]``
    query_start_loc : int ``[n + 1]``
        Sequence i's tokens are the rows ``query_start_loc[i]`` to ``query_start_loc[i + 1]``. Those that come before
        its first key give 0 and -inf, as in decode.
    seq_lens : int ``[n]``
        Keys of each sequence, its query tokens included.
    query_lens : int ``[n]``
        In the place of `query_start_loc` (then None): query tokens of each sequence.
    layer : int
    out : array like `q`, optional
    lse : float32 ``[num_tokens, num_q_heads]``, optional
        Where to write; made when absent.
    causal, window_left, window_right, with_sinks
        As of `plan_decode`: one value, or one per sequence.
    key_start : int ``[n]``, optional
        Position of each sequence's first key, 0 by default.
    query_pos : int ``[n]``, optional
        Position of each sequence's first query token; default ``key_start + seq_lens - query_lens``.
    block_size : int, optional
        Tokens of a block of the table, a multiple of the page size.
    backend : str
        ``native``, ``torch``, or another one whose plans run on a pool.
    pool : WorkerPool, optional
        Where the native form runs; the calling thread by default.
    timeout_s : float
        Bound of the wait for the pool.
    **options
        `sm_scale`, `logits_soft_cap`, `alibi_slopes`, `sinks`, `isa`, `split_tokens`, as of `plan_decode`.

    Returns
    -------
    out, lse

    Raises
    ------
    ValueError, TypeError
        Naming the argument, the sequence and the numbers.
    """
    queries, shape = query_lengths(query_lens, query_start_loc), View("q", q).shape
    if len(shape) != 3 or shape[0] != int(queries.sum()):
        raise ValueError(f"q has shape {list(shape)}, expected [{int(queries.sum())}, num_q_heads, head_dim]")
    if backend == "ipex":
        raise ValueError("backend 'ipex' has no prefill; expected 'native', 'torch' or 'numba'")
    if reason := why_absent(backend):
        raise ValueError(reason)
    plan = _plan_tokens(
        pages, block_table, seq_lens, queries, shape[1], causal, window_left, window_right, key_start, query_pos,
        with_sinks, block_size, backend="native" if backend == "torch" else backend, **options,
    )  # fmt: skip
    out, lse = results_like(q, out, lse)
    if backend == "torch":
        importlib.import_module("cpu_kernels.torch_backend").prefill(plan.inputs, q, out, lse, layer, queries)
    elif pool is None:
        plan.run(q, out, lse, layer=layer)
    else:
        pool.submit(plan, q, out, lse, layer=layer).wait(timeout_s)
    return out, lse


def _plan_tokens(
    pages: KVPages, block_table: Any, seq_lens: Any, queries: np.ndarray, heads: int, causal: Any, window_left: Any,
    window_right: Any, key_start: Any, query_pos: Any, with_sinks: Any, block_size: int | None, **options: Any,
) -> DecodePlan:  # fmt: skip
    """Plan a row of decode for every query token; the arguments are those of `prefill_attention`."""
    lens, table = lengths("seq_lens", seq_lens), integers("block_table", block_table, np.int32, 2)
    if len(queries) != len(lens) or len(table) != len(lens):
        raise ValueError(f"block_table, seq_lens, query_lens name {len(table)}, {len(lens)}, {len(queries)} sequences")
    count = lens.astype(np.int64)
    first = relative_query(count, key_start, query_pos, queries.astype(np.int64))
    left, right = sides(causal, window_left, window_right, len(lens))
    counted = flags("with_sinks", with_sinks, len(lens))
    row = np.repeat(np.arange(len(lens)), queries)
    step = np.arange(len(row)) - np.repeat(np.cumsum(queries) - queries, queries)
    table = check_table(
        pages, table[row], lens[row], reach_at(count[row], first[row] + step, left[row], right[row]), block_size
    )
    for name in _PER_SEQUENCE:
        if options.get(name) is not None:
            values = floats(name, options[name], heads, len(lens), absent=name == "sinks")
            options[name] = values[row] if values.ndim == 2 else values
    return plan_decode(
        pages, table, lens[row], heads, causal=False, window_left=left[row], window_right=right[row],
        key_start=np.maximum(-first, 0)[row], query_pos=np.maximum(first, 0)[row] + step, with_sinks=counted[row],
        **options,
    )  # fmt: skip


def query_lengths(query_lens: Any, query_start_loc: Any) -> np.ndarray:
    """Query tokens per sequence, int32, from one of the two ways to say them."""
    if (query_lens is None) == (query_start_loc is None):
        raise ValueError("query_lens and query_start_loc say the same: give one of them")
    if query_start_loc is None:
        return lengths("query_lens", query_lens)
    starts = integers("query_start_loc", query_start_loc, np.int32, 1)
    if not len(starts) or starts[0] != 0:
        raise ValueError(f"query_start_loc begins with {starts[:1].tolist()}, expected 0")
    counts = np.diff(starts)
    if len(counts) and counts.min() < 0:
        seq = int(np.argmin(counts))
        raise ValueError(f"query_start_loc: sequence {seq} starts at {starts[seq]} and ends at {starts[seq + 1]}")
    return counts
