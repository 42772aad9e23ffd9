"""The linear stages of a decoder: everything but attention, as functions of rows.

A row's result depends on the rows beside it by rounding alone: a BLAS library chooses its kernel by the number of rows,
and with several threads each gets a share of them. Many libraries round alike from 4 rows on, hence every linear stage
sees a multiple of 4 rows, the last ones padding. Others do so from 16 rows on only (MKL on Intel's processors), where
that many would cost more than they are worth: there a row alone and the same row among others part in the last bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybridattn.core.errors import InputError
from hybridattn.models.config import DecoderConfig
from hybridattn.models.rope import apply_rope, rope_tables
from hybridattn.models.weights import DecoderWeights

ROW_MULTIPLE = 4


class Decoder:
    """Weights, config and rotary tables of one model. Holds no state of any request, so threads may share it.

    Parameters
    ----------
    config, weights : as loaded
    num_positions : rows of the rotary tables; ``config.shape.max_model_len`` if None
    """

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, num_positions: int | None = None) -> None:
        s = config.shape
        if len(weights.layers) != s.num_layers:
            raise InputError(f"weights have {len(weights.layers)} layers, config {s.num_layers}")
        self.config, self.weights, self.shape = config, weights, s
        self.cos, self.sin = rope_tables(config.rope, s.head_dim, num_positions or s.max_model_len, weights.device)
        self._q_size, self._kv_size = s.num_q_heads * s.head_dim, s.num_kv_heads * s.head_dim

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids int64 ``[n]`` -> residual rows ``[n, hidden_size]``."""
        return F.embedding(tokens, self.weights.embed)

    def pre_attention(
        self, layer: int, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm, QKV projection, rotary embedding.

        Parameters
        ----------
        layer : index of the layer
        x : residual rows ``[n, hidden_size]``; left as they are
        positions : int64 ``[n]``, below the table's ``num_positions``

        Returns
        -------
        q : ``[n, num_q_heads, head_dim]``
        k, v : ``[n, num_kv_heads, head_dim]``; ``v`` is a view of the projection's output
        """
        w, s, n = self.weights.layers[layer], self.shape, x.shape[0]
        normed = self._norm(_padded(x), w.input_norm)
        qkv = F.linear(normed, w.qkv, w.qkv_bias)[:n]
        q, k, v = qkv.split((self._q_size, self._kv_size, self._kv_size), dim=-1)
        q, k = q.view(n, s.num_q_heads, s.head_dim), k.view(n, s.num_kv_heads, s.head_dim)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = self._norm(q, w.q_norm), self._norm(k, w.k_norm)
        cos, sin = self.cos[positions], self.sin[positions]
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v.view(n, s.num_kv_heads, s.head_dim)

    def post_attention(self, layer: int, attention: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Output projection, residual, norm, gated MLP, residual.

        Parameters
        ----------
        attention : ``[n, num_q_heads, head_dim]`` in the dtype of ``x``
        x : residual rows ``[n, hidden_size]``; left as they are

        Returns
        -------
        residual rows ``[n, hidden_size]``
        """
        w, n = self.weights.layers[layer], x.shape[0]
        x = _padded(x) + F.linear(_padded(attention.reshape(n, self._q_size)), w.o, w.o_bias)
        gate, up = F.linear(self._norm(x, w.post_norm), w.gate_up).chunk(2, dim=-1)
        return (x + F.linear(F.silu(gate) * up, w.down))[:n]

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm and head: residual rows ``[n, hidden_size]`` -> logits float32 ``[n, vocab_size]``."""
        normed = self._norm(_padded(x), self.weights.final_norm)
        return F.linear(normed, self.weights.head)[: x.shape[0]].float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich 2019) over the last axis, in float32, rounded before the weight is applied."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * scale).to(x.dtype) * weight


def _padded(x: torch.Tensor) -> torch.Tensor:
    """``x [n, ...]`` with zero rows added up to the next multiple of ``ROW_MULTIPLE``; ``x`` itself if it is one."""
    missing = -x.shape[0] % ROW_MULTIPLE
    return F.pad(x, (0, 0, 0, missing)) if missing else x
