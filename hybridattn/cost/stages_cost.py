"""What the stages of a decoder cost: flops and bytes from shapes, independent of the machine.

With h = hidden, I = intermediate, H_q, H_kv heads, D = head_dim, V = vocabulary, e = element size, n = token rows:

    linear(n)      flops 2 n W          bytes e W + n e A         W = weights of the layer's GEMMs
    head(n)        flops 2 n V h        bytes e V h + n e (h + V)
    decode         flops 4 H_q D t      bytes 2 H_kv D e t + ...  t = keys attended to, summed over rows
    prefill        flops 4 H_q D pairs  bytes 2 H_kv D e t + ...  pairs = q k - q (q - 1) / 2 (causal)

A multiply-add is 2 flops; each GEMM reads its weights once and reads and writes its activations once (A per row);
attention reads each key and value once for all query heads of its group. Norms, RoPE and softmax are not counted: they
are small beside these, and what they cost beyond is the machine's efficiency.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hybridattn.core.errors import InputError
from hybridattn.core.op import Work
from hybridattn.core.shapes import ModelShape, dtype_bytes
from hybridattn.core.stages import Batch
from hybridattn.cost.pricing import Together


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The ``Work`` of each stage of ``shape``.

    Parameters
    ----------
    shape : ModelShape
    dtype : str
        Of weights and activations.
    kv_dtype : str, optional
        Of K and V, default ``dtype``.

    Notes
    -----
    Works of the linear stages are made once per number of rows and shared: do not change them.
    """

    shape: ModelShape
    dtype: str
    kv_dtype: str = ""
    _memo: dict[tuple[str, int], Work] = field(init=False, repr=False, compare=False, default_factory=dict)
    _sizes: tuple[int, int, int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        s, element = self.shape, dtype_bytes(self.dtype)
        kv_element = dtype_bytes(self.kv_dtype or self.dtype)
        q, kv = s.num_q_heads * s.head_dim, 2 * s.num_kv_heads * s.head_dim
        object.__setattr__(self, "_sizes", (q * element, kv * element, kv * kv_element, 4 * q))

    @property
    def kv_token_layer_bytes(self) -> int:
        """K and V of one token at one layer as stored: ``2 H_kv D e_kv`` bytes."""
        return self._sizes[2]

    @property
    def weight_bytes(self) -> int:
        """All weights, norms left out."""
        return self.shape.num_params * dtype_bytes(self.dtype)

    @property
    def qkv_params(self) -> int:
        s = self.shape
        return s.hidden_size * s.head_dim * (s.num_q_heads + 2 * s.num_kv_heads)

    # Linear stages ---------------------------------------------------------------------------------------------------

    def pre(self, rows: int) -> Work:
        """QKV projection of one layer."""
        s = self.shape
        width = s.hidden_size + s.head_dim * (s.num_q_heads + 2 * s.num_kv_heads)
        return self._gemm("pre", rows, self.qkv_params, width)

    def post(self, rows: int) -> Work:
        """Output projection and gated MLP of one layer."""
        s = self.shape
        width = s.num_q_heads * s.head_dim + 3 * s.hidden_size + 3 * s.intermediate_size
        return self._gemm("post", rows, s.layer_params - self.qkv_params, width)

    def linear(self, rows: int) -> Work:
        """post(l) and pre(l + 1): the linear stages of a whole layer."""
        s = self.shape
        width = 4 * s.hidden_size + 3 * s.intermediate_size + s.head_dim * 2 * (s.num_q_heads + s.num_kv_heads)
        return self._gemm("linear", rows, s.layer_params, width)

    def head(self, rows: int) -> Work:
        """Logits of ``rows`` sampled rows. Its kind is ``head``."""
        return self._gemm("head", rows, self.shape.head_params, self.shape.hidden_size + self.shape.vocab_size)

    def embed(self, rows: int) -> Work:
        """Embedding look-up: reads and writes one hidden vector per row. Its kind is ``other``."""
        self._check(rows=rows)
        return Work("other", 0.0, 2 * rows * self.shape.hidden_size * dtype_bytes(self.dtype), rows)

    def first(self, rows: int) -> Work:
        """What comes before layer 0's attention: embedding and pre(0)."""
        return Together(self.embed(rows), self.pre(rows))

    def last(self, rows: int, sampled: int) -> Work:
        """What comes after the last layer's attention: post, and the head for the ``sampled`` rows."""
        return Together(self.post(rows), self.head(sampled)) if sampled else self.post(rows)

    # Attention -------------------------------------------------------------------------------------------------------

    def decode_attention(self, rows: int, kv_tokens: int) -> Work:
        """One new token in each of ``rows`` requests; ``kv_tokens`` keys in all, the new ones included.

        Bytes: K and V of all keys read, q read and output written, the new K and V written.
        """
        if rows < 0 or kv_tokens < rows:
            raise InputError(
                f"decode attention of {rows} rows over {kv_tokens} keys: each row attends at least to itself"
            )
        q, _, kv, flops_per_key = self._sizes
        num_bytes = kv_tokens * kv + rows * (2 * q + kv)
        return Work("decode_attention", float(flops_per_key * kv_tokens), num_bytes, rows, kv_tokens)

    def decode_attention_of(self, seq_lens: Iterable[int]) -> Work:
        """The same from the keys of each request."""
        lens = list(seq_lens)
        return self.decode_attention(len(lens), sum(lens))

    def prefill_attention(self, q_tokens: int, kv_tokens: int) -> Work:
        """``q_tokens`` new tokens at the end of a context of ``kv_tokens`` keys, causal.

        Each pair costs ``4 H_q D`` flops; K and V of the context are read once (they stay in cache between queries).
        """
        if q_tokens < 1 or kv_tokens < q_tokens:
            raise InputError(
                f"prefill attention of {q_tokens} tokens over {kv_tokens} keys: its own tokens are among them"
            )
        q, _, kv, flops_per_key = self._sizes
        pairs = q_tokens * kv_tokens - q_tokens * (q_tokens - 1) // 2
        num_bytes = kv_tokens * kv + q_tokens * (2 * q + kv)
        return Work("prefill_attention", float(flops_per_key * pairs), num_bytes, q_tokens, kv_tokens)

    def attention(self, rows: int, kv_tokens: int, prefill: Iterable[tuple[int, int]] = ()) -> Work:
        """Decode rows and prefill segments ``(q_tokens, kv_tokens)`` of one op: kernels one after the other."""
        parts = [self.decode_attention(rows, kv_tokens)] if rows else []
        parts += [self.prefill_attention(q, kv) for q, kv in prefill]
        return parts[0] if len(parts) == 1 else Together(*parts)

    # Copies ----------------------------------------------------------------------------------------------------------

    def send_qkv(self, rows: int) -> Work:
        """q, k and v of CPU rows go down at one layer: ``rows (H_q + 2 H_kv) D e`` bytes."""
        self._check(rows=rows)
        return Work("copy", 0.0, rows * (self._sizes[0] + self._sizes[1]), rows)

    def fetch_output(self, rows: int) -> Work:
        """Attention output of CPU rows goes up at one layer: ``rows H_q D e`` bytes."""
        self._check(rows=rows)
        return Work("copy", 0.0, rows * self._sizes[0], rows)

    def send_q(self, rows: int) -> Work:
        """q of split rows goes down at one layer: ``rows H_q D e`` bytes."""
        return self.fetch_output(rows)

    def fetch_cold(self, rows: int) -> Work:
        """The cold part of the output of split rows, and its lse, go up: ``rows H_q (D e + 4)`` bytes."""
        self._check(rows=rows)
        return Work("copy", 0.0, rows * (self._sizes[0] + 4 * self.shape.num_q_heads), rows)

    def merge(self, rows: int) -> Work:
        """Two parts of the output of split rows and their lse are read, one is written. Its kind is ``other``."""
        self._check(rows=rows)
        return Work("other", 0.0, rows * (3 * self._sizes[0] + 8 * self.shape.num_q_heads), rows)

    def offload_kv(self, tokens: int) -> Work:
        """K and V of ``tokens`` prompt tokens move between the tiers at one layer (either way: ``load_kv``)."""
        self._check(tokens=tokens)
        return Work("copy", 0.0, tokens * self._sizes[2], tokens)

    def move_request(self, tokens: int) -> Work:
        """K and V of ``tokens`` tokens of a request move between the tiers, all layers."""
        self._check(tokens=tokens)
        return Work("copy", 0.0, tokens * self._sizes[2] * self.shape.num_layers, tokens)

    def _gemm(self, stage: str, rows: int, params: int, width: int) -> Work:
        work = self._memo.get((stage, rows))
        if work is None:
            self._check(rows=rows)
            num_bytes = dtype_bytes(self.dtype) * (params + rows * width) if rows else 0
            kind = "head" if stage == "head" else "linear"
            work = self._memo[stage, rows] = Work(kind, 2.0 * rows * params, num_bytes, rows)
        return work

    @staticmethod
    def _check(**values: int) -> None:
        for name, value in values.items():
            if value < 0:
                raise InputError(f"{name} must not be negative, got {value}")


def batch_attention(cost: ModelCost, batch: Batch) -> Work:
    """GPU attention of a step's rows at one layer: decode rows and prompt chunks as one op."""
    return cost.attention(batch.num_decodes, batch.decode_kv_tokens, batch.chunks)
