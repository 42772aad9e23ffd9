"""The GPU tier's pages on a CUDA card, and page-shaped scratch areas beside them."""

from __future__ import annotations

import torch

from hybridattn.core.shapes import DTYPE_BYTES

SCALED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}  # with a float32 scale per token and KV head
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, **SCALED}
_SCALE_BYTES = 4


def page_bytes(num_kv_heads: int, page_size: int, head_dim: int, dtype: str) -> int:
    """Bytes of K and V of one page of one layer, scales included."""
    per_token = 2 * num_kv_heads * (head_dim * DTYPE_BYTES[dtype] + (_SCALE_BYTES if dtype in SCALED else 0))
    return page_size * per_token


class CudaPages:
    """K and V, ``[num_layers, num_pages, num_kv_heads, page_size, head_dim]`` each, in the Triton kernels' layout.

    int8 and fp8 pages have float32 scales ``[num_layers, num_pages, num_kv_heads, page_size]``. Nothing is cleared:
    slots past a sequence's length are never read.
    """

    def __init__(
        self, num_layers: int, num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: str, device: str
    ) -> None:
        size = (num_layers, num_pages, num_kv_heads, page_size)
        self.num_pages, self.page_size = num_pages, page_size
        kind = TORCH_DTYPES[dtype]
        self._k = torch.empty(*size, head_dim, dtype=kind, device=device)
        self._v = torch.empty(*size, head_dim, dtype=kind, device=device)
        self._scales = tuple(
            torch.empty(size, dtype=torch.float32, device=device) for _ in range(2 if dtype in SCALED else 0)
        )

    @property
    def nbytes(self) -> int:
        return self._k.nbytes + self._v.nbytes + sum(s.nbytes for s in self._scales)

    def release(self) -> None:
        """Give the memory back now, whoever still refers to these pages: nothing may read them any more."""
        for tensor in (self._k, self._v, *self._scales):
            tensor.untyped_storage().resize_(0)

    def cache(self, layer: int | slice = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """``k_cache, v_cache`` of a layer, or of several with an axis more, as the kernels take them."""
        return self._k[layer], self._v[layer]

    def scales(self, layer: int | slice = 0) -> dict[str, torch.Tensor]:
        """``k_scale``, ``v_scale`` of a layer by name; empty for float pages."""
        return {name: s[layer] for name, s in zip(("k_scale", "v_scale"), self._scales, strict=False)}
