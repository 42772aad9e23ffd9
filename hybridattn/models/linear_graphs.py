"""post(l) and pre(l + 1) as CUDA graphs, one per layer and bucket of rows.

    parts --cat--> static out, x, positions [bucket] --graph(l, bucket)--> static result --clone--> x, q, k, v

Rows past those present hold what an earlier step left there: finite numbers that no other row reads. The result is
copied out, because another linear stage (a detour) may come before it has been used up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from hybridattn.models.fused_decoder import FusedDecoder

BUCKETS = (4, 8, 16, 32, 64, 96, 128, 192, 256)
Capture = Callable[[Callable[[], None]], Callable[[], None]]
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def buckets_for(max_rows: int) -> tuple[int, ...]:
    """The buckets that decode rows of at most ``max_rows`` need."""
    needed = [b for b in BUCKETS if b < max_rows]
    return (*needed, *(b for b in BUCKETS[len(needed) : len(needed) + 1]))


class LinearGraphs:
    """Replays graphs where rows fit a bucket; runs the stages eagerly otherwise (prompts), or if capturing failed.

    Attributes
    ----------
    why_eager : str or None
        Why there are no graphs at all.
    """

    def __init__(self, decoder: FusedDecoder, buckets: Sequence[int], capture: Capture | None) -> None:
        self.decoder = decoder
        self.why_eager: str | None = None if capture is not None else "graphs are switched off"
        self._buckets = tuple(buckets) if capture is not None else ()
        self._replay: dict[tuple[int, int], Callable[[], None]] = {}
        s, w = decoder.shape, decoder.weights
        most = max(self._buckets, default=0)
        self._qkv = (s.num_q_heads + 2 * s.num_kv_heads) * s.head_dim
        self.x = torch.zeros(most, s.hidden_size, dtype=w.dtype, device=w.device)
        self.out = torch.zeros(most, s.num_q_heads, s.head_dim, dtype=w.dtype, device=w.device)
        self.positions = torch.zeros(most, dtype=torch.int64, device=w.device)
        self.result = torch.zeros(most, s.hidden_size + self._qkv, dtype=w.dtype, device=w.device)
        if capture is not None:
            self._capture_all(capture)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.x, self.out, self.positions, self.result))

    def _capture_all(self, capture: Capture) -> None:
        try:
            for bucket in sorted(self._buckets, reverse=True):  # the largest first: the others fit its scratch
                for layer in range(self.decoder.shape.num_layers - 1):
                    self._replay[layer, bucket] = capture(self._stage(layer, bucket))
        except RuntimeError as error:
            self._replay.clear()
            self._buckets = ()
            self.why_eager = f"capturing failed: {error}"
            warnings.warn(f"linear stages run without CUDA graphs: {error}", RuntimeWarning, stacklevel=3)

    def _stage(self, layer: int, bucket: int) -> Callable[[], None]:
        x, out, positions, result = (t[:bucket] for t in (self.x, self.out, self.positions, self.result))
        hidden = x.shape[1]

        def run() -> None:
            after = self.decoder.post_attention(layer, out, x)
            result[:, :hidden].copy_(after)
            result[:, hidden:].copy_(self.decoder.project(layer + 1, after, positions))

        return run

    def post_pre(
        self, layer: int, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], positions: Sequence[torch.Tensor]
    ) -> Result:
        """See ``GpuTier.post_pre``."""
        n = sum(len(x) for x in xs)
        bucket = next((b for b in self._buckets if b >= n), None)
        if bucket is None:
            x = self.decoder.post_attention(layer, torch.cat(list(outs)), torch.cat(list(xs)))
            return x, *self.decoder.pre_attention(layer + 1, x, torch.cat(list(positions)))
        for parts, static in ((outs, self.out), (xs, self.x), (positions, self.positions)):
            torch.cat(list(parts), out=static[:n])
        self._replay[layer, bucket]()
        result = self.result[:n].clone()
        hidden = self.x.shape[1]
        return result[:, :hidden], *self.decoder.split(result[:, hidden:])
