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
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attend with one query at `position` to the keys 0..position.

    Parameters
    ----------
    q : ``[num_q_heads, head_dim]``
    k, v : ``[num_keys, num_kv_heads, head_dim]``
        Keys past `position` are not read.
    position : int
        Position of the query; -1 means that there is no key.

    Returns
    -------
    out : float64 ``[num_q_heads, v's head_dim]``
        0 without keys.
    lse : float64 ``[num_q_heads]``
        Natural log of the sum of exponentials, sinks included; -inf without keys.
    """
    heads, dim = q.shape
    first = 0 if window_left < 0 else max(0, position - window_left)
    if position < first:
        return np.zeros((heads, v.shape[-1])), np.full(heads, -np.inf)
    group = heads // k.shape[1]
    keys = np.repeat(k[first : position + 1].astype(np.float64), group, axis=1)
    values = np.repeat(v[first : position + 1].astype(np.float64), group, axis=1)
    scores = np.einsum("hd,nhd->hn", q.astype(np.float64), keys) * (dim**-0.5 if sm_scale is None else sm_scale)
    if logits_soft_cap > 0:
        scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
    if alibi_slopes is not None:
        distance = np.arange(first, position + 1) - position
        scores = scores + np.asarray(alibi_slopes, np.float64)[:, None] * distance
    top = scores.max(axis=1)
    if sinks is not None:
        top = np.maximum(top, np.asarray(sinks, np.float64))
    weights = np.exp(scores - top[:, None])
    mass = weights.sum(axis=1)
    if sinks is not None:
        mass = mass + np.exp(np.asarray(sinks, np.float64) - top)
    return np.einsum("hn,nhd->hd", weights / mass[:, None], values), top + np.log(mass)


def decode_reference(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    **options: object,
) -> tuple[np.ndarray, np.ndarray]:
    """Paged decode attention.

    Parameters
    ----------
    q : ``[n, num_q_heads, head_dim]``
    k_pages, v_pages : ``[num_pages, num_kv_heads, page_size, head_dim]``
        Plain pages.
    block_table : int ``[n, max_pages]``
    seq_lens : int ``[n]``
    **options
        As of `attend`.

    Returns
    -------
    out : float64 ``[n, num_q_heads, head_dim]``
    lse : float64 ``[n, num_q_heads]``
    """
    page_size = k_pages.shape[2]
    out = np.zeros((*q.shape[:2], v_pages.shape[-1]))
    lse = np.full(q.shape[:2], -np.inf)
    for i, length in enumerate(np.asarray(seq_lens).tolist()):
        used = np.asarray(block_table)[i, : -(-length // page_size)]
        k, v = (np.swapaxes(x[used], 1, 2).reshape(-1, x.shape[1], x.shape[-1]) for x in (k_pages, v_pages))
        out[i], lse[i] = attend(q[i], k, v, length - 1, **options)  # type: ignore[arg-type]
    return out, lse


def prefill_reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention of the last ``len(q)`` positions of one sequence.

    Parameters
    ----------
    q : ``[num_tokens, num_q_heads, head_dim]``
    k, v : ``[num_keys, num_kv_heads, head_dim]``
        ``num_keys >= num_tokens``: earlier chunks and the tokens themselves.
    **options
        As of `attend`.

    Returns
    -------
    out : float64 ``[num_tokens, num_q_heads, head_dim]``
    lse : float64 ``[num_tokens, num_q_heads]``
    """
    offset = len(k) - len(q)
    rows = [attend(x, k, v, offset + i, **options) for i, x in enumerate(q)]  # type: ignore[arg-type]
    if not rows:
        return np.zeros((0, q.shape[1], v.shape[-1])), np.zeros((0, q.shape[1]))
    return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])


def merge_reference(outs: list[np.ndarray], lses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Merge partial results (``[..., head_dim]`` and ``[...]``) of disjoint key sets in float64."""
    lse = np.stack([np.asarray(x, np.float64) for x in lses])
    out = np.stack([np.asarray(x, np.float64) for x in outs])
    top = lse.max(axis=0)
    base = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(lse - base)
    mass = weights.sum(axis=0)
    safe = np.where(mass == 0, 1.0, mass)
    merged = (out * weights[..., None]).sum(axis=0) / safe[..., None]
    with np.errstate(divide="ignore"):
        return merged, np.where(mass == 0, -np.inf, base + np.log(safe))
