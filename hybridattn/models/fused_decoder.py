"""The linear stages with fused row-wise kernels: norm with residual, rotary embedding in place, gated activation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import gpu_kernels
from hybridattn.models.decoder import Decoder


class FusedDecoder(Decoder):
    """A ``Decoder`` for CUDA cards. Two differences a caller must know: ``post_attention`` writes into its residual
    rows ``x``, and q, k, v are views of one projection's output.

    Results differ from ``Decoder`` by rounding (norms round once), and from batch to batch as the matrix products of
    the card's library do.
    """

    def project(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q, k, v of ``pre_attention`` side by side: ``[n, (num_q_heads + 2 num_kv_heads) * head_dim]``."""
        w = self.weights.layers[layer]
        normed = gpu_kernels.rms_norm(x, w.input_norm, self.config.rms_norm_eps)
        qkv = F.linear(normed, w.qkv, w.qkv_bias)
        q, k, _ = self.split(qkv)
        for heads, weight in ((q, w.q_norm), (k, w.k_norm)):
            if weight is not None:
                flat = heads.reshape(-1, self.shape.head_dim)
                heads.copy_(gpu_kernels.rms_norm(flat, weight, self.config.rms_norm_eps).view_as(heads))
            gpu_kernels.rope(heads, self.cos, self.sin, positions, check_ids=False)
        return qkv

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views ``[n, heads, head_dim]`` of q, k, v."""
        parts = qkv.split((self._q_size, self._kv_size, self._kv_size), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_dim)) for part in parts)
        return q, k, v

    def pre_attention(
        self, layer: int, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.split(self.project(layer, x, positions))

    def post_attention(self, layer: int, attention: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w = self.weights.layers[layer]
        o = F.linear(attention.reshape(x.shape[0], self._q_size), w.o, w.o_bias)
        normed = gpu_kernels.rms_norm(o, w.post_norm, self.config.rms_norm_eps, residual=x)  # x += o
        return x.add_(F.linear(gpu_kernels.silu_mul(F.linear(normed, w.gate_up)), w.down))

    def head(self, x: torch.Tensor) -> torch.Tensor:
        normed = gpu_kernels.rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps)
        return F.linear(normed, self.weights.head).float()
