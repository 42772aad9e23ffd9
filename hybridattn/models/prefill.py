"""Causal attention of a prompt's chunk over its earlier tokens and itself, through torch's scaled dot product."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, sm_scale: float, window: int | None
) -> torch.Tensor:
    """Attention of the queries at positions ``start ..`` over the keys at positions ``0 .. start + n - 1``.

    Parameters
    ----------
    q : ``[n, num_q_heads, head_dim]``
    k, v : ``[start + n, num_kv_heads, head_dim]``, in the dtype of ``q``
    window : last positions that a query attends to, itself included; None for all

    Returns
    -------
    ``[n, num_q_heads, head_dim]``
    """
    n = q.shape[0]
    mask = None
    if start > 0 or (window is not None and window < n):
        query = torch.arange(start, start + n).unsqueeze(1)
        key = torch.arange(start + n).unsqueeze(0)
        mask = key <= query
        if window is not None:
            mask &= key > query - window
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, tokens, head_dim]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=sm_scale, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)
