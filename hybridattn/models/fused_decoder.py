"""The linear stages with fused row-wise kernels: norm with residual, rotary embedding in place, gated activation.

Everything is written into memory that is given: fresh for rows that come once, fixed for stages that are kept and
called again (``gpu_kernels.launch.kept``) or captured.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F

import gpu_kernels
from hybridattn.models.decoder import Decoder


class Scratch:
    """What the stages of ``n`` rows write on their way: ``normed`` and ``o`` ``[n, hidden_size]``, ``gate_up``, its
    product ``act``, and ``heads`` ``[n * num_q_heads, head_dim]`` for models that normalise these."""

    def __init__(self, decoder: Decoder, n: int) -> None:
        s, w = decoder.shape, decoder.weights
        widths = (s.hidden_size, s.hidden_size, 2 * s.intermediate_size, s.intermediate_size)
        parts = [torch.empty(n, width, dtype=w.dtype, device=w.device) for width in widths]
        self.normed, self.o, self.gate_up, self.act = parts
        heads = n * s.num_q_heads if w.layers[0].q_norm is not None else 0
        self.heads = torch.empty(heads, s.head_dim, dtype=w.dtype, device=w.device)

    @property
    def nbytes(self) -> int:
        return sum([t.nbytes for t in (self.normed, self.o, self.gate_up, self.act, self.heads)])

    def of(self, n: int) -> Scratch:
        """The same memory for ``n`` rows or fewer."""
        part = Scratch.__new__(Scratch)
        part.normed, part.o, part.gate_up, part.act = (t[:n] for t in (self.normed, self.o, self.gate_up, self.act))
        part.heads = self.heads
        return part


class FusedDecoder(Decoder):
    """A ``Decoder`` for CUDA cards. Two differences a caller must know: ``post_attention`` writes into its residual
    rows ``x``, and q, k, v are views of one projection's output.

    Results differ from ``Decoder`` by rounding (norms round once), and from batch to batch as the matrix products of
    the card's library do.
    """

    @cached_property
    def qkv_width(self) -> int:
        return self._q_size + 2 * self._kv_size

    def project(self, layer: int, x: torch.Tensor, positions: torch.Tensor, qkv: torch.Tensor, at: Scratch) -> None:
        """q, k, v of ``pre_attention`` side by side, into ``qkv`` ``[n, qkv_width]``."""
        w, eps = self.weights.layers[layer], self.config.rms_norm_eps
        gpu_kernels.rms_norm(x, w.input_norm, eps, out=at.normed)
        _product(at.normed, w.qkv, w.qkv_bias, qkv)
        q, k, _ = self.split(qkv)
        for heads, weight in ((q, w.q_norm), (k, w.k_norm)):
            if weight is not None:
                flat = at.heads[: heads.shape[0] * heads.shape[1]]
                gpu_kernels.do(flat.view(heads.shape).copy_, heads)
                gpu_kernels.rms_norm(flat, weight, eps, out=flat)
                gpu_kernels.do(heads.copy_, flat.view(heads.shape))
        turned = qkv[:, : self._q_size + self._kv_size].unflatten(-1, (-1, self.shape.head_dim))
        gpu_kernels.rope(turned, self.cos, self.sin, positions, check_ids=False)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views ``[n, heads, head_dim]`` of q, k, v."""
        parts = qkv.split((self._q_size, self._kv_size, self._kv_size), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_dim)) for part in parts)
        return q, k, v

    def finish(self, layer: int, attention: torch.Tensor, x: torch.Tensor, at: Scratch) -> None:
        """``post_attention``, into ``x``."""
        w = self.weights.layers[layer]
        _product(attention.reshape(x.shape[0], self._q_size), w.o, w.o_bias, at.o)
        gpu_kernels.rms_norm(at.o, w.post_norm, self.config.rms_norm_eps, residual=x, out=at.normed)  # x += o
        _product(at.normed, w.gate_up, None, at.gate_up)
        gpu_kernels.silu_mul(at.gate_up, out=at.act)
        gpu_kernels.do(torch.addmm, x, at.act, w.down.t(), out=x)

    def pre_attention(
        self, layer: int, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = torch.empty(len(x), self.qkv_width, dtype=x.dtype, device=x.device)
        self.project(layer, x, positions, qkv, Scratch(self, len(x)))
        return self.split(qkv)

    def post_attention(self, layer: int, attention: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.finish(layer, attention, x, Scratch(self, len(x)))
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        normed = gpu_kernels.rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps)
        return F.linear(normed, self.weights.head).float()


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        gpu_kernels.do(torch.mm, x, weight.t(), out=out)
    else:
        gpu_kernels.do(torch.addmm, bias, x, weight.t(), out=out)
