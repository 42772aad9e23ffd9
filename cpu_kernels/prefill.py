"""Causal attention of several query tokens per sequence over paged K/V, for use without a GPU.

The native form runs every query token as a decode row of its own (same pages, its own length): exact, all features, all
levels, K/V re-read from the cache. The torch form gathers a sequence's pages and calls scaled-dot-product attention,
which is faster for long prompts; it has no LSE, cap, ALiBi or sinks.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from cpu_kernels.arrays import View, integers
from cpu_kernels.backends import why_absent
from cpu_kernels.pages import KVPages
from cpu_kernels.plan import plan_decode
from cpu_kernels.pool import WorkerPool


def prefill(
    pages: KVPages,
    q: Any,
    out: Any,
    block_table: Any,
    seq_lens: Any,
    query_lens: Any,
    *,
    layer: int = 0,
    lse: Any = None,
    backend: str = "native",
    pool: WorkerPool | None = None,
    timeout_s: float = 600.0,
    **options: Any,
) -> None:
    """Attend causally with the last ``query_lens[i]`` tokens of each sequence; their K/V are in the pages already.

    Parameters
    ----------
    pages : KVPages
    q, out : array ``[sum(query_lens), num_q_heads, head_dim]``
        Tokens of all sequences one after the other; fp32, bf16 or fp16.
    block_table : int ``[n, max_pages]``
    seq_lens : int ``[n]``
        Keys of each sequence, its query tokens included.
    query_lens : int ``[n]``
        Query tokens of each sequence; at most its `seq_lens`.
    layer : int
    lse : float32 ``[sum(query_lens), num_q_heads]``, optional
    backend : str
        ``native`` or ``torch``.
    pool : WorkerPool, optional
        Where the native form runs; the calling thread by default.
    timeout_s : float
        Bound of the wait for the pool.
    **options
        `sm_scale`, `window_left`, `logits_soft_cap`, `alibi_slopes`, `sinks`, `isa`, as of `plan_decode`.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, the sequence and the numbers.
    """
    lens, queries = integers("seq_lens", seq_lens, np.int32, 1), integers("query_lens", query_lens, np.int32, 1)
    table = integers("block_table", block_table, np.int32, 2)
    if len(queries) != len(lens) or len(table) != len(lens):
        raise ValueError(f"block_table, seq_lens, query_lens name {len(table)}, {len(lens)}, {len(queries)} sequences")
    bad = (queries < 0) | (queries > lens)
    if bad.any():
        seq = int(np.argmax(bad))
        raise ValueError(f"query_lens[{seq}] is {queries[seq]}, but sequence {seq} has {lens[seq]} tokens")
    view = View("q", q)
    if len(view.shape) != 3 or view.shape[0] != int(queries.sum()):
        raise ValueError(f"q has shape {list(view.shape)}, expected [{int(queries.sum())}, num_q_heads, head_dim]")
    if backend == "torch":
        reason = why_absent("torch")
        if reason:
            raise ValueError(reason)
        run = importlib.import_module("cpu_kernels.torch_backend").prefill
        run(pages, q, out, table, lens, queries, layer, lse, options)
        return
    if backend != "native":
        raise ValueError(f"backend {backend!r} has no prefill; expected 'native' or 'torch'")
    row = np.repeat(np.arange(len(lens)), queries)
    step = np.arange(len(row)) - np.repeat(np.cumsum(queries) - queries, queries)
    plan = plan_decode(pages, table[row], lens[row] - queries[row] + 1 + step, view.shape[1], **options)
    if pool is None:
        plan.run(q, out, lse, layer=layer)
    else:
        pool.submit(plan, q, out, lse, layer=layer).wait(timeout_s)
