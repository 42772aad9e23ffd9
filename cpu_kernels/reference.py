"""The oracle: attention in float64 over exactly the allowed keys, in the plainest NumPy that says what is meant.

It defines the contract (`docs/attention_contract.md`) and is used by the tests of every kernel, here and on the GPU.
"""

from __future__ import annotations

import numpy as np


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    position: int,
    *,
    sm_scale: float | None = None,
    window_left: int | None = -1,
    window_right: int | None = -1,
    causal: bool = True,
    logits_soft_cap: float | None = 0.0,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    with_sinks: bool = True,
    key_start: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Attend with one query at `position` to the allowed ones of some keys.

    Parameters
    ----------
    q : ``[num_q_heads, head_dim]``
    k, v : ``[num_keys, num_kv_heads, head_dim]``
        At the positions ``key_start`` and up. Those that are not allowed are not read.
    position : int
        Position of the query.
    window_left, window_right : int
        Allowed keys before and after it; -1 or None for all.
    causal : bool
        No key after the query is allowed.

    Returns
    -------
    out : float64 ``[num_q_heads, v's head_dim]``
        0 without keys.
    lse : float64 ``[num_q_heads]``
        Natural log of the sum of exponentials, sinks included; -inf without keys.
    """
    heads, dim = q.shape
    at = key_start + np.arange(len(k))
    allowed = np.ones(len(k), bool)
    if causal:
        allowed &= at <= position
    if window_left is not None and window_left >= 0:
        allowed &= at >= position - window_left
    if window_right is not None and window_right >= 0:
        allowed &= at <= position + window_right
    if not allowed.any():
        return np.zeros((heads, v.shape[-1])), np.full(heads, -np.inf)
    group = heads // k.shape[1]
    keys = np.repeat(k[allowed].astype(np.float64), group, axis=1)
    values = np.repeat(v[allowed].astype(np.float64), group, axis=1)
    scores = np.einsum("hd,nhd->hn", q.astype(np.float64), keys) * (dim**-0.5 if sm_scale is None else sm_scale)
    if logits_soft_cap:
        scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
    if alibi_slopes is not None:
        scores = scores + np.asarray(alibi_slopes, np.float64)[:, None] * (at[allowed] - position)
    top = scores.max(axis=1)
    sink = np.full(heads, -np.inf) if sinks is None or not with_sinks else np.asarray(sinks, np.float64)
    top = np.maximum(top, sink)
    weights = np.exp(scores - top[:, None])
    mass = weights.sum(axis=1) + np.exp(sink - top)
    return np.einsum("hn,nhd->hd", weights / mass[:, None], values), top + np.log(mass)


def decode_reference(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    *,
    key_start: np.ndarray | None = None,
    query_pos: np.ndarray | None = None,
    **options: object,
) -> tuple[np.ndarray, np.ndarray]:
    """Paged decode attention.

    Parameters
    ----------
    q : ``[n, num_q_heads, head_dim]``
    k_pages, v_pages : ``[num_pages, num_kv_heads, page_size, head_dim]``
        Plain pages.
    block_table : int ``[n, max_pages]``
        Entries of pages without an allowed key may be anything.
    seq_lens : int ``[n]``
    key_start, query_pos : int ``[n]``, optional
        Position of each row's first key (0) and of its query (its last key's).
    **options
        As of `attend`, of one value or one per row.

    Returns
    -------
    out : float64 ``[n, num_q_heads, head_dim]``
    lse : float64 ``[n, num_q_heads]``
    """
    page_size, count = k_pages.shape[2], len(k_pages)
    out = np.zeros((*q.shape[:2], v_pages.shape[-1]))
    lse = np.full(q.shape[:2], -np.inf)
    for i, length in enumerate(np.asarray(seq_lens).tolist()):
        used = np.clip(np.asarray(block_table)[i, : -(-length // page_size)], 0, count - 1)
        k, v = (np.swapaxes(x[used], 1, 2).reshape(-1, x.shape[1], x.shape[-1])[:length] for x in (k_pages, v_pages))
        start = 0 if key_start is None else int(key_start[i])
        position = start + length - 1 if query_pos is None else int(query_pos[i])
        out[i], lse[i] = attend(q[i], k, v, position, key_start=start, **_of_row(options, i))  # type: ignore[arg-type]
    return out, lse


def _of_row(options: dict[str, object], row: int) -> dict[str, object]:
    """Options of one row: those of an axis more than a shared value's have one value per row."""
    own = {"alibi_slopes": 2, "sinks": 2, "with_sinks": 1, "causal": 1, "window_left": 1, "window_right": 1}
    return {n: x[row] if np.ndim(x) == own.get(n) else x for n, x in options.items()}  # type: ignore[index,arg-type]


def prefill_reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    key_start: int = 0,
    query_pos: int | None = None,
    **options: object,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of consecutive queries of one sequence, the last ``len(q)`` positions by default.

    Parameters
    ----------
    q : ``[num_tokens, num_q_heads, head_dim]``
    k, v : ``[num_keys, num_kv_heads, head_dim]``
        Earlier chunks and the tokens themselves; a query that has no key gives 0 and -inf.
    key_start : int
        Position of the first key.
    query_pos : int, optional
        Position of the first query; default ``key_start + num_keys - num_tokens``.
    **options
        As of `attend`.

    Returns
    -------
    out : float64 ``[num_tokens, num_q_heads, head_dim]``
    lse : float64 ``[num_tokens, num_q_heads]``
    """
    first = key_start + len(k) - len(q) if query_pos is None else query_pos
    rows = [attend(x, k, v, first + i, key_start=key_start, **options) for i, x in enumerate(q)]  # type: ignore[arg-type]
    if not rows:
        return np.zeros((0, q.shape[1], v.shape[-1])), np.zeros((0, q.shape[1]))
    return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])


def merge_reference(outs: list[np.ndarray], lses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Merge partial results (``[..., head_dim]`` and ``[...]``) of disjoint key sets in float64.

    A part with lse -inf or +inf is empty; what its out holds does not matter.
    """
    lse = np.stack([np.asarray(x, np.float64) for x in lses])
    lse = np.where(np.isposinf(lse), -np.inf, lse)
    out = np.where(np.isneginf(lse)[..., None], 0.0, np.stack([np.asarray(x, np.float64) for x in outs]))
    top = lse.max(axis=0)
    base = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(lse - base)
    mass = weights.sum(axis=0)
    safe = np.where(mass == 0, 1.0, mass)
    merged = (out * weights[..., None]).sum(axis=0) / safe[..., None]
    with np.errstate(divide="ignore"):
        return merged, np.where(mass == 0, -np.inf, base + np.log(safe))
